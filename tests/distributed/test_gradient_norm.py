"""The global gradient norm counts every parameter of the model once, whoever holds it; and so does what clips by it.

Gradients are put into the buffers by hand, as they stand after their reduction, and the optimizer makes its step. SGD
without momentum at a learning rate of 1 moves a weight by its clipped gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.parallel.mcore.engine import Engine

from . import engines
from .harness import RunRanks
from .tail import long_tail

PLAIN = [
    *("optimizer=sgd", "optimizer.sgd_momentum=0", "optimizer.clip_grad=1.0"),
    *("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
]
EXPERTS = ["model=tiny_mixtral", "model.num_layers=2", "model.vocab_size=500"]
TENSOR = ["parallel.tp=2", "parallel.sp=true"]

type Gradients = dict[str, list[float]]
"""End of a parameter's name -> the first elements of its gradient; the others are zero."""


def everywhere(rank: int) -> Gradients:
    return {"final_layernorm.weight": [3.0, 4.0]}


def a_half_each(rank: int) -> Gradients:
    return {"layers.0.self_attention.linear_proj.weight": [3.0 + rank]}


def an_expert_each(rank: int) -> Gradients:
    return {"layers.0.mlp.experts.local_experts.0.linear_fc2.weight": [3.0 + rank]}


def an_expert_on_both(rank: int) -> Gradients:
    return {"layers.0.mlp.experts.local_experts.0.linear_fc2.weight": [3.0, 4.0]}


def a_stage_each(rank: int) -> Gradients:
    return {"layers.0.self_attention.linear_proj.weight": [3.0 + rank]}


def tied(rank: int) -> Gradients:
    return {"embedding.word_embeddings.weight" if rank == 0 else "output_layer.weight": [20.0, 20.0]}


CASES: dict[str, tuple[list[str], Callable[[int], Gradients], float]] = {
    "TP2, a norm that both have": ([*engines.TINY, "parallel.tp=2"], everywhere, 5.0),
    "TP2 and SP, a norm that both have": ([*engines.TINY, *TENSOR], everywhere, 5.0),
    "TP2, a matrix in halves": ([*engines.TINY, "parallel.tp=2"], a_half_each, 5.0),
    "DP2, what both have": (engines.TINY, everywhere, 5.0),
    "CP2, what both have": ([*engines.TINY, "parallel.cp=2"], everywhere, 5.0),
    "PP2, layers of their own": ([*engines.TINY, "parallel.pp=2"], a_stage_each, 5.0),
    "PP2, a tied embedding": ([*engines.TINY, "parallel.pp=2"], tied, math.sqrt(800)),
    "EP2, an expert each": ([*EXPERTS, "parallel.ep=2"], an_expert_each, 5.0),
    "EP2, a norm that both have": ([*EXPERTS, "parallel.ep=2"], everywhere, 5.0),
    "TP2, ETP1, an expert that both have": ([*EXPERTS, *TENSOR, "parallel.etp=1"], an_expert_on_both, 5.0),
    "two instances, what both have": (
        [*engines.TINY, "parallel.num_distributed_optimizer_instances=2"],
        everywhere,
        5.0,
    ),
}


def parameters_of(engine: Engine) -> dict[str, Any]:
    return dict(engine.model.module.named_parameters())


def norm_and_moves(
    rank: int, world: int, store: str, overrides: list[str], gradients: Callable[[int], Gradients]
) -> tuple[float, dict[str, list[float]]]:
    """The norm of gradients that are set by hand, and by how much the step that clips them moved their weights."""
    engine = engines.engine_of(engines.family_config([*overrides, *PLAIN], world), rank, store)
    for buffer in (*engine.model.buffers, *engine.model.expert_parallel_buffers):
        buffer.grad_data.zero_()
    chosen = {}
    for end, values in gradients(rank).items():
        ((name, parameter),) = [item for item in parameters_of(engine).items() if item[0].endswith(end)]
        parameter.main_grad.view(-1)[: len(values)] = torch.tensor(values)
        chosen[name] = (parameter, parameter.detach().clone(), len(values))
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1.0, 0.0
    _, norm, _ = engine.optimizer.step()
    moves = {name: (old - now).detach().view(-1)[:count].tolist() for name, (now, old, count) in chosen.items()}
    return float(norm), moves


@pytest.mark.parametrize("name", long_tail(CASES, quick=["PP2, a tied embedding"]))
def test_a_gradient_is_counted_once_and_clipped_by_the_norm_of_all(run_ranks: RunRanks, name: str) -> None:
    overrides, gradients, expected = CASES[name]
    for rank, (norm, moves) in enumerate(run_ranks(norm_and_moves, 2, overrides, gradients)):
        assert norm == pytest.approx(expected, rel=1e-6)
        for found, values in zip(moves.values(), gradients(rank).values(), strict=True):
            assert found == pytest.approx([value / expected for value in values], rel=1e-4), "weights of about 0.05"


def embeddings(rank: int, world: int, store: str) -> tuple[float, float, torch.Tensor]:
    """The smallest and largest move of a tied embedding whose ranks had gradients 1 to 4; and it after ten steps."""
    config = engines.config_of(["parallel.pp=2", *PLAIN, "optimizer.clip_grad=0"], world)
    engine = engines.engine_of(config, rank, store)
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    ((_, tied),) = [item for item in parameters_of(engine).items() if item[0].endswith(ends)]
    for buffer in engine.model.buffers:
        buffer.grad_data.zero_()
    at = engine.layout.coordinates(rank)
    tied.main_grad.fill_(1.0 + at.dp + 2 * at.pp)
    before = tied.detach().clone()
    engine.transformer_config.finalize_model_grads_func(engine.chunks, None)
    for group in engine.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1.0, 0.0
    engine.optimizer.step()
    moved = before - tied.detach()
    engines.train(engine, 10)
    return float(moved.min()), float(moved.max()), tied.detach().clone()


def test_gradients_of_a_tied_embedding_are_summed_over_data_parallel_ranks_and_both_stages(run_ranks: RunRanks) -> None:
    results = run_ranks(embeddings, 4)
    for low, high, _ in results:  # 10 is 4 ranks times their mean: the loss of each is a share of the whole
        assert (low, high) == pytest.approx((10.0, 10.0), rel=1e-6)
    assert all(torch.equal(results[0][2], weight) for _, _, weight in results)
