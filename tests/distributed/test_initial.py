"""What is drawn at random: the same first weights in every layout, and dropout that differs where tokens differ."""

import math
from pathlib import Path

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor

from shardwright.parallel.mcore import initial

from . import engines
from .harness import RunRanks
from .tail import long_tail

MODELS = {
    "dense": [*engines.TINY, "model.num_layers=4"],
    "biases": ["model=tiny_gpt", "model.vocab_size=500"],
    "experts": ["model=tiny_mixtral", "model.vocab_size=500"],
    "deepseek": ["model=tiny_deepseek", "model.vocab_size=500"],
}
TENSOR = ["parallel.tp=2", "parallel.sp=true"]
LAYOUTS = {
    "dense, TP2": ("dense", 2, ["parallel.tp=2"]),
    "dense, PP2 and a tied embedding": ("dense", 2, ["parallel.pp=2"]),
    "dense, PP2 and VPP2": ("dense", 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "biases, TP2": ("biases", 2, ["parallel.tp=2"]),
    "experts, EP2": ("experts", 2, ["parallel.ep=2"]),
    "experts, TP2, ETP1, EP2": ("experts", 2, [*TENSOR, "parallel.ep=2", "parallel.etp=1"]),
    "deepseek, PP2": ("deepseek", 2, ["parallel.pp=2"]),
    "deepseek, TP2": ("deepseek", 2, TENSOR),
}


def first_weights(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a new model, whole; on rank 0, else none."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    engines.save(engine, folder)
    return {} if rank else {n: t for n, t in engines.full_tensors(folder).items() if not n.startswith("optimizer")}


@pytest.mark.parametrize("name", long_tail(LAYOUTS, quick=["dense, PP2 and VPP2", "experts, TP2, ETP1, EP2"]))
def test_first_weights_are_the_same_in_every_layout(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    model, world, layout = LAYOUTS[name]
    expected = run_ranks(first_weights, 1, MODELS[model], tmp_path / "alone")[0]
    found = run_ranks(first_weights, world, [*MODELS[model], *layout], tmp_path / "apart")[0]
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_first_weights_have_their_deviation_and_follow_the_seed(run_ranks: RunRanks, tmp_path: Path) -> None:
    overrides = MODELS["biases"]
    weights = run_ranks(first_weights, 1, overrides, tmp_path / "one")[0]
    other = run_ranks(first_weights, 1, [*overrides, "run.seed=2"], tmp_path / "two")[0]
    matrices = {name: weight for name, weight in weights.items() if weight.numel() > 10_000}
    assert matrices
    for name, weight in matrices.items():
        wanted = 0.05 / math.sqrt(2 * 4) if name.endswith(initial.OUTPUT) else 0.05
        assert float(weight.std()) == pytest.approx(wanted, rel=0.05), name
        assert abs(float(weight.mean())) < 0.02 * wanted, name
        assert not torch.equal(weight, other[name]), name
    layers = weights["decoder.layers.mlp.linear_fc2.weight"]
    assert not torch.equal(layers[0], layers[1])
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif name not in matrices and "layer" in name and "norm" in name:
            assert (weight == 1).all(), name


def test_a_large_matrix_is_drawn_in_blocks_that_do_not_depend_on_who_draws_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initial, "BLOCK", 32)  # four rows of eight

    def drawn(rows: slice, columns: slice) -> torch.Tensor:
        data = torch.zeros(10, 8)[rows, columns].clone()
        offset = (2, rows.start, columns.start)
        piece = ShardedTensor("w", data, data.dtype, tuple(data.shape), (3, 10, 8), offset, None, 0, 1)
        initial._fill(piece, 1.0, seed=1)
        return data

    whole = drawn(slice(0, 10), slice(0, 8))
    assert whole.unique().numel() == 80
    assert torch.equal(drawn(slice(5, 10), slice(0, 8)), whole[5:])
    assert torch.equal(drawn(slice(0, 10), slice(4, 8)), whole[:, 4:])


def random_numbers(rank: int, world: int, store: str, overrides: list[str]) -> tuple[list[float], list[float], float]:
    """What a rank draws for what it has whole, and for what it has a part of; and a sum over what dropout left."""
    config = engines.config_of([*overrides, "model.hidden_dropout=0.5"], world)
    engine = engines.engine_of(config, rank, store)
    outputs: list[torch.Tensor] = []
    engine.model.module.decoder.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    batch = engines.random_step(0)
    engine.train_step([{name: tensor[:1] for name, tensor in batch.items()}], lr=0.0, weight_decay=0.0)
    whole = torch.rand(4).tolist()
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return whole, torch.rand(4).tolist(), float(outputs[0].double().abs().sum())


def test_dropout_is_the_same_on_what_ranks_share_and_differs_where_tokens_do(run_ranks: RunRanks) -> None:
    whole, parts, left = zip(*run_ranks(random_numbers, 4, ["parallel.tp=2"]), strict=True)  # TP2 x DP2
    assert whole[0] == whole[1] and whole[2] == whole[3], "tensor-parallel ranks drop the same of what both have"
    assert whole[0] != whole[2], "data-parallel ranks have other tokens"
    assert len({tuple(part) for part in parts}) == 4, "everyone has other heads or other tokens"
    assert left[0] == left[1] and left[2] == left[3]
    assert left[0] != left[2], "the same tokens, dropped otherwise"


@pytest.mark.parametrize("axis", ["parallel.cp=2", "parallel.pp=2"])
def test_ranks_with_other_tokens_or_layers_drop_otherwise(run_ranks: RunRanks, axis: str) -> None:
    first, second = run_ranks(streams, 2, [axis])
    assert first != second


def streams(rank: int, world: int, store: str, overrides: list[str]) -> list[float]:
    """What a rank draws first."""
    engines.engine_of(engines.config_of(overrides, world), rank, store)
    return torch.rand(4).tolist()
