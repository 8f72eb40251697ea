"""What a configuration amounts to, computed on any machine in about a second: layout, batch, parameters, FLOPs.

Everything here is integers from the configuration alone: no torch, no GPU, no process group. The numbers are frozen
objects, so that a config stays what the user wrote.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.conf.choices import Fp8Recipe
from shardwright.conf.compose import shown
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.data.batch_size import BatchSizes
from shardwright.parallel import linears
from shardwright.parallel.layout import DENSE, EXPERT, Layout
from shardwright.parallel.linears import InBf16
from shardwright.parallel.stages import Chunk, Split, Stages
from shardwright.pretrain import model_size, reliability
from shardwright.pretrain.model_size import Weights
from shardwright.pretrain.model_size import count_parameters as count_parameters
from shardwright.pretrain.model_size import padded_vocab_size as padded_vocab_size
from shardwright.pretrain.model_size import qkv_width as qkv_width
from shardwright.pretrain.reliability import Reliability

_PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIE": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}
"""Dense BF16 FLOP/s without sparsity. Source: NVIDIA's data sheets of A100, H100 (SXM and PCIe), H200, GH200,
HGX B200, GB200."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one optimizer step is cut, with a ramp of the batch size at its end.

    All counts are samples but the last, which is tokens of the whole world.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_size: int
    num_microbatches: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True)
