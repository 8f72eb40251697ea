"""Models with experts, latent attention and multi-token prediction: every layout trains like one rank."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .agreement import Run, assert_agree, start_from_scratch, train_from
from .harness import RunRanks
from .tail import long_tail

NUM_STEPS = 4
"""Few: a token whose two best experts score alike to rounding goes to another in another layout, and then nothing
agrees any more. The more steps, the likelier."""
COMMON = ["model.vocab_size=500", "optimizer.adam_eps=1e-6"]
"""With Adam's usual 1e-8, an element whose gradient is zero but for rounding moves by a whole step in either direction:
weights and all that follow then differ by up to 3e-5 between layouts. With 1e-6 they differ by at most 2e-6."""

MODELS = {
    "experts": ["model=tiny_mixtral", *COMMON],
    "deepseek": ["model=tiny_deepseek", *COMMON],
    "latent attention": [
        *("model=tiny_deepseek", *COMMON),
        *("model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"),
    ],
}
"""Plain experts; DeepSeek's three parts with a shared expert and a dense first layer; the same without multi-token
prediction, which context parallelism refuses."""

TENSOR = ["parallel.tp=2", "parallel.sp=true"]
LAYOUTS = {
    "experts over data-parallel ranks": ("experts", 2, ["parallel.ep=2"]),
    "experts over data-parallel ranks, gathering all tokens": (
        "experts",
        2,
        ["parallel.ep=2", "model.moe_token_dispatcher_type=allgather"],
    ),
    "experts whole on tensor-parallel ranks": ("experts", 2, [*TENSOR, "parallel.etp=1"]),
    "experts over tensor-parallel ranks": ("experts", 2, [*TENSOR, "parallel.ep=2", "parallel.etp=1"]),
    "experts over ranks, each split in two": ("experts", 4, [*TENSOR, "parallel.ep=2"]),
    "experts over context-parallel ranks": ("experts", 2, ["parallel.cp=2", "parallel.ep=2"]),
    "experts over the ranks of a stage": ("experts", 4, ["parallel.pp=2", "parallel.ep=2"]),
    "interleaved stages with experts": ("experts", 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "shared and routed experts": ("deepseek", 2, ["parallel.ep=2"]),
    "shared and routed experts over tensor-parallel ranks": (
        "deepseek",
        2,
        [*TENSOR, "parallel.ep=2", "parallel.etp=1"],
    ),
    "a stage without experts": ("deepseek", 2, ["parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"]),
    "multi-token prediction and the loss alone on a chunk": (
        "deepseek",
        2,
        ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=Et|tt|t|mL"],
    ),
    "multi-token prediction behind stages of experts": ("deepseek", 4, ["parallel.pp=2", "parallel.ep=2"]),
    "latent attention over context-parallel ranks": ("latent attention", 2, ["parallel.cp=2", "parallel.ep=2"]),
}


@pytest.fixture(scope="module")
def alone(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Run]]:
    """A function from a model to its first checkpoint and what one rank makes of that."""

    @cache
    def train(model: str) -> tuple[Path, Run]:
        folder = tmp_path_factory.mktemp("alone")
        run_ranks(start_from_scratch, 1, MODELS[model], folder / "start")
        return folder / "start", run_ranks(train_from, 1, MODELS[model], NUM_STEPS, folder / "start", folder)[0]

    return train


@pytest.mark.parametrize("name", long_tail(LAYOUTS, quick=["experts over tensor-parallel ranks"]))
def test_a_layout_of_experts_trains_like_one_rank(
    run_ranks: RunRanks, alone: Callable[[str], tuple[Path, Run]], tmp_path: Path, name: str
) -> None:
    model, world, overrides = LAYOUTS[name]
    start, expected = alone(model)
    assert_agree(run_ranks(train_from, world, [*MODELS[model], *overrides], NUM_STEPS, start, tmp_path), expected)
