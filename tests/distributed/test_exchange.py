"""To Hugging Face's files and back: every weight comes back bit for bit, and training starts from it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checkpoint_exchange, checkpoint_integrity, checkpoint_reshard, checkpoint_store, cli
from shardwright.pretrain.faults import DamagedError
from shardwright.pretrain.start import resolve

from . import commands
from .engines import full_tensors
from .harness import RunRanks

SMALL_FILE_BYTES = 50_000
EMBEDDING, VOCABULARY = "embedding.word_embeddings.weight", 500
LOSS_TOLERANCE = 4e-3
"""Relative: the 12 rows that pad the vocabulary to 512 count in the softmax and begin at zero again, at most
log(512/500) = 0.024 of a loss of 6.16 while logits are small; an untrained model's loss is 3% higher."""


@pytest.fixture(scope="module")
def exported(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's weights, in several files."""
    target = tmp_path_factory.mktemp("exported") / "model"
    checkpoint_exchange.export(finished_run, target, None, file_bytes=SMALL_FILE_BYTES)
    return target


@pytest.fixture(scope="module")
def imported(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("imported") / "start"
    checkpoint_exchange.import_(exported, target, ["experiment=quickstart", *commands.SMALL])
    return target


def differing(rank: int, world: int, store: str, one: Path, other: Path) -> tuple[list[str], int]:
    """Names of weights that differ in a bit, and how many were compared; rows that pad the vocabulary do not count."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    first, second = full_tensors(one), full_tensors(other)
    for tensors in (first, second):
        tensors[EMBEDDING] = tensors[EMBEDDING][:VOCABULARY]
    weights = [name for name in first if not name.startswith("optimizer.")]
    assert sorted(weights) == sorted(second)
    return [name for name in weights if not torch.equal(first[name], second[name])], len(weights)


def differing_anywhere(rank: int, world: int, store: str, one: Path, other: Path) -> list[str]:
    """Names of tensors, of the optimizer too, that differ in a bit."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    first, second = full_tensors(one), full_tensors(other)
    assert first.keys() == second.keys() and len(first) > 20
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_what_is_exported_and_imported_again_is_equal_bit_for_bit(
    run_ranks: RunRanks, finished_run: Path, imported: Path
) -> None:
    before = checkpoint_store.step_folder(finished_run / "checkpoints", 12)
    ((names, count),) = run_ranks(differing, 1, before, imported / "step_00000000")
    assert names == [] and count >= 8
    assert checkpoint_integrity.verify(imported / "step_00000000").reasons == ()


def test_transformers_loads_every_weight_of_it(exported: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {path.name for path in exported.glob("*.safetensors")}


def test_a_run_that_starts_from_it_has_the_validation_loss_of_the_run_that_was_exported(
    finished_run: Path, imported: Path, tmp_path: Path, cache: str
) -> None:
    run_dir = tmp_path / "run"
    still = ("optimizer.lr=1e-12", "optimizer.min_lr=0", "optimizer.weight_decay=0", "schedule.train_iters=1")
    ended = commands.train(
        run_dir, *commands.FINISHED_RUN, cache, *still, "schedule.lr_warmup_iters=0", f"checkpoint.load={imported}"
    )
    assert ended.code == 0, ended.out
    before, after = (commands.events(run, "eval")[-1]["data"]["loss"] for run in (finished_run, run_dir))
    assert after == pytest.approx(before, rel=LOSS_TOLERANCE)


def test_a_resharded_checkpoint_has_the_same_tensors_in_other_files_and_a_run_would_go_on_from_it(
    run_ranks: RunRanks, finished_run: Path, tmp_path: Path, cache: str
) -> None:
    before = checkpoint_store.step_folder(finished_run / "checkpoints", 12)
    layout = ["parallel.tp=1", "parallel.sp=false", "parallel.pp=2", "cluster.ranks=4"]
    after = checkpoint_reshard.reshard(finished_run, tmp_path / "new", None, layout, least_file_bytes=1 << 16)
    sizes = [[file.stat().st_size for file in folder.glob("*.distcp")] for folder in (before, after)]
    assert [len(files) for files in sizes] == [2, 4]
    assert max(sizes[1]) < 2 * min(sizes[1])
    assert checkpoint_integrity.verify(after).reasons == ()
    assert run_ranks(differing_anywhere, 1, before, after) == [[]]
    where = [f"run.dir={tmp_path / 'run'}", f"checkpoint.load={tmp_path / 'new'}"]
    start = resolve([*commands.FINISHED_RUN, cache, "schedule.train_iters=12", *layout, *where], None)
    assert start.load is not None and start.load.step == 12
    assert start.since_checkpoint == [], "what goes on from it is what it was made for"


def test_a_layout_that_breaks_a_rule_is_not_resharded_for_nor_a_key_that_may_not_change(
    finished_run: Path, tmp_path: Path
) -> None:
    for override, words in (("parallel.tp=3", "num_attention_heads"), ("run.seed=5", "no key that a run may change")):
        with pytest.raises(RefusedError, match=words):
            checkpoint_reshard.reshard(finished_run, tmp_path / "new", None, [override])
    assert not (tmp_path / "new").exists()


def test_another_model_is_refused_by_every_value_that_differs(exported: Path, tmp_path: Path) -> None:
    other = ["experiment=quickstart", *commands.SMALL, "model.num_layers=3", "model.rotary_base=777"]
    with pytest.raises(RefusedError, match=r"num_hidden_layers=2: .*3[^$]*rope_theta"):
        checkpoint_exchange.import_(exported, tmp_path / "start", other)
    assert not (tmp_path / "start").exists()


def test_a_model_that_no_family_expresses_is_refused(exported: Path, tmp_path: Path) -> None:
    other = ["experiment=quickstart", *commands.SMALL, "model.add_qkv_bias=true"]
    with pytest.raises(RefusedError, match="no family"):
        checkpoint_exchange.import_(exported, tmp_path / "start", other)


def test_a_damaged_checkpoint_is_not_exported(imported: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(imported, tmp_path / "copy")
    shard = copy / "step_00000000" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[500] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedError, match=r"__0_0\.distcp has other content"):
        checkpoint_exchange.export(copy, tmp_path / "model", None)
    assert cli.main(["checkpoint", "export", str(copy), str(tmp_path / "model")]) == 4
    assert not (tmp_path / "model").exists()
