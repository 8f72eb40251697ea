"""Every family goes to Hugging Face's files and back: transformers computes the same from them, no bit is lost."""

from pathlib import Path

import pytest
import torch

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.parallel.mcore import shards
from shardwright.parallel.mcore.engine import Engine
from shardwright.pretrain import checkpoint_exchange, checkpoint_store
from shardwright.pretrain.trainer_state import TrainerState

from . import engines
from .harness import RunRanks
from .tail import long_tail

ABSOLUTE = 1e-4
"""fp32 logits of order 1 through few layers, summed in another order."""
PADDED = "model.vocab_size=2000"
"""To 2048."""
SMALL_FILE_BYTES = 400_000
MODELS = {
    "GPT-3": ["model=tiny_gpt", PADDED],
    "Llama, untied": ["model=tiny", PADDED, "model.share_embeddings_and_output_weights=false"],
    "Qwen3": ["model=tiny_qwen3", PADDED],
    "Qwen3 MoE": ["model=tiny_qwen3_moe", PADDED],
    "Qwen3 MoE, a dense layer between": ["model=tiny_qwen3_moe", PADDED, "model.moe_layer_freq='[1]*2+[0]+[1]'"],
    "Mixtral": ["model=tiny_mixtral", PADDED],
    "DeepSeek-V3": ["model=tiny_deepseek", PADDED],
}
NO_MTP = ["model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"]
PADDED_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")


def exchanged(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> tuple[float, float, list[str]]:
    """Export and import what two steps made: largest difference of logits, largest logit, tensors that changed."""
    config = engines.family_config(overrides, world)
    engine = engines.engine_of(config, rank, store)
    engines.train(engine, 2)
    temporary = checkpoint_store.begin(folder / "checkpoints", 2)
    written = shards.save(engine, temporary)
    told = TrainerState(step=2).to_json(engine.layout, 1)
    saved = checkpoint_store.commit(temporary, told, written, config=compose.dump(config)).path
    said: list[str] = []
    checkpoint_exchange.export(folder, folder / "theirs", None, file_bytes=SMALL_FILE_BYTES, say=said.append)
    assert bool(said) == bool(config.model.mtp_num_layers), said
    without = NO_MTP if config.model.mtp_num_layers else []
    back = checkpoint_exchange.import_(
        folder / "theirs", folder / "back", [*engines.BATCHES, "cluster.gpu=none", *overrides, *without]
    )
    first, second = engines.full_tensors(saved), engines.full_tensors(back)
    rows = config.model.vocab_size
    changed = [
        name
        for name, tensor in first.items()
        if not name.startswith(("optimizer.", "mtp."))
        and not torch.equal(*(each[:rows] if name in PADDED_ROWS else each for each in (tensor, second[name])))
    ]
    assert len(second) >= 8
    return *_logits(engine, folder / "theirs", rows), changed


def _logits(engine: Engine, exported: Path, rows: int) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    theirs, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not (told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]), told
    tokens = engines.random_step(11, vocab_size=rows)["tokens"]
    engine.gather_parameters()
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        found = engine.model.module.eval()(tokens, positions, None)[..., :rows]
    return float((found - expected).abs().max()), float(expected.abs().max())


@pytest.mark.parametrize("name", long_tail(MODELS, quick=["Qwen3 MoE, a dense layer between", "DeepSeek-V3"]))
def test_a_family_goes_to_hugging_face_and_back(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    ((difference, largest, changed),) = run_ranks(exchanged, 1, MODELS[name], tmp_path)
    assert changed == []
    assert difference < ABSOLUTE and largest > 0.1


def test_layers_of_multi_token_prediction_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"model\.mtp_num_layers=1: .*mtp_num_layers=null"):
        checkpoint_exchange.import_(tmp_path, tmp_path / "back", ["model=tiny_deepseek"])
