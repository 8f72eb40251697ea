"""Rules of the optimizer: which combinations exist, whose kernels are there. `checks` lists them among all rules."""

from collections.abc import Iterator

from shardwright.conf.choices import DType, OptimizerFormat, OptimizerKernel, OptimizerKind, StateDType
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.pretrain import machine as machines
from shardwright.pretrain import requirements
from shardwright.pretrain.machine import Machine

STATES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
ON_GPUS_ALONE = {OptimizerKernel.transformer_engine: "Transformer Engine", OptimizerKernel.apex: "apex"}


def states_have_their_kernel(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if not optimizer.use_precision_aware_optimizer:
        for name in STATES:
            kind = getattr(optimizer, name)
            if kind is not StateDType.fp32:
                rule = "needs optimizer.use_precision_aware_optimizer=true"
                remedy = f"optimizer=adam_bf16_states, or optimizer.{name}=fp32"
                yield Problem(key=f"optimizer.{name}", value=kind.name, rule=rule, remedy=remedy)
        return
    key = "optimizer.use_precision_aware_optimizer"
    if optimizer.optimizer is not OptimizerKind.adam:
        rule = f"only Adam keeps its states in other formats, and optimizer.optimizer={optimizer.optimizer.name}"
        yield Problem(key=key, value="true", rule=rule, remedy="optimizer.optimizer=adam or false works")
    if optimizer.kernel in (OptimizerKernel.apex, OptimizerKernel.torch):
        rule = f"only Transformer Engine has such an Adam, and optimizer.kernel={optimizer.kernel.name}"
        yield Problem(key=key, value="true", rule=rule, remedy="optimizer.kernel=auto works")
    if config.precision.dtype is DType.fp32:
        rule, remedy = "has nothing to save in fp32 training", "precision=bf16 works"
        yield Problem(key=key, value="true", rule=rule, remedy=remedy)
    if optimizer.main_grads_dtype is StateDType.bf16 and config.precision.grad_reduce_in_fp32:
        rule = "reads bf16 gradients, and precision.grad_reduce_in_fp32=true makes fp32 ones"
        remedy = "precision.grad_reduce_in_fp32=false works"
        yield Problem(key="optimizer.main_grads_dtype", value="bf16", rule=rule, remedy=remedy)


def muon_trains_in_bf16(config: Config) -> Iterator[Problem]:
    # megatron-core 0.19.2: optimizer/__init__.py:798 refuses fp16; the layer-wise optimizer wraps its parts under bf16
    # alone (layer_wise_optimizer.py:505), and its checkpoint knows 16-bit parameters alone (optimizer.py:1150)
    dtype = config.precision.dtype
    if config.optimizer.optimizer is OptimizerKind.muon and dtype is not DType.bf16:
        rule = f"megatron-core shards Muon in bf16 alone, and precision.dtype={dtype.name}"
        yield Problem(key="optimizer.optimizer", value="muon", rule=rule, remedy="precision=bf16 works")


def buckets_are_adams(config: Config) -> Iterator[Problem]:
    # megatron-core 0.19.2, distrib_optimizer.py, `optimizer_state_keys`: a bucket holds Adam's moments
    kind, key = config.optimizer.optimizer, "checkpoint.optimizer_format"
    if config.checkpoint.optimizer_format is OptimizerFormat.dp_reshardable and kind is not OptimizerKind.adam:
        rule = f"buckets hold the state of Adam alone, and optimizer.optimizer={kind.name}"
        yield Problem(key=key, value="dp_reshardable", rule=rule, remedy=f"{key}=fully_reshardable works")


def muon_has_one_instance(config: Config) -> Iterator[Problem]:
    # Source: megatron-core 0.19.2, optimizer/__init__.py:835
    key, instances = "parallel.num_distributed_optimizer_instances", config.parallel.num_distributed_optimizer_instances
    if config.optimizer.optimizer is OptimizerKind.muon and instances > 1:
        rule = "megatron-core shards Muon by layers, over all data-parallel ranks"
        yield Problem(key=key, value=instances, rule=rule, remedy=f"{key}=1 works")


def overrides_say_something(config: Config) -> Iterator[Problem]:
    for index, override in enumerate(config.optimizer.overrides):
        key = f"optimizer.overrides[{index}]"
        if not override.match.strip():
            rule, remedy = "must not be empty", f"{key}.match='*.linear_fc1.weight' names matrices"
            yield Problem(key=f"{key}.match", value="", rule=rule, remedy=remedy)
        for name in ("lr_mult", "wd_mult"):
            factor = getattr(override, name)
            if factor is not None and factor < 0:
                rule = "must not be negative"
                yield Problem(key=f"{key}.{name}", value=factor, rule=rule, remedy=f"{key}.{name}=0 works")
        if override.lr_mult is None and override.wd_mult is None:
            yield Problem(key=key, value=override.match, rule="changes nothing", remedy="give it lr_mult or wd_mult")


def kernels_are_there(config: Config, machine: Machine) -> Iterator[Problem]:
    optimizer, kernel, on_cpu = config.optimizer, config.optimizer.kernel, machines.device(config, machine) == "cpu"
    if kernel in ON_GPUS_ALONE and on_cpu:
        rule = f"the optimizers of {ON_GPUS_ALONE[kernel]} run on a GPU alone"
        yield Problem(key="optimizer.kernel", value=kernel.name, rule=rule, remedy="optimizer.kernel=auto|torch works")
    elif kernel is OptimizerKernel.apex and machine.versions.get("apex") is None:
        rule = "needs NVIDIA's apex with its compiled extensions, and PyPI's package of that name is another project"
        remedy = "optimizer.kernel=auto|transformer_engine|torch works"  # on a GPU Transformer Engine is there always
        yield Problem(key="optimizer.kernel", value="apex", rule=rule, remedy=remedy)
    if optimizer.use_precision_aware_optimizer and on_cpu:
        rule = "is an Adam of Transformer Engine, which runs on a GPU alone"
        remedy = "optimizer.use_precision_aware_optimizer=false works"
        yield Problem(key="optimizer.use_precision_aware_optimizer", value="true", rule=rule, remedy=remedy)


def muon_is_there(config: Config, machine: Machine) -> Iterator[Problem]:
    if config.optimizer.optimizer is OptimizerKind.muon:
        problem = requirements.problem("emerging_optimizers", machine.versions.get("emerging_optimizers"))
        if problem:
            yield problem
