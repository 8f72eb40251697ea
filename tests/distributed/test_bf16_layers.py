"""Layers that stay in BF16: bit by bit what they would be without FP8, with delayed scaling, stages and experts too."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel import linears
from shardwright.parallel.mcore import shards

from . import engines
from .harness import RunRanks
from .tail import long_tail

EMULATED = "precision.backend=emulated"
FIRST_BLOCK = "precision.num_layers_at_start_in_bf16=1"
RECIPES = ["fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"]


def outputs(rank: int, world: int, store: str, overrides: list[str]) -> dict[str, torch.Tensor]:
    """What every linear layer makes of the same micro-batch in one forward pass, by its name in the whole model."""
    from shardwright.parallel.mcore.names import in_whole_model

    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    found: dict[str, torch.Tensor] = {}
    model = engine.model.module
    for name, module in model.named_modules():
        if name.rpartition(".")[2].startswith("linear_"):
            whole = in_whole_model(model, name)
            module.register_forward_hook(partial(keep_first, found, whole))
    engine.train_step(engines.share(engine, engines.random_step(0)), lr=1e-3, weight_decay=0.1)
    return found


def keep_first(found: dict[str, torch.Tensor], name: str, module: Any, inputs: Any, output: Any) -> None:
    found.setdefault(name, output[0].detach().clone())


@pytest.mark.parametrize("recipe", long_tail(RECIPES, quick=["fp8_delayed"]))
def test_a_block_in_bf16_is_what_it_would_be_without_a_recipe_and_the_next_one_is_not(
    run_ranks: RunRanks, recipe: str
) -> None:
    plain = run_ranks(outputs, 1, ["precision=bf16"])[0]
    mixed = run_ranks(outputs, 1, [f"precision={recipe}", EMULATED, FIRST_BLOCK])[0]
    assert plain.keys() == mixed.keys() and len(plain) == 8
    for name, output in mixed.items():
        assert torch.equal(output, plain[name]) == name.startswith("decoder.layers.0."), name


def test_names_are_those_of_the_whole_model_on_every_stage(run_ranks: RunRanks) -> None:
    overrides = ["precision=fp8_delayed", EMULATED, "parallel.pp=2", "precision.num_layers_at_end_in_bf16=1"]
    for rank, (names, in_bf16) in enumerate(run_ranks(layers, 2, overrides)):
        assert {name.split(".")[2] for name in names} == {str(rank)}
        assert in_bf16 == (names if rank == 1 else [])


def layers(rank: int, world: int, store: str, overrides: list[str]) -> tuple[list[str], list[str]]:
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    return list(engine.narrow.layers), engine.narrow.in_bf16()


FAMILIES = {"tiny_mixtral": ["parallel.ep=2"], "tiny_deepseek": [], "tiny_gpt": [], "tiny_qwen3_moe": []}


def family(rank: int, world: int, store: str, model: str) -> tuple[list[str], list[str]]:
    overrides = [f"model={model}", "precision=fp8_delayed", EMULATED, *FAMILIES[model]]
    config = engines.family_config(overrides, world)
    engine = engines.engine_of(config, rank, store)
    return list(engine.narrow.layers), linears.names(config)


@pytest.mark.parametrize("model", long_tail(list(FAMILIES), quick=["tiny_mixtral", "tiny_deepseek"]))
def test_the_plan_names_the_layers_that_the_ranks_build(run_ranks: RunRanks, model: str) -> None:
    built = run_ranks(family, 2 if FAMILIES[model] else 1, model)
    assert {name for names, _ in built for name in names} == set(built[0][1])


def saved(rank: int, world: int, store: str, folder: Path) -> Any:
    config = engines.config_of(["precision=fp8_delayed", EMULATED, FIRST_BLOCK], world)
    engine = engines.engine_of(config, rank, store)
    engines.train(engine, 2)
    engines.save(engine, folder)
    return engines.train(engine, 2, first_seed=2), state(engine)


def loaded(rank: int, world: int, store: str, folder: Path) -> Any:
    config = engines.config_of(["precision=fp8_delayed", EMULATED, FIRST_BLOCK], world)
    engine = engines.engine_of(config, rank, store)
    shards.load(engine, folder, with_rng=True)
    return engines.train(engine, 2, first_seed=2), state(engine)


def state(engine: Any) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in engine.narrow.amax_state().items()}


def test_a_run_that_goes_on_keeps_its_exceptions_and_their_histories_stand_still(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    steps, histories = run_ranks(saved, 1, tmp_path / "checkpoint")[0]
    assert run_ranks(loaded, 1, tmp_path / "checkpoint")[0] == (steps, histories)
    for name, values in histories.items():
        if name.endswith("amaxes"):
            assert any(values) != name.startswith("decoder.layers.0."), name


def own_scales(rank: int, world: int, store: str, folder: Path | None) -> Any:
    """Two data-parallel replicas with scales of their own, and what a checkpoint gives back to each."""
    overrides = ["precision=fp8_delayed", EMULATED, "precision.amax_group=tp", "precision.fp8_amax_history_len=4"]
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    assert engine.narrow.keeps_own_state
    engines.train(engine, 2)
    before = state(engine)
    assert folder is not None
    engines.save(engine, folder)
    engines.train(engine, 1, first_seed=7)
    moved = state(engine)
    shards.load(engine, folder, with_rng=True)
    dist.barrier()
    return before, moved, state(engine)


def test_replicas_with_scales_of_their_own_get_them_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(own_scales, 2, tmp_path / "checkpoint")
    assert ranks[0][0] != ranks[1][0]
    for before, moved, after in ranks:
        assert before != moved and before == after
