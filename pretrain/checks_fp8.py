"""Rules of FP8 and FP4: which hardware, which shapes. `checks` lists them among all rules.

Where FP8 cannot be had, megatron-core would quietly train in BF16 (its `get_fp8_context` is a null context without
Transformer Engine); here such a run is refused.
"""

from collections.abc import Iterator

from shardwright.conf.choices import DType, GpuKind, PrecisionBackend
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.pretrain import plan
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranges import multiples, value_of

RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Recipe -> least compute capability: Ada is the first with FP8 units, Blackwell the first with block scales.

Source: transformer_engine 2.20.2, pytorch/quantization.py (check_fp8_support and its siblings)."""
PRESETS = {
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_current",
    "blockwise": "fp8_blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""Recipe -> its choice of `precision`."""
CAPABILITIES = {GpuKind.h100: (9, 0), GpuKind.h200: (9, 0), GpuKind.b200: (10, 0), GpuKind.gb200: (10, 0)}
WIDTH, TOKENS = 16, 8
"""Transformer Engine, on each rank: the last dimension is a multiple of 16 (of 32 where small blocks have scales of
their own), the product of the leading ones of 8."""


def recipe_of(config: Config) -> str | None:
    """The narrow format's recipe: a key of `RECIPES`; None without one."""
    precision = config.precision
    if precision.fp4 is not None:
        return "nvfp4"
    return None if precision.fp8 is None else precision.fp8_recipe.name


def is_emulated(config: Config) -> bool:
    """Whether no hardware is asked for a narrow format."""
    return config.precision.backend is PrecisionBackend.emulated


def emulation_has_something_to_do(config: Config) -> Iterator[Problem]:
    if is_emulated(config) and recipe_of(config) is None:
        rule = "emulates a narrow format, and precision.fp8 and precision.fp4 are null"
        remedy = "precision=fp8_delayed precision.backend=emulated works"
        yield Problem(key="precision.backend", value="emulated", rule=rule, remedy=remedy)


def narrow_formats_run_on_bf16(config: Config) -> Iterator[Problem]:
    recipe, dtype = recipe_of(config), config.precision.dtype
    if recipe is not None and dtype is not DType.bf16 and not is_emulated(config):
        rule = f"runs on top of precision.dtype=bf16, not {dtype.name}"
        yield Problem(key="precision", value=recipe, rule=rule, remedy="precision.dtype=bf16 works")


def one_narrow_format(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp4 is not None and precision.fp8 is not None:
        rule = f"is FP4 together with precision.fp8={precision.fp8.name}"
        remedy = "precision.fp8=null or precision.fp4=null works"
        yield Problem(key="precision.fp4", value=precision.fp4.name, rule=rule, remedy=remedy)


def recipe_suits_the_cluster(config: Config) -> Iterator[Problem]:
    recipe, gpu = recipe_of(config), config.cluster.gpu
    if recipe is None or is_emulated(config):
        return
    if gpu is GpuKind.none:
        able = "|".join(device.name for device, has in CAPABILITIES.items() if has >= RECIPES[recipe])
        rule, remedy = (
            "needs a GPU with such units, and cluster.gpu=none",
            f"precision=bf16, or cluster.gpu=auto|{able}, or precision.backend=emulated",
        )
        yield Problem(key="precision", value=recipe, rule=rule, remedy=remedy)
    elif gpu in CAPABILITIES:
        yield from _too_old(recipe, gpu.name.upper(), CAPABILITIES[gpu])


def _too_old(recipe: str, gpu: str, capability: tuple[int, int]) -> Iterator[Problem]:
    """The problem of a GPU without units for `recipe`."""
    least = RECIPES[recipe]
    if capability < least:
        fitting = [PRESETS[name] for name, needs in RECIPES.items() if capability >= needs]
        rule = f"needs compute capability {least[0]}.{least[1]}, and {gpu} has {capability[0]}.{capability[1]}"
        remedy = f"precision={'|'.join(['bf16', *fitting])} works"
        yield Problem(key="precision", value=recipe, rule=rule, remedy=remedy)


def shapes_are_multiples(config: Config) -> Iterator[Problem]:
    model, tp, data = config.model, config.parallel.tp, config.data
    etp = tp if config.parallel.etp is None else config.parallel.etp
    if recipe_of(config) is None or is_emulated(config) or min(tp, etp, config.parallel.cp) < 1:
        return
    width_step = WIDTH * 2 if recipe_of(config) in ("mxfp8", "nvfp4") else WIDTH
    for key, widths, split, step in (
        ("model.hidden_size", (model.hidden_size,), 1, width_step),
        ("model.ffn_hidden_size", (model.ffn_hidden_size,), tp, width_step * tp),
        ("model.moe_ffn_hidden_size", (model.moe_ffn_hidden_size or 0,), etp, width_step * etp),
        (
            "model.moe_shared_expert_intermediate_size",
            (model.moe_shared_expert_intermediate_size or 0,),
            tp,
            width_step * tp,
        ),
        *_attention_widths(model, tp, width_step),
    ):
        odd = [width // split for width in widths if width % split == 0 and width // split % width_step]
        if odd:
            value = value_of(config, key)
            rule = f"gives a matrix {odd[0]} wide on each rank, and FP8 needs multiples of {width_step}"
            remedy = multiples(key, value, step) if value % step else "a smaller parallel.tp works"
            yield Problem(key=key, value=value, rule=rule, remedy=remedy)
    split = config.parallel.cp * (tp if config.parallel.sp else 1)
    tokens = data.micro_batch_size * data.seq_length / split
    if tokens % TOKENS:
        rule = f"gives {tokens:g} tokens at once on each rank, and FP8 needs multiples of {TOKENS}"
        remedy = multiples("data.seq_length", data.seq_length, TOKENS * split)
        yield Problem(key="data.seq_length", value=data.seq_length, rule=rule, remedy=remedy)


def _attention_widths(model: Model, tp: int, step: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Key, matrix widths that follow from it, over how many ranks they are split, step of values that fit."""
    heads = model.num_attention_heads
    if not model.multi_latent_attention:
        yield "model.kv_channels", (heads * model.kv_channels, plan.qkv_width(model)), tp, step
        return
    rotary, key, value = model.qk_pos_emb_head_dim or 0, model.qk_head_dim or 0, model.v_head_dim or 0
    yield "model.q_lora_rank", (model.q_lora_rank or 0,), 1, step
    yield "model.kv_lora_rank", (model.kv_lora_rank or 0,), 1, step
    yield "model.qk_pos_emb_head_dim", ((model.kv_lora_rank or 0) + rotary,), 1, step
    yield "model.qk_head_dim", (heads * (key + rotary),), tp, step
    yield "model.v_head_dim", (heads * value, heads * (key + value)), tp, step


def gpus_compute_the_recipe(config: Config, machine: Machine) -> Iterator[Problem]:
    recipe = recipe_of(config)
    if recipe is None or is_emulated(config) or config.cluster.gpu is GpuKind.none:
        return
    if config.cluster.gpu is GpuKind.auto and not machine.gpus:
        rule = "needs a GPU with such units, and this machine shows none"
        yield Problem(key="precision", value=recipe, rule=rule, remedy="precision=bf16 works")
    for gpu in dict.fromkeys(machine.gpus[: plan.local_ranks(config)]):
        if gpu.compute_capability is not None:
            yield from _too_old(recipe, gpu.name or "this GPU", gpu.compute_capability)
