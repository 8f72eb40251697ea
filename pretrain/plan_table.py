"""The plan as a person reads it: four short sections, ranks grouped by node."""

import itertools

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.conf.compose import shown
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.data.batch_size import BatchSizes
from shardwright.parallel.stages import Chunk
from shardwright.pretrain import plan
from shardwright.pretrain.plan import Plan
from shardwright.pretrain.reliability import Reliability
from shardwright.pretrain.summary import count

MOST_RANK_ROWS = 16
"""Up to this many ranks have a row each; larger worlds have a row per node."""
MOST_NODE_ROWS = 8
"""Of more nodes the first ones and the last one are shown."""


def show(planned: Plan, console: Console) -> None:
    """Print the plan."""
    console.print(render(planned))


def render(planned: Plan) -> RenderableType:
    """The sections, one below the other."""
    return Group(
        *_section("run", _run(planned)),
        *_section("model", _model(planned)),
        *_section("batch", _batch(planned)),
        *_section("precision", _precision(planned)),
        *_section("layout", _layout(planned)),
        Padding(_rank_map(planned), (0, 0, 1 if planned.reliability else 0, 2)),
        *(_reliability(planned.reliability) if planned.reliability else ()),
    )


def flops(number: float) -> str:
    """FLOPs with their usual prefixes: 51.47 GFLOP."""
    for limit, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:,.2f} {prefix}FLOP"
    return f"{number:g} FLOP"


def _section(title: str, rows: dict[str, str]) -> list[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=18)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return [Text(title, style="bold"), Padding(table, (0, 0, 1 if title != "layout" else 0, 2))]


def _run(planned: Plan) -> dict[str, str]:
    config = planned.config
    return {"name": config.run.name, "folder": config.run.dir, "data": shown(config.data.source)}


def _model(planned: Plan) -> dict[str, str]:
    model = planned.config.model
    plain, gated = ("SiLU", "GELU", "GELU (tanh)"), ("SwiGLU", "GEGLU", "GEGLU (tanh)")
    activation = dict(zip(("silu", "gelu", "gelu_tanh"), gated if model.gated_linear_unit else plain, strict=True))
    tied = "tied" if model.share_embeddings_and_output_weights else "untied"
    padded = f", padded to {planned.padded_vocab_size:,}" if planned.padded_vocab_size != model.vocab_size else ""
    rows = {
        "parameters": f"{planned.parameters:,} ({count(planned.parameters)})",
        "layers": f"{model.num_layers} of width {model.hidden_size:,}, MLP {model.ffn_hidden_size:,} "
        f"({activation[shown(model.activation_func)]}), {shown(model.normalization)}",
        "attention": _attention(model),
        "vocabulary": f"{model.vocab_size:,}{padded}; output layer {tied}",
        "FLOPs per token": f"{flops(planned.flops_per_token)} (forward and backward, causal)",
    }
    if model.num_moe_experts is not None:
        rows["parameters"] += f", {count(planned.active_parameters)} of them active for a token"
        rows["experts"] = _experts(model)
    if model.mtp_num_layers is not None:
        rows["multi-token prediction"] = (
            f"{model.mtp_num_layers} layer{'s' * (model.mtp_num_layers > 1)} of {count(planned.mtp_parameters)} more "
            f"parameters; {flops(planned.mtp_flops_per_token)} of the FLOPs"
        )
    return rows


def _attention(model: Model) -> str:
    heads = f"{model.num_attention_heads} heads"
    if model.multi_latent_attention:
        ranks = f"queries {model.q_lora_rank or model.hidden_size}, keys and values {model.kv_lora_rank}"
        widths = f"{model.qk_head_dim} + {model.qk_pos_emb_head_dim} rotary, values {model.v_head_dim}"
        return f"{heads} of {widths}; latent: {ranks}"
    return f"{heads} of {model.kv_channels}, {model.num_query_groups} query groups, " + shown(
        model.position_embedding_type
    )


def _experts(model: Model) -> str:
    shared = model.moe_shared_expert_intermediate_size
    return (
        f"{model.num_moe_experts} of {model.moe_ffn_hidden_size:,} in {sum(model.moe_layers)} layers, "
        f"{model.moe_router_topk} for a token{f', and shared ones of {shared:,}' if shared else ''}"
    )


