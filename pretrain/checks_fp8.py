"""Rules of FP8 and FP4: which hardware, which shapes. `checks` lists them among all rules.

Where FP8 cannot be had, megatron-core would quietly train in BF16 (its `get_fp8_context` is a null context without
Transformer Engine); here such a run is refused.
"""

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwright.conf.choices import AmaxGroup, CudaGraph, DType, GpuKind, PrecisionBackend
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.parallel import linears
from shardwright.pretrain import plan
from shardwright.pretrain.machine import Machine
from shardwright.pretrain.ranges import multiples, value_of

CHECKED_TE = ("2.20.2",)
"""Versions of Transformer Engine whose FP8 state `parallel.mcore.te_fp8` knows."""
RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Recipe -> least compute capability: Ada is the first with FP8 units, Blackwell the first with block scales.

Source: transformer_engine 2.20.2, pytorch/quantization.py (check_fp8_support and its siblings)."""
ATTENTION = {"delayed": (9, 0), "tensorwise": (10, 0), "mxfp8": (10, 0)}
"""Recipe -> least compute capability for attention's products in FP8; with the others nothing computes them.

Source: transformer_engine 2.20.2, pytorch/attention/dot_product_attention/utils.py, get_attention_backend."""
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
        yield from _too_old(config, recipe, gpu.name.upper(), CAPABILITIES[gpu])


def _too_old(config: Config, recipe: str, gpu: str, capability: tuple[int, int]) -> Iterator[Problem]:
    """The problem of a GPU without units for `recipe`, or for attention in it."""
    least, attention = RECIPES[recipe], ATTENTION.get(recipe)
    if config.precision.fp8_dot_product_attention and attention and least <= capability < attention:
        needed, present = (".".join(map(str, version)) for version in (attention, capability))
        rule = f"needs compute capability {needed} with precision.fp8_recipe={recipe}, and {gpu} has {present}"
        fitting = [PRESETS[name] for name, needs in ATTENTION.items() if capability >= needs]
        remedy = " or ".join(["precision.fp8_dot_product_attention=false", *(f"precision={name}" for name in fitting)])
        yield Problem(key="precision.fp8_dot_product_attention", value="true", rule=rule, remedy=f"{remedy} works")
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


@dataclass(frozen=True, slots=True)
class Need:
    """Ranks that must share the amaxes of delayed scaling, because they exchange what those scales quantised."""

    axis: str
    because: str
    holds: Callable[[Config], bool]


NEEDS = (
    Need("tp", "parallel.sp=true gathers activations in FP8", lambda config: config.parallel.sp),
    Need(
        "cp",
        "precision.fp8_dot_product_attention=true passes keys and values around in FP8",
        lambda config: config.precision.fp8_dot_product_attention,
    ),
    Need(
        "dp",
        "precision.fp8_param_gather=true gathers parameters in FP8",
        lambda config: config.precision.fp8_param_gather,
    ),
)
"""Of every other tensor each rank quantises, multiplies and scales back its own part: its scale is free.

