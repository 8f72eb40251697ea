"""Rules of how a step is computed: which kernels the device has, and what excludes what. `checks` lists them."""

import os
from collections.abc import Iterator, Mapping

from shardwright.conf.choices import AttentionBackend, CrossEntropy, CudaGraph, DType, GpuKind
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.pretrain import machine as machines
from shardwright.pretrain import process, requirements
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranges import divisors, nearest, value_of

GPU_ALONE = {
    "attention_backend": (AttentionBackend.auto,),
    "cross_entropy": (CrossEntropy.auto, CrossEntropy.unfused),
    "bias_activation_fusion": (None, False),
    "bias_dropout_fusion": (None, False),
    "apply_rope_fusion": (None, False),
    "gradient_accumulation_fusion": (None, False),
    "cuda_graph_impl": (CudaGraph.none,),
    "cpu_offloading_num_layers": (0,),
}
"""Key of `execution` -> its values that a CPU can have too."""


def chunks_divide_the_sequence(config: Config) -> Iterator[Problem]:
    chunks, key = config.execution.cross_entropy_chunks, "execution.cross_entropy_chunks"
    parallel = config.parallel
    held = config.data.seq_length // (max(parallel.cp, 1) * (max(parallel.tp, 1) if parallel.sp else 1))
    if chunks > 1 and held % chunks:
        rule = f"does not divide the {held} tokens of a sequence that a rank holds before the output layer"
        yield Problem(key=key, value=chunks, rule=rule, remedy=nearest(key, chunks, divisors(held)))


def kernels_are_for_the_model(config: Config) -> Iterator[Problem]:
    model, execution = config.model, config.execution
    if execution.bias_activation_fusion and not model.has_fused_activation:
        rule = f"no kernel computes model.activation_func={model.activation_func.name} of this MLP with gate and bias"
        yield Problem(key="execution.bias_activation_fusion", value="true", rule=rule, remedy="null or false works")
    if execution.apply_rope_fusion and not model.has_fused_rope:
        rule = "the kernel for latent attention knows model.rope_type=yarn alone, and heads of a power of two"
        yield Problem(key="execution.apply_rope_fusion", value="true", rule=rule, remedy="null or false works")


def offloading_stands_alone(config: Config) -> Iterator[Problem]:
    model, layers, key = config.model, config.execution.cpu_offloading_num_layers, "execution.cpu_offloading_num_layers"
    if layers < 1:
        return
    if layers >= model.num_layers:
        rule = f"must be less than model.num_layers={model.num_layers}: the last layer's are needed at once"
        yield Problem(key=key, value=layers, rule=rule, remedy=f"{key}={max(0, model.num_layers - 1)} works")
    # Source: megatron-core 0.19.2, transformer_config.py:1707 to 1723
    if config.parallel.pp > 1:
        yield Problem(key=key, value=layers, rule="needs parallel.pp=1", remedy=f"{key}=0 works")
    if model.recompute_granularity is not None:
        rule = "keeps what model.recompute_granularity would compute again"
        yield Problem(key=key, value=layers, rule=rule, remedy=f"{key}=0 or model.recompute_granularity=null works")


def recording_suits_the_run(config: Config) -> Iterator[Problem]:
    graph, key, model = config.execution.cuda_graph_impl, "execution.cuda_graph_impl", config.model
    if graph is CudaGraph.none:
        return

    def problem(rule: str, remedy: str = f"{key}=none works") -> Problem:
        return Problem(key=key, value=graph.name, rule=rule, remedy=remedy)

    if config.data.rampup_batch_size is not None and graph is not CudaGraph.local:
        yield problem("records a fixed number of micro-batches, and data.rampup_batch_size changes it")
    if config.execution.cpu_offloading_num_layers and graph is not CudaGraph.full_iteration:
        yield problem("cannot record layers whose activations leave the GPU (execution.cpu_offloading_num_layers)")
    if model.num_moe_experts is not None and not model.moe_pad_expert_input_to_capacity:
        # Source: megatron-core 0.19.2, transformer_config.py:2512
        rule = "records shapes, and experts get another number of tokens each time"
        fixed = "model.moe_pad_expert_input_to_capacity=true with a model.moe_expert_capacity_factor"
        yield problem(rule, f"{key}=none works, or {fixed}")
    if model.recompute_granularity is not None and graph is not CudaGraph.full_iteration:
        yield problem("cannot record layers of which a part is computed again (model.recompute_granularity)")


def deterministic_has_its_kernels(config: Config) -> Iterator[Problem]:
    execution, key = config.execution, "execution.cross_entropy"
    if execution.deterministic_mode and execution.cross_entropy not in (CrossEntropy.auto, CrossEntropy.unfused):
        rule = "does not repeat bit by bit, and execution.deterministic_mode=true"
        yield Problem(key=key, value=execution.cross_entropy.name, rule=rule, remedy=f"{key}=unfused works")


def loss_kernel_takes_the_format(config: Config) -> Iterator[Problem]:
    kernel, key = config.execution.cross_entropy, "execution.cross_entropy"
    if kernel is CrossEntropy.transformer_engine and config.precision.dtype is DType.fp16:
        # Source: transformer_engine 2.20.2, pytorch/triton/cross_entropy.py
        yield Problem(
            key=key, value=kernel.name, rule="takes fp32 and bf16 logits, not fp16", remedy=f"{key}=auto works"
        )


def kernels_need_a_gpu(config: Config) -> Iterator[Problem]:
    if config.cluster.gpu is GpuKind.none:
        yield from _on_the_cpu(config)


def kernels_are_there(config: Config, machine: Machine) -> Iterator[Problem]:
    if machines.device(config, machine) == "cpu":
        if config.cluster.gpu is not GpuKind.none:  # else said already
            yield from _on_the_cpu(config)
    elif config.execution.attention_backend is AttentionBackend.flash:
        problem = requirements.problem("flash_attn", machine.versions.get("flash_attn"))
        if problem:
            yield problem


def variables_are_deterministic(
    config: Config, machine: Machine, environ: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    if not config.execution.deterministic_mode or machines.device(config, machine) == "cpu":
        return
    for name, value in process.DETERMINISTIC.items():
        if environ.get(name, value) != value:
            rule = "is set in the environment and does not repeat bit by bit (execution.deterministic_mode=true)"
            yield Problem(key=name, value=environ[name], rule=rule, remedy=f"unset it, or {name}={value}")


def _on_the_cpu(config: Config) -> Iterator[Problem]:
    for name, values in GPU_ALONE.items():
        key = f"execution.{name}"
        value = value_of(config, key)
        if value not in values:
            yield Problem(key=key, value=shown(value), rule="needs a GPU", remedy=f"{key}={shown(values[0])} works")