def _batch(planned: Plan) -> dict[str, str]:
    steps, schedule = planned.batch, planned.config.schedule
    ramp = _ramp(planned.config)
    return {
        **({"ramp": ramp} if ramp else {}),
        "global batch": f"{steps.global_batch_size} samples = {steps.num_microbatches} micro-batches "
        f"x {steps.micro_batch_size} x {steps.dp_size} data-parallel ranks",
        "one step": f"{steps.tokens_per_step:,} tokens in sequences of {planned.config.data.seq_length:,}, "
        f"{flops(planned.flops_per_token * steps.tokens_per_step)}",
        "the run": f"{schedule.train_iters:,} steps, {count(planned.train_tokens)} tokens, "
        f"{flops(planned.train_flops)}",
    }


def _ramp(config: Config) -> str:
    """How the batch size grows; empty where it does not."""
    if config.data.rampup_batch_size is None:
        return ""
    start, increment, samples = config.data.rampup_batch_size
    steps = BatchSizes.of(config.data).steps_to(samples)
    return f"from {start} by {increment} over the first {samples:,} samples ({steps:,} steps), then"


def _precision(planned: Plan) -> dict[str, str]:
    precision = planned.config.precision
    gradients = "fp32" if precision.grad_reduce_in_fp32 else shown(precision.dtype)
    return {
        "parameters": f"{shown(precision.dtype)}, main weights fp32, gradients reduced in {gradients}",
        "FP8": plan.fp8_name(planned.config) or "none",
        **(planned.narrow.in_words() if planned.narrow else {}),
    }


def _layout(planned: Plan) -> dict[str, str]:
    places, config = planned.layout, planned.config
    lightest, heaviest = min(planned.parameters_per_rank), max(planned.parameters_per_rank)
    chunks = f" of {places.vpp} chunks" if places.vpp > 1 else ""
    context = f"CP {places.cp}, " if places.cp > 1 else ""
    sp = " with SP" if config.parallel.sp else ""
    rows = {
        "ranks": f"{places.world_size} on {config.cluster.nodes} node{'s' * (config.cluster.nodes > 1)}",
        "parallelism": f"TP {places.tp}{sp}, {context}PP {places.pp}{chunks}, DP {places.dp}",
    }
    if places.ep > 1 or places.etp != places.tp:
        rows["of experts"] = f"ETP {places.etp}, EP {places.ep}, PP {places.pp}, DP {places.edp}"
    if places.instances > 1:
        size = places.world_size // places.instances
        rows["optimizer"] = f"{places.instances} instances of {size} ranks, each with all states and main weights"
    if config.cluster.nodes > 1:
        rows["across nodes"] = _crossing(planned)
    if places.pp > 1:
        rows["layers of stage"] = "\n".join(_stages(planned))
    rows["weights per rank"] = " to ".join(dict.fromkeys((count(lightest), count(heaviest))))
    return rows


def _reliability(expected: Reliability) -> list[RenderableType]:
    """What failures cost, from which assumptions, and by how much it would be more or less."""
    best = expected.best()
    rows = {
        "failures": f"one in {_time(expected.seconds_between_failures)}: {expected.failures_per_gpu_day:g} per GPU and "
        f"day on {expected.gpus:,} GPUs",
        "a save": f"every {expected.save_interval:,} steps of {expected.step_seconds:.2f} s, "
        f"{_time(expected.save_interval * expected.step_seconds)}; training waits {_time(expected.save_stall_seconds)}",
        "a restart": f"{_time(expected.restart_seconds)} from a failure to the next step",
        "time that trains": f"{expected.ettr:.1%} = t / (M e^(R/M) (e^((t+s)/M) - 1))   (ETTR, Daly 2006)",
        "best": f"{best.ettr:.1%} with checkpoint.save_interval={best.save_interval} "
        f"({_time(best.save_interval * best.step_seconds)})",
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, header_style="dim")
    factors = (0.5, 1.0, 2.0)
    table.add_column("ETTR")
    for restart in factors:
        table.add_column(f"restart in {_time(expected.restart_seconds * restart)}", justify="right")
    for interval in factors:
        varied = [expected.varied(interval=interval, restart=restart) for restart in factors]
        table.add_row(f"saved every {varied[0].save_interval:,} steps", *(f"{item.ettr:.1%}" for item in varied))
    return [*_section("failures and saves", rows), Padding(table, (0, 0, 0, 2))]


