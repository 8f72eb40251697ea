"""A checkpoint as Megatron-LM writes it, from two tensor-parallel ranks, becomes one that a run starts from."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.transformer.enums import AttnBackend

from shardwright.conf.problems import RefusedError
from shardwright.parallel.mcore import shards
from shardwright.pretrain import checkpoint_exchange, checkpoint_integrity

from . import engines
from .harness import RunRanks

DENSE = [*engines.TINY, "model.num_layers=2", "model.share_embeddings_and_output_weights=false"]
EXPERTS = ["model=tiny_mixtral", "model.vocab_size=500"]
TENSOR_PARALLEL = ["parallel.tp=2", "parallel.sp=true"]
TRUSTED = "checkpoint.trusted=true"
ROWS = 500
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def written(rank: int, world: int, store: str, overrides: list[str], folder: Path, legacy: bool) -> float:
    """Save as Megatron-LM does (`megatron/training/checkpointing.py`, `generate_state_dict`); the next loss."""
    engine = engines.engine_of(engines.family_config([*overrides, *TENSOR_PARALLEL], world), rank, store)
    engines.train(engine, 2)
    engine.gather_parameters()
    model = engine.config.model
    args = argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=True,
        num_query_groups=model.num_query_groups,
        num_experts=model.num_moe_experts,
        swiglu=True,
        norm_epsilon=model.layernorm_epsilon,
        attention_backend=AttnBackend.auto,
        params_dtype=torch.float32,
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
    )
    metadata = dict(shards.METADATA)
    common: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 2}
    state = {"model": engine.model.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = engine.optimizer.sharded_state_dict(state, metadata=metadata)
    state["rng_state"] = ShardedObject("rng_state", [{"random": 1}], (1, world), (0, rank))
    iteration = folder / "iter_0000002"
    if rank == 0:
        iteration.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    dist_checkpointing.save(state if legacy else {**state, **common}, str(iteration), content_metadata=metadata)
    if legacy and rank == 0:
        torch.save(common, iteration / "common.pt")
    return engines.train(engine, 1, first_seed=9)[0][0]


def started(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> float:
    """The first loss of a run that starts from the imported weights."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    shards.load(engine, folder, with_rng=False)
    return engines.train(engine, 1, first_seed=9)[0][0]


def differing(rank: int, world: int, store: str, theirs: Path, ours: Path) -> list[str]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        first = _by_layer(engines.full_tensors(theirs))
    second = _by_layer(engines.full_tensors(ours))
    assert first.keys() == second.keys() and len(first) > 10
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def _by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights without the rows that pad the vocabulary, each layer's by its own name also where they are stacked."""
    weights = {}
    for name, tensor in tensors.items():
        inside = name.removeprefix("decoder.layers.")
        if name.startswith("optimizer."):
            continue
        if inside == name or inside.split(".")[0].isdecimal():
            weights[name] = tensor[:ROWS] if name in PADDED else tensor
        else:
            weights |= {f"decoder.layers.{number}.{inside}": layer for number, layer in enumerate(tensor)}
    return weights


def importing(source: Path, target: Path, *overrides: str) -> Path:
    return checkpoint_exchange.import_(source, target, [*engines.BATCHES, "cluster.gpu=none", *overrides])


@pytest.mark.parametrize(
    ("overrides", "legacy"),
    [
        pytest.param(DENSE, False, id="dense"),
        pytest.param(DENSE, True, id="dense, common.pt", marks=pytest.mark.slow),
        pytest.param(EXPERTS, False, id="experts", marks=pytest.mark.slow),
    ],
)
def test_its_weights_are_imported_bit_for_bit_and_a_run_starts_from_them(
    run_ranks: RunRanks, tmp_path: Path, overrides: list[str], legacy: bool
) -> None:
    theirs = tmp_path / "theirs"
    next_loss = run_ranks(written, 2, overrides, theirs, legacy)[0]
    with pytest.raises(RefusedError, match=r"checkpoint\.trusted=false: .*Megatron-LM.*checkpoint\.trusted=true"):
        importing(theirs, tmp_path / "start", *overrides)
    with pytest.raises(RefusedError, match=r"args\.num_layers=\d: the composed model has 3"):
        importing(theirs, tmp_path / "start", *overrides, "model.num_layers=3", TRUSTED)
    assert not (tmp_path / "start").exists()
    imported = importing(theirs, tmp_path / "start", *overrides, TRUSTED)
    assert checkpoint_integrity.verify(imported).reasons == ()
    assert run_ranks(differing, 1, theirs / "iter_0000002", imported) == [[]]
    assert run_ranks(started, 1, overrides, imported)[0] == pytest.approx(next_loss, rel=4e-3)
