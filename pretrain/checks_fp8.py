"""Rules of FP8: which hardware, which shapes. `checks` lists them among all rules.

Where FP8 cannot be had, megatron-core would quietly train in BF16 (its `get_fp8_context` is a null context without
Transformer Engine); here such a run is refused.
"""

from collections.abc import Iterator

from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config, Device, DType
from shardwright.pretrain import plan
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranges import multiples, value_of

LEAST_CAPABILITY = (8, 9)
"""Ada is the first with FP8 units."""
WIDTH, TOKENS = 16, 8
"""Transformer Engine, on each rank: the last dimension is a multiple of 16, the product of the leading ones of 8."""


def fp8_runs_on_bf16(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp8 is not None and precision.dtype is not DType.bf16:
        rule, remedy = "runs on top of precision.dtype=bf16", "precision.dtype=bf16 works"
        yield Problem(key="precision.fp8", value=precision.fp8.name, rule=rule, remedy=remedy)


def fp8_has_its_hardware(config: Config) -> Iterator[Problem]:
    if config.precision.fp8 is not None and config.cluster.gpu is Device.none:
        able = "|".join(device.name for device in Device if device is not Device.none)
        rule, remedy = "FP8 needs a GPU with FP8 units, and cluster.gpu=none", f"precision=bf16, or cluster.gpu={able}"
        yield Problem(key="precision.fp8", value=config.precision.fp8.name, rule=rule, remedy=remedy)


def shapes_are_multiples(config: Config) -> Iterator[Problem]:
    model, tp, data = config.model, config.parallel.tp, config.data
    if config.precision.fp8 is None or tp < 1:
        return
    heads_width = model.num_attention_heads * model.kv_channels
    for key, widths, split, step in (
        ("model.hidden_size", (model.hidden_size,), 1, WIDTH),
        ("model.ffn_hidden_size", (model.ffn_hidden_size,), tp, WIDTH * tp),
        ("model.kv_channels", (heads_width, plan.qkv_width(model)), tp, WIDTH),
    ):
        odd = [width // split for width in widths if width % split == 0 and width // split % WIDTH]
        if odd:
            value = value_of(config, key)
            rule = f"gives a matrix {odd[0]} wide on each rank, and FP8 needs multiples of {WIDTH}"
            remedy = multiples(key, value, step) if value % step else "a smaller parallel.tp works"
            yield Problem(key=key, value=value, rule=rule, remedy=remedy)
    split = tp if config.parallel.sp else 1
    tokens = data.micro_batch_size * data.seq_length / split
    if tokens % TOKENS:
        rule = f"gives {tokens:g} tokens at once on each rank, and FP8 needs multiples of {TOKENS}"
        remedy = multiples("data.seq_length", data.seq_length, TOKENS * split)
        yield Problem(key="data.seq_length", value=data.seq_length, rule=rule, remedy=remedy)


def gpus_compute_fp8(config: Config, machine: Machine) -> Iterator[Problem]:
    if config.precision.fp8 is None or config.cluster.gpu is Device.none:
        return
    value = config.precision.fp8.name
    if config.cluster.gpu is Device.auto and not machine.gpus:
        rule = "FP8 needs a GPU with FP8 units, and this machine shows none"
        yield Problem(key="precision.fp8", value=value, rule=rule, remedy="precision=bf16 works")
    for gpu in dict.fromkeys(machine.gpus[: plan.local_ranks(config)]):
        if gpu.compute_capability is not None and gpu.compute_capability < LEAST_CAPABILITY:
            major, minor = gpu.compute_capability
            least = ".".join(map(str, LEAST_CAPABILITY))
            rule = f"needs compute capability {least}, and {gpu.name or 'this GPU'} has {major}.{minor}"
            yield Problem(key="precision.fp8", value=value, rule=rule, remedy="precision=bf16 works")