Source: transformer_engine 2.20.2, pytorch/module/base.py:1623 (SP); arXiv:2310.18313 (FP8 gathers)."""


def amaxes_are_shared_where_they_must(config: Config) -> Iterator[Problem]:
    if recipe_of(config) != "delayed":
        return
    group = config.precision.amax_group
    for need in NEEDS:
        several = {"tp": config.parallel.tp, "cp": config.parallel.cp, "dp": _dp(config)}[need.axis] > 1
        if several and need.holds(config) and need.axis not in group.name.split("_"):
            works = [choice.name for choice in AmaxGroup if need.axis in choice.name.split("_")]
            rule = f"{need.because}, so the scales must be the same over {need.axis.upper()}"
            remedy = " or ".join(f"precision.amax_group={name}" for name in works) + " works"
            yield Problem(key="precision.amax_group", value=group.name, rule=rule, remedy=remedy)


def _dp(config: Config) -> int:
    places = plan.possible_layout(config)
    return places.dp if places else 1


def exceptions_name_layers(config: Config) -> Iterator[Problem]:
    try:
        names = linears.names(config)
    except ValueError:  # which layers have experts cannot be read: another rule says so
        return
    for glob in config.precision.bf16_layers:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            rule = "matches no linear layer of the model"
            near = ", ".join(linears.near(glob, names))
            yield Problem(key="precision.bf16_layers", value=glob, rule=rule, remedy=f"there are {near}, …")
    for end in ("start", "end"):
        key, most = f"num_layers_at_{end}_in_bf16", config.model.num_layers
        number = getattr(config.precision, key)
        if number > most:
            rule, remedy = f"the model has {most} layers", f"precision.{key}={most} works"
            yield Problem(key=f"precision.{key}", value=number, rule=rule, remedy=remedy)


def exceptions_can_step_out(config: Config) -> Iterator[Problem]:
    precision, graph = config.precision, config.execution.cuda_graph_impl
    excepted = bool(linears.InBf16.of(config).globs)
    if recipe_of(config) is None or not excepted or is_emulated(config):
        return
    key = "precision.bf16_layers" if precision.bf16_layers else "precision.num_layers_at_*_in_bf16"
    if graph is not CudaGraph.none:
        rule = f"recorded layers keep the FP8 region of their recording, and execution.cuda_graph_impl={graph.name}"
        yield Problem(key=key, value="set", rule=rule, remedy="execution.cuda_graph_impl=none works")
    if precision.fp8_param_gather:
        rule = "their parameters would be in FP8 all the same, by precision.fp8_param_gather=true"
        yield Problem(key=key, value="set", rule=rule, remedy="precision.fp8_param_gather=false works")


def samples_can_be_taken(config: Config) -> Iterator[Problem]:
    graph, guard = config.execution.cuda_graph_impl, config.resilience.fp8_guard
    if recipe_of(config) is None:
        if guard:
            rule = "guards a narrow format, and precision.fp8 and precision.fp4 are null"
            yield Problem(
                key="resilience.fp8_guard", value="true", rule=rule, remedy="resilience.fp8_guard=false works"
            )
        return
    if graph is not CudaGraph.none:
        rule = f"nothing can be caught in what is recorded, and execution.cuda_graph_impl={graph.name}"
        if config.telemetry.fp8_interval:
            value, remedy = config.telemetry.fp8_interval, "telemetry.fp8_interval=0 works"
            yield Problem(key="telemetry.fp8_interval", value=value, rule=rule, remedy=remedy)
        if guard:
            yield Problem(key="resilience.fp8_guard", value="true", rule=rule, remedy="execution.cuda_graph_impl=none")
    elif guard and config.telemetry.fp8_interval == 0:
        rule, remedy = "judges samples, and telemetry.fp8_interval=0", "telemetry.fp8_interval=100 works"
        yield Problem(key="resilience.fp8_guard", value="true", rule=rule, remedy=remedy)
    if guard and config.precision.fp8_param_gather:
        rule = "cannot bring a layer to BF16 whose parameters are in FP8, by precision.fp8_param_gather=true"
        remedy = "precision.fp8_param_gather=false works"
        yield Problem(key="resilience.fp8_guard", value="true", rule=rule, remedy=remedy)


def linear_layers_alone_are_emulated(config: Config) -> Iterator[Problem]:
    for name in ("fp8_dot_product_attention", "fp8_param_gather"):
        if not getattr(config.precision, name):
            continue
        rule = ""
        if is_emulated(config):
            rule = "the emulation computes the products of linear layers alone, and precision.backend=emulated"
        elif config.precision.fp8 is None:
            rule = "needs FP8, and precision.fp8=null"
        elif name == "fp8_dot_product_attention" and recipe_of(config) not in ATTENTION:
            rule = f"no kernel computes attention with precision.fp8_recipe={recipe_of(config)}"
        if rule:
            yield Problem(key=f"precision.{name}", value="true", rule=rule, remedy=f"precision.{name}=false works")


def recordings_know_their_group(config: Config) -> Iterator[Problem]:
    # megatron-core 0.19.2, transformer/cuda_graphs.py:2476, asks for the group by itself
    graph, group = config.execution.cuda_graph_impl, config.precision.amax_group
    if recipe_of(config) != "delayed" or is_emulated(config) or group is AmaxGroup.tp_dp_cp:
        return
    if graph in (CudaGraph.local, CudaGraph.transformer_engine):
        rule = f"layers recorded by execution.cuda_graph_impl={graph.name} reduce over tp_dp_cp"
        remedy = "precision.amax_group=tp_dp_cp or execution.cuda_graph_impl=none works"
        yield Problem(key="precision.amax_group", value=group.name, rule=rule, remedy=remedy)


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


def reduction_is_known(config: Config, machine: Machine) -> Iterator[Problem]:
    """`parallel.mcore.te_fp8` takes the place of a function of Transformer Engine, which other versions may change."""
    if recipe_of(config) != "delayed" or is_emulated(config) or config.cluster.gpu is GpuKind.none:
        return
    version = machine.versions.get("transformer_engine")
    if version is not None and not version.startswith(CHECKED_TE):
        rule = f"delayed scaling takes hold of Transformer Engine's reduction, and {version} was not looked at"
        remedy = f"transformer-engine {' or '.join(CHECKED_TE)} works, or precision=fp8_current"
        yield Problem(key="transformer_engine", value=version, rule=rule, remedy=remedy)


def gpus_compute_the_recipe(config: Config, machine: Machine) -> Iterator[Problem]:
    recipe = recipe_of(config)
    if recipe is None or is_emulated(config) or config.cluster.gpu is GpuKind.none:
        return
    if config.cluster.gpu is GpuKind.auto and not machine.gpus:
        rule = "needs a GPU with such units, and this machine shows none"
        yield Problem(key="precision", value=recipe, rule=rule, remedy="precision=bf16 works")
    for gpu in dict.fromkeys(machine.gpus[: plan.local_ranks(config)]):
        if gpu.compute_capability is not None:
            yield from _too_old(config, recipe, gpu.name or "this GPU", gpu.compute_capability)