def _time(seconds: float) -> str:
    """Seconds in their largest unit: 3.2 days."""
    for limit, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:.3g} {unit}"
    return f"{seconds:.3g} s"


def _crossing(planned: Plan) -> str:
    """Which axes' groups stand on several nodes, and on how many."""
    places, per_node = planned.layout, plan.local_ranks(planned.config)
    axes = {"TP": "tp", "CP": "cp", "EP": "ep", "DP": "dp", "PP": "pp"}
    nodes = {title: places.num_nodes(name, per_node) for title, name in axes.items() if getattr(places, name) > 1}
    inside = [title for title, number in nodes.items() if number == 1]
    across = [f"{title} over {number}" for title, number in nodes.items() if number > 1]
    return ", ".join(across or ["no group"]) + (f"; inside a node {', '.join(inside)}" if inside else "")


def _stages(planned: Plan) -> list[str]:
    """A line for each run of pipeline ranks that hold equally much: `1-2 (4 each): 4-11 | 20-27`."""
    sizes = [[_held(chunk, str(len(chunk.layers))) for chunk in chunks] for chunks in planned.stages]
    lines = []
    for _, run in itertools.groupby(range(len(sizes)), key=lambda rank: sizes[rank]):
        ranks = list(run)
        pairs = list(zip(planned.stages[ranks[0]], planned.stages[ranks[-1]], strict=True))
        held = [_held(first, _span(range(first.layers.start, last.layers.stop) or [0])) for first, last in pairs]
        each = dict.fromkeys(str(len(first.layers)) for first, _ in pairs)
        together = f" ({' | '.join(each)} each)" if len(ranks) > 1 else ""
        lines.append(f"{_span(ranks)}{together}: {' | '.join(held)}")
    return lines


def _held(chunk: Chunk, layers: str) -> str:
    """What a chunk holds, its layers in these words."""
    mtp = f"{chunk.num_mtp_layers} MTP" if chunk.num_mtp_layers else ""
    parts = ("embedding" * chunk.embedding, layers if chunk.layers else "", mtp, "loss" * chunk.loss)
    return " + ".join(part for part in parts if part)


def _rank_map(planned: Plan) -> Table:
    """Which rank stands where; a row per rank, in large worlds a row per node."""
    places, nodes = planned.layout, planned.config.cluster.nodes
    per_node = places.world_size // nodes
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, header_style="dim")
    optional = {"cp": places.cp, "etp": places.etp if places.ep > 1 else 1, "ep": places.ep}
    axes = [axis for axis in ("tp", "cp", "dp", "pp", "etp", "ep") if optional.get(axis, 2) > 1]
    for name in ("node", "rank", *axes):
        table.add_column(name, justify="right")
    each_rank = places.world_size <= MOST_RANK_ROWS
    shown_nodes = list(range(nodes))
    if nodes > MOST_NODE_ROWS:
        shown_nodes = [*range(MOST_NODE_ROWS - 2), nodes - 1]
    for node in shown_nodes:
        if nodes > MOST_NODE_ROWS and node == nodes - 1:
            table.add_row(*["…"] * (2 + len(axes)))
        ranks = range(node * per_node, (node + 1) * per_node)
        for row in [range(rank, rank + 1) for rank in ranks] if each_rank else [ranks]:
            inside = [places.coordinates(rank) for rank in row]
            table.add_row(
                str(node) if row[0] == ranks[0] else "",
                _span(row),
                *(_span(sorted({getattr(place, axis) for place in inside})) for axis in axes),
            )
    return table


def _span(numbers: range | list[int]) -> str:
    """`3`, `0-7` of neighbours, `0,3` of others."""
    first, last = numbers[0], numbers[-1]
    if last - first != len(numbers) - 1:
        return ",".join(map(str, numbers))
    return str(first) if first == last else f"{first}-{last}"
