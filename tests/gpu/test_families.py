"""Every family's tiny sibling on one GPU: BF16 and the recipes of Hopper train it, or a rule says why not."""

import pytest

from shardwright.conf.compose import compose

from .one_rank import OneRank, step_of

pytestmark = pytest.mark.gpu

SIZES = ["data=mock", "data.seq_length=256", "data.micro_batch_size=2", "data.global_batch_size=8", "cluster.ranks=1"]
FAMILIES = ["tiny", "tiny_gpt", "tiny_qwen3", "tiny_mixtral", "tiny_qwen3_moe", "tiny_deepseek"]
FP8 = 3e-2


def losses(rank: OneRank, family: str, precision: str) -> list[float]:
    """Of six steps over three batches."""
    config = compose([*SIZES, f"model={family}", f"precision={precision}"])
    engine = rank.engine_of(config)
    found = [engine.train_step(step_of(config, number), 1e-3, 0.1).loss for number in range(6)]
    del engine
    rank.forget()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_in_bf16_and_in_fp8(rank: OneRank, capsys: pytest.CaptureFixture[str], family: str) -> None:
    plain = losses(rank, family, "bf16")
    assert plain[3] < plain[0] - 0.1
    for recipe in ("fp8_delayed", "fp8_current", "fp8_blockwise"):
        refusals = rank.refusals(compose([*SIZES, f"model={family}", f"precision={recipe}"]))
        with capsys.disabled():
            if refusals:
                print(f"\n  {family} {recipe} refused: {refusals[0]}", end=" ")
                continue
            narrow = losses(rank, family, recipe)
            print(f"\n  {family} {recipe}: {narrow[-1]:.4f}, bf16 {plain[-1]:.4f}", end=" ")
        assert narrow == pytest.approx(plain, rel=FP8)
        assert narrow != plain
