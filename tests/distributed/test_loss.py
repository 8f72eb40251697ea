"""The loss is a mean over tokens: however the batch is split, whatever is masked."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.pretrain.faults import TrainingFault
from shardwright.pretrain.loop import Loop
from shardwright.pretrain.trainer_state import TrainerState

from . import engines
from .harness import RunRanks

UNMASKED = [64, 3, 0, 17]
"""Unmasked tokens of the four samples: very unequal micro-batches, one of them without any."""
RELATIVE = 1e-6
"""Only the order of fp32 sums differs."""


def one_step(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> tuple[float, int, float | None]:
    """Loss, token count and gradient norm of a step from one seed."""
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    step = engines.random_step(7, unmasked=UNMASKED)
    evaluated, _ = engine.evaluate(iter([engines.share(engine, step)]))
    result = engine.train_step(engines.share(engine, step), lr=0.0, weight_decay=0.0)
    assert math.isclose(evaluated, result.loss, rel_tol=RELATIVE)
    return result.loss, result.num_tokens, result.grad_norm


SPLITS = {
    "one micro-batch": (1, ["data.micro_batch_size=4"]),
    "four micro-batches": (1, ["data.micro_batch_size=1"]),
    "two ranks": (2, ["data.micro_batch_size=1"]),
    "two ranks, one micro-batch each": (2, ["data.micro_batch_size=2"]),
    "two ranks with parts of every sequence": (2, ["data.micro_batch_size=2", "parallel.cp=2"]),
}


@pytest.fixture(scope="module")
def losses(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("loss")
    return {name: run_ranks(one_step, world, overrides, folder) for name, (world, overrides) in SPLITS.items()}


@pytest.mark.parametrize("name", SPLITS)
def test_loss_and_gradient_do_not_depend_on_the_split_of_the_batch(losses, name: str) -> None:
    expected = torch.tensor(losses["one micro-batch"][0])
    for result in losses[name]:
        torch.testing.assert_close(torch.tensor(result), expected, rtol=RELATIVE, atol=0)


def test_interleaved_stages_evaluate_what_they_train_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    chunks = ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=E|t|t|L"]
    (loss, num_tokens, _), other = run_ranks(one_step, 2, chunks, tmp_path)
    assert num_tokens == sum(UNMASKED) and math.isfinite(loss)
    assert other[0] == loss


def test_only_unmasked_tokens_count(losses) -> None:
    assert losses["one micro-batch"][0][1] == sum(UNMASKED)


def known_losses(rank: int, world: int, store: str) -> tuple[float, int]:
    """A rank's micro-batches of known token losses, through the loss function and the reduction of the engine."""
    from shardwright.parallel.mcore import engine as module

    engine = engines.engine_of(engines.config_of([], world), rank, store)
    per_token, count = (2.0, 10) if rank == 0 else (5.0, 2)
    mask = torch.zeros(1, 64)
    mask[0, :count] = 1.0
    _, _, report = module._token_loss(mask, torch.full((1, 64), per_token))
    loss_sum, num_tokens = engine._reduce(report["sums"]).tolist()
    return loss_sum / num_tokens, int(num_tokens)


def test_ten_tokens_of_two_and_two_tokens_of_five_average_to_two_and_a_half(run_ranks: RunRanks) -> None:
    assert run_ranks(known_losses, 2) == [(2.5, 12), (2.5, 12)]


def all_masked(rank: int, world: int, store: str) -> tuple[float, int, float | None]:
    engine = engines.engine_of(engines.config_of([], world), rank, store)
    step = engines.random_step(7, unmasked=[0, 0, 0, 0])
    result = engine.train_step(engines.share(engine, step), lr=1e-3, weight_decay=0.0)
    return result.loss, result.num_tokens, result.grad_norm


def evaluate_nothing(rank: int, world: int, store: str) -> str:
    """What the loop says of an evaluation whose tokens are all masked."""
    engine = engines.engine_of(engines.config_of([], world), rank, store)
    batches = iter([engines.share(engine, engines.random_step(7, unmasked=[0, 0, 0, 0]))])
    unused: Any = None
    loop = Loop(
        context=unused,
        plan=unused,
        engine=engine,
        training_batches=iter([]),
        evaluation_batches=None,
        checkpoints=unused,
        stragglers=unused,
        fp8=unused,
        rollback=unused,
    )
    with pytest.raises(TrainingFault) as caught:
        loop._evaluate(TrainerState(step=3), batches)
    return str(caught.value)


def test_an_evaluation_without_any_token_is_a_fault_of_that_name(run_ranks: RunRanks) -> None:
    assert run_ranks(evaluate_nothing, 1) == ["step 3: the evaluation batches hold no unmasked token"]


def test_a_batch_without_any_token_gives_zero_and_no_nan(run_ranks: RunRanks) -> None:
    assert run_ranks(all_masked, 1) == [(0.0, 0, 0.0)]