class Narrow:
    """Which linear layers compute in a narrow format, and which ranks share the scales of delayed scaling."""

    layers: int
    """Linear layers of the model that a recipe is for."""
    in_bf16: tuple[str, ...]
    """Names of those that compute in BF16 all the same."""
    amax_group: str | None
    """Name of the group that shares scales; None without delayed scaling."""
    amax_ranks: tuple[tuple[int, ...], ...]
    """The groups of that name."""

    def in_words(self) -> dict[str, str]:
        """For people: what the start table says."""
        words = {"linear layers": f"{self.layers - len(self.in_bf16)} of {self.layers}"}
        if self.in_bf16:
            words["in bf16"] = f"{len(self.in_bf16)} ({', '.join(self.in_bf16[:2])}{', …' * (len(self.in_bf16) > 2)})"
        if self.amax_group is not None:
            groups = " ".join("[" + ",".join(map(str, ranks)) + "]" for ranks in self.amax_ranks[:4])
            more = f" … {len(self.amax_ranks)} groups" if len(self.amax_ranks) > 4 else ""
            words["amaxes shared by"] = f"{self.amax_group} {groups}{more}"
        return words


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that follows from its configuration."""

    config: Config
    layout: Layout
    stages: Stages
    """What every pipeline rank holds, first rank first."""
    batch: BatchPlan
    padded_vocab_size: int
    parameters: int
    """Of the model, without layers of multi-token prediction."""
    active_parameters: int
    """Those of them that one token passes."""
    mtp_parameters: int
    """Of the layers of multi-token prediction."""
    parameters_per_rank: tuple[int, ...]
    """Of one rank of each pipeline stage, first stage first."""
    flops_per_token: float
    """Of forward and backward, with multi-token prediction."""
    mtp_flops_per_token: float
    """What multi-token prediction adds to that."""
    narrow: Narrow | None
    """What computes in a narrow format; None without one."""
    train_samples: int
    """Samples of the whole run."""
    train_tokens: int
    """Tokens of the whole run."""
    reliability: Reliability | None
    """What failures will cost; None where the GPU is not known."""

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token * self.train_tokens


def make_plan(config: Config) -> Plan:
    """The plan of a configuration that `checks.config_problems` has passed."""
    model, samples = config.model, BatchSizes.of(config.data).consumed_after(config.schedule.train_iters)
    whole, mtp_flops = model_size.weights(model), model_size.mtp_flops_per_token(model, config.data.seq_length)
    places, stages = layout(config), Split.of(config).stages()
    steps = batch(config)
    flops_per_token = model_size.flops_per_token(model, config.data.seq_length) + mtp_flops
    return Plan(
        config=config,
        layout=places,
        stages=stages,
        batch=steps,
        padded_vocab_size=padded_vocab_size(model),
        parameters=whole.total,
        active_parameters=whole.active(model),
        mtp_parameters=model_size.multi_token_prediction(model).total,
        parameters_per_rank=tuple(
            stage.per_rank(places.tp, places.ep, places.etp) for stage in stage_weights(model, stages)
        ),
        flops_per_token=flops_per_token,
        mtp_flops_per_token=mtp_flops,
        narrow=narrow(config, places),
        train_samples=samples,
        train_tokens=samples * config.data.seq_length,
        reliability=reliability.of(
            config, step_flops=flops_per_token * steps.tokens_per_step, peak=peak_flops(config.cluster.gpu.name)
        ),
    )


def narrow(config: Config, places: Layout) -> Narrow | None:
    """What computes in FP8 or FP4; None without a narrow format."""
    precision = config.precision
    if precision.fp8 is None and precision.fp4 is None:
        return None
    names = linears.names(config)
    delayed = precision.fp4 is None and precision.fp8_recipe is Fp8Recipe.delayed
    return Narrow(
        layers=len(names),
        in_bf16=tuple(InBf16.of(config).among(names)),
        amax_group=precision.amax_group.name if delayed else None,
        amax_ranks=tuple(places.groups(precision.amax_group.name)) if delayed else (),
    )


def layout(config: Config) -> Layout:
    """Where the ranks stand."""
    sizes = config.parallel
    etp = sizes.tp if sizes.etp is None else sizes.etp
    return Layout(
        world_size=config.world_size,
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=etp,
        vpp=sizes.vpp,
        instances=sizes.num_distributed_optimizer_instances,
    )


def possible_layout(config: Config) -> Layout | None:
    """Where the ranks stand; None where the sizes make no layout, which `checks_layout` reports."""
    return None if layout_problems(config) else layout(config)


def layout_problems(config: Config) -> list[Problem]:
    """Why the sizes of the axes make no layout; none where they do."""
    sizes, cluster = config.parallel, config.cluster
    return Layout.problems(
        config.world_size,
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=sizes.etp,
        vpp=sizes.vpp,
        instances=sizes.num_distributed_optimizer_instances,
        ranks_per_node=cluster.gpus_per_node if cluster.ranks is None and cluster.gpus_per_node > 0 else None,
    )


def batch(config: Config) -> BatchPlan:
    """How the global batch is shared out."""
    data, dp_size = config.data, layout(config).dp
    return BatchPlan(
        global_batch_size=data.global_batch_size,
        micro_batch_size=data.micro_batch_size,
        dp_size=dp_size,
        num_microbatches=data.global_batch_size // (data.micro_batch_size * dp_size),
        tokens_per_step=data.global_batch_size * data.seq_length,
    )


def local_ranks(config: Config) -> int:
    """Ranks of one machine."""
    return -(-config.world_size // max(config.cluster.nodes, 1))


def stage_weights(model: Model, stages: Stages) -> list[Weights]:
    """Weights of each pipeline rank.

    A tied embedding stands on the first and on the last. Layers of multi-token prediction are on the last, with the
    embedding once more (gpt_model.py:154).
    """
    layers = [model_size.layer(model, has_experts) for has_experts in model.moe_layers]

    def weights(chunk: Chunk) -> Weights:
        found = sum((layers[number] for number in chunk.layers), Weights())
        if chunk.embedding:
            found += model_size.embedding(model)
        if chunk.loss:
            found += model_size.norm(model, model.hidden_size)
            if not (model.share_embeddings_and_output_weights and chunk.embedding):
                found += model_size.output(model)
        if chunk.num_mtp_layers:
            found += model_size.multi_token_prediction(model)
            if not chunk.embedding:
                found += model_size.embedding(model)
        return found

    return [sum(map(weights, chunks), Weights()) for chunks in stages]


def peak_flops(gpu: str) -> float | None:
    """Dense BF16 FLOP/s of a GPU by its name (`NVIDIA H200`); None where unknown."""
    name = gpu.upper()
    known = [part for part in _PEAK_FLOPS if re.search(rf"\b{part}\b", name)]
    if "H100" in known and "PCIE" in name:
        known = ["H100 PCIE"]
    return _PEAK_FLOPS[known[0]] if known else None


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for scripts: plain numbers, names as in the configuration."""
    config, places = plan.config, plan.layout
    return {
        "run": {"name": config.run.name, "dir": config.run.dir, "train_iters": config.schedule.train_iters},
        "model": {
            "parameters": plan.parameters,
            "active_parameters": plan.active_parameters,
            "mtp_parameters": plan.mtp_parameters,
            "padded_vocab_size": plan.padded_vocab_size,
            "flops_per_token": plan.flops_per_token,
            "mtp_flops_per_token": plan.mtp_flops_per_token,
        },
        "layout": {
            "world_size": places.world_size,
            "nodes": config.cluster.nodes,
            **{axis: getattr(places, axis) for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp", "edp")},
            "distributed_optimizer_instances": places.instances,
            "sp": config.parallel.sp,
            "stages": [[chunk.letters for chunk in chunks] for chunks in plan.stages],
            "parameters_per_rank": list(plan.parameters_per_rank),
            "rank_map": [
                {"rank": rank, **{axis: getattr(place, axis) for axis in dict.fromkeys(DENSE + EXPERT)}}
                for rank in range(places.world_size)
                for place in [places.coordinates(rank)]
            ],
        },
        "batch": asdict(plan.batch)
        | {
            "rampup_batch_size": config.data.rampup_batch_size,
            "train_samples": plan.train_samples,
            "train_tokens": plan.train_tokens,
            "train_flops": plan.train_flops,
        },
        "precision": {"dtype": shown(config.precision.dtype), "fp8": fp8_name(config)}
        | (plan.narrow.in_words() if plan.narrow else {}),
        "reliability": None if plan.reliability is None else _expected(plan.reliability),
    }


def _expected(expected: Reliability) -> dict[str, Any]:
    best = expected.best()
    return asdict(expected) | {
        "seconds_between_failures": expected.seconds_between_failures,
        "ettr": expected.ettr,
        "best_save_interval": best.save_interval,
        "best_ettr": best.ettr,
    }


def precision_name(config: Config) -> str:
    """The precision in a few words."""
    fp8 = fp8_name(config)
    return shown(config.precision.dtype) + (f" with {fp8}" if fp8 else "")


def fp8_name(config: Config) -> str | None:
    """FP8 format and recipe in words; None without FP8."""
    precision = config.precision
    if precision.fp4 is not None:
        return f"{precision.fp4.name} (NVFP4)"
    return f"{precision.fp8.name}, {precision.fp8_recipe.name} scaling" if precision.fp8 else None
