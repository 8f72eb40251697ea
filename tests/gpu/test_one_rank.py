"""One rank on one GPU, in this process: every number format and every way to compute a step, by their losses.

`pytest tests/gpu -m gpu -s` prints a table of what was seen.
"""

from collections.abc import Callable
from functools import partial

import pytest

from .one_rank import Curve, OneRank, in_its_own_process, step_of

pytestmark = pytest.mark.gpu

BF16 = 2e-3
"""Relative difference of two losses that BF16 activations, rounded at other places, may come to in six steps."""
FP8 = 2e-2
"""The same between FP8 and BF16: E4M3 has three bits of mantissa."""


@pytest.fixture(scope="module")
def plain(rank: OneRank) -> Curve:
    """BF16 with everything at its default."""
    return rank.train()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str, Curve], None]:
    """Print a row of the table."""

    def row(what: str, curve: Curve) -> None:
        with capsys.disabled():
            losses = " ".join(f"{loss:.4f}" for loss in curve.losses)
            print(f"\n  {what:<44} {losses}  {curve.peak_bytes / 2**30:.2f} GiB", end=" ")

    return row


def test_the_kernels_in_use_are_told(plain: Curve, tell: Callable[[str, Curve], None]) -> None:
    tell(str(plain.kernels), plain)
    assert "Transformer Engine" in plain.kernels["layers"]
    assert plain.losses[3] < plain.losses[0] - 0.3, "the fourth step sees the first one's tokens again"


@pytest.mark.parametrize(
    "overrides",
    [
        "execution.gradient_accumulation_fusion=false",
        "execution.cross_entropy_chunks=4",
        "execution.cross_entropy=native",
        "execution.cross_entropy=unfused",
        "execution.bias_activation_fusion=false",
        "execution.bias_dropout_fusion=false",
        "execution.apply_rope_fusion=false",
        "execution.cpu_offloading_num_layers=3",
        "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
        "model.recompute_granularity=selective model.recompute_modules=[core_attn]",
        "model.recompute_granularity=selective model.recompute_modules=[mlp,layernorm]",
        "optimizer=adam_bf16_states precision.grad_reduce_in_fp32=false",
        "model.share_embeddings_and_output_weights=true",
        "precision=fp16 precision.initial_loss_scale=4096",
    ],
)
def test_how_a_step_is_computed_does_not_change_what(
    rank: OneRank, plain: Curve, tell: Callable[[str, Curve], None], overrides: str
) -> None:
    curve = rank.train(*overrides.split())
    tell(overrides, curve)
    if "share_embeddings" in overrides:  # another model
        assert curve.losses[3] < curve.losses[0] - 0.3
    else:
        assert curve.losses == pytest.approx(plain.losses, rel=BF16)


def test_two_deterministic_runs_agree_bit_by_bit(plain: Curve, tell: Callable[[str, Curve], None]) -> None:
    first, second = (in_its_own_process("execution=deterministic") for _ in range(2))
    tell("deterministic", first)
    assert (first.losses, first.norms) == (second.losses, second.norms)
    assert first.losses == pytest.approx(plain.losses, rel=BF16)


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_attention_is_the_same_by_either_kernel(plain: Curve, tell: Callable[[str, Curve], None], backend: str) -> None:
    curve = in_its_own_process(f"execution.attention_backend={backend}")
    tell(f"attention {backend}", curve)
    assert curve.losses == pytest.approx(plain.losses, rel=BF16)


@pytest.mark.parametrize("fusion", ["true", "false"])
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_guide", "fp8_current", "fp8_blockwise"])
def test_a_recipe_trains_like_bf16_and_not_in_it(
    rank: OneRank, plain: Curve, tell: Callable[[str, Curve], None], precision: str, fusion: str
) -> None:
    curve = rank.train(f"precision={precision}", f"execution.gradient_accumulation_fusion={fusion}")
    tell(f"{precision}, fusion {fusion}", curve)
    assert curve.losses == pytest.approx(plain.losses, rel=FP8)
    assert curve.losses != plain.losses


@pytest.mark.parametrize("graph", ["local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed", "fp8_current"])
def test_a_recorded_step_is_the_step(
    rank: OneRank, tell: Callable[[str, Curve], None], precision: str, graph: str
) -> None:
    usual = rank.train(f"precision={precision}")
    overrides = [f"precision={precision}", f"execution.cuda_graph_impl={graph}"]
    curve = in_its_own_process(*overrides)
    tell(" ".join(overrides), curve)
    assert curve.losses == pytest.approx(usual.losses, rel=BF16)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_a_recipe_that_this_gpu_cannot_compute_is_refused(rank: OneRank, precision: str) -> None:
    from shardwright.pretrain import machine

    if (machine.detect().gpus[0].compute_capability or (0, 0)) >= (10, 0):
        pytest.skip("this GPU computes it")
    (refusal,) = rank.refusals(rank.config(f"precision={precision}"))
    assert "needs compute capability 10.0" in refusal and "fp8_delayed" in refusal


@pytest.mark.parametrize("precision", ["bf16", "fp8_delayed"])
def test_the_host_does_not_wait_inside_of_forward_and_backward(rank: OneRank, precision: str) -> None:
    from shardwright.parallel.mcore.engine import FORWARD_AND_BACKWARD, UPDATE
    from shardwright.pretrain.tracing import trace

    engine = rank.engine(f"precision={precision}")
    batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in step_of(engine.config, 0)]

    step = partial(engine.train_step, batches, 1e-3, 0.1)
    for _ in range(3):
        step()
    waits = trace(step)
    print(precision, waits)
    del engine, step
    rank.forget()
    assert waits[FORWARD_AND_BACKWARD] == 0
    assert waits[UPDATE] <= 1, "megatron-core reads the gradient norm"
    assert waits["the rest"] <= 2, "the loss is read, and the profiler ends"
