"""What a configuration amounts to, computed on any machine in about a second: layout, batch, parameters, FLOPs.

Everything here is integers from the configuration alone: no torch, no GPU, no process group. The numbers are frozen
objects, so that a config stays what the user wrote.

FLOPs count the matrix products of one forward and one backward pass, the backward being twice the forward. Attention is
counted causal: token i attends to i others, so half of the full square. Nothing is added for recomputation. Llama 3 8B
at 8192 tokens: 51.47 GFLOP per token.
"""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.conf.choices import Normalization, PositionEmbedding
from shardwright.conf.compose import shown
from shardwright.conf.schema import Config, Model
from shardwright.data.batch_size import BatchSizes
from shardwright.parallel.layout import Layout

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
class Weights:
    """Parameters, told apart by what tensor parallelism does with them."""

    split: int = 0
    """Shared out over the TP ranks: embeddings and the large matrices."""
    whole: int = 0
    """Held by every TP rank: norms, learned positions, biases added after a reduction."""

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.split + other.split, self.whole + other.whole)

    def __mul__(self, times: int) -> "Weights":
        return Weights(self.split * times, self.whole * times)

    @property
    def total(self) -> int:
        """All of them."""
        return self.split + self.whole

    def per_rank(self, tp: int) -> int:
        """Parameters that one of `tp` ranks holds."""
        return self.split // tp + self.whole


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that follows from its configuration."""

    config: Config
    layout: Layout
    batch: BatchPlan
    padded_vocab_size: int
    parameters: int
    parameters_per_rank: tuple[int, ...]
    """Of one rank of each pipeline stage, first stage first."""
    flops_per_token: float
    train_samples: int
    """Samples of the whole run."""
    train_tokens: int
    """Tokens of the whole run."""

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token * self.train_tokens


def make_plan(config: Config) -> Plan:
    """The plan of a configuration that `checks.config_problems` has passed."""
    model, samples = config.model, BatchSizes.of(config.data).consumed_after(config.schedule.train_iters)
    return Plan(
        config=config,
        layout=layout(config),
        batch=batch(config),
        padded_vocab_size=padded_vocab_size(model),
        parameters=count_parameters(model),
        parameters_per_rank=tuple(
            stage.per_rank(config.parallel.tp) for stage in stage_weights(model, config.parallel.pp)
        ),
        flops_per_token=flops_per_token(model, config.data.seq_length),
        train_samples=samples,
        train_tokens=samples * config.data.seq_length,
    )


def layout(config: Config) -> Layout:
    """Where the ranks stand."""
    return Layout(world_size=config.world_size, tp=config.parallel.tp, pp=config.parallel.pp)


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


def padded_vocab_size(model: Model) -> int:
    """Rows of the embedding; of the model alone, so that its shape is the same in every layout."""
    multiple = model.make_vocab_size_divisible_by
    return math.ceil(model.vocab_size / multiple) * multiple


def count_parameters(model: Model) -> int:
    """Trained parameters, each counted once (a tied embedding too)."""
    tail = _norm(model, model.hidden_size) + Weights(split=_output_split(model))
    return (_embedding(model) + _layer(model) * model.num_layers + tail).total


def stage_weights(model: Model, pp: int) -> list[Weights]:
    """Weights of each pipeline stage; a tied embedding stands on the first and on the last."""
    stages = [_layer(model) * (model.num_layers // pp)] * pp
    stages[0] += _embedding(model)
    alone = pp == 1 and model.share_embeddings_and_output_weights
    stages[-1] += _norm(model, model.hidden_size)
    stages[-1] += Weights(split=0 if alone else padded_vocab_size(model) * model.hidden_size)
    return stages


def qkv_width(model: Model) -> int:
    """Columns of the projection to queries, keys and values of all heads."""
    return (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels


def flops_per_token(model: Model, seq_length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of `seq_length` tokens, causal."""
    linear = _attention_matrices(model) + _mlp_matrices(model)
    # two products (QK^T and its product with V) of 2 * seq_length * channels FLOPs, half of them masked
    attention = 2 * seq_length * model.num_attention_heads * model.kv_channels
    output = padded_vocab_size(model) * model.hidden_size
    forward = model.num_layers * (2 * linear + attention) + 2 * output
    return 3.0 * forward


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
            "padded_vocab_size": plan.padded_vocab_size,
            "flops_per_token": plan.flops_per_token,
        },
        "layout": {
            "world_size": places.world_size,
            "nodes": config.cluster.nodes,
            **{axis: getattr(places, axis) for axis in ("tp", "pp", "cp", "dp")},
            "sp": config.parallel.sp,
            "parameters_per_rank": list(plan.parameters_per_rank),
            "rank_map": [
                {"rank": rank, "tp": place.tp, "cp": place.cp, "dp": place.dp, "pp": place.pp}
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
        "precision": {"dtype": shown(config.precision.dtype), "fp8": fp8_name(config)},
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


def _embedding(model: Model) -> Weights:
    learned = model.position_embedding_type is PositionEmbedding.learned_absolute
    return Weights(
        split=padded_vocab_size(model) * model.hidden_size,
        whole=model.max_position_embeddings * model.hidden_size if learned else 0,
    )


def _output_split(model: Model) -> int:
    return 0 if model.share_embeddings_and_output_weights else padded_vocab_size(model) * model.hidden_size


def _layer(model: Model) -> Weights:
    biases = model.add_bias_linear
    qkv_bias = qkv_width(model) if biases or model.add_qkv_bias else 0
    matrices = Weights(
        split=_attention_matrices(model) + _mlp_matrices(model) + qkv_bias + (_fc1_width(model) if biases else 0),
        whole=2 * model.hidden_size if biases else 0,
    )
    qk_norms = _norm(model, model.kv_channels) * (2 if model.qk_layernorm else 0)
    return matrices + _norm(model, model.hidden_size) * 2 + qk_norms


def _norm(model: Model, width: int) -> Weights:
    return Weights(whole=width * (2 if model.normalization is Normalization.LayerNorm else 1))


def _fc1_width(model: Model) -> int:
    return model.ffn_hidden_size * (2 if model.gated_linear_unit else 1)


def _attention_matrices(model: Model) -> int:
    return model.hidden_size * (qkv_width(model) + model.num_attention_heads * model.kv_channels)


def _mlp_matrices(model: Model) -> int:
    return model.hidden_size * (_fc1_width(model) + model.ffn_hidden_size)
