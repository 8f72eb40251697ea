"""Every optimizer goes on bit for bit and in other layouts; parameters treated apart by name; kernels by choice."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.conf.problems import RefusedError
from shardwright.parallel.mcore import shards
from shardwright.pretrain import requirements

from . import engines
from .harness import RunRanks
from .tail import long_tail

type Curve = list[tuple[float, float | None]]
"""Loss and gradient norm of each step."""

MUON = ["optimizer=muon", "precision=bf16"]
needs_muon = pytest.mark.skipif(
    requirements.version("emerging_optimizers") is None,
    reason="emerging-optimizers is missing: pip install -c constraints.txt -e '.[muon]'",
)
OPTIMIZERS = [
    pytest.param(["optimizer=adam"], 1e-5, id="adam"),
    pytest.param(["optimizer=sgd"], 1e-5, id="sgd"),
    # bf16 activations are rounded after sums in another order: some 2**-9 each, which averages out over tokens
    pytest.param(MUON, 1e-3, id="muon", marks=needs_muon),
]
"""Each with the relative difference that another layout may make to a loss."""
LAYOUTS = {
    "DP2": [],
    "DP2 without overlap": ["parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"],
    "TP2 with SP": ["parallel.tp=2", "parallel.sp=true"],
    "PP2": ["parallel.pp=2"],
}
CHUNKS = ["model.num_layers=4", "parallel.pp=2", "parallel.vpp=2"]
"""Two model chunks on each rank, with layers of the same local names."""


def save_in_the_middle(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> Curve:
    """Two steps, a checkpoint, two more steps: these."""
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    engines.train(engine, 2)
    engines.save(engine, folder)
    return engines.train(engine, 2, first_seed=2)


def go_on(rank: int, world: int, store: str, overrides: list[str], folder: Path, with_rng: bool) -> Curve:
    """The last two of these steps, from the checkpoint."""
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    shards.load(engine, folder, with_rng=with_rng)
    return engines.train(engine, 2, first_seed=2)


@pytest.mark.parametrize("layout", long_tail(LAYOUTS, quick=["TP2 with SP"]))
@pytest.mark.parametrize(("optimizer", "relative"), OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit_and_in_another_layout(
    run_ranks: RunRanks, tmp_path: Path, optimizer: list[str], relative: float, layout: str
) -> None:
    folder, overrides = tmp_path / "saved", [*optimizer, *LAYOUTS[layout]]
    whole = run_ranks(save_in_the_middle, 2, overrides, folder)
    assert run_ranks(go_on, 2, overrides, folder, True) == whole
    elsewhere = LAYOUTS["DP2" if layout == "TP2 with SP" else "TP2 with SP"]
    for curve in run_ranks(go_on, 2, [*optimizer, *elsewhere], folder, False):
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in whole[0]], rel=relative)


def update_of_muon(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """What one step adds to the main weights, with learning rate 1 and no weight decay."""
    engine = engines.engine_of(engines.config_of([*MUON, *overrides], world), rank, store)
    engines.save(engine, folder / "before")
    engine.train_step(engines.share(engine, engines.random_step(0)), lr=1.0, weight_decay=0.0)
    engines.save(engine, folder / "after")
    if rank:
        return {}
    before, after = engines.full_tensors(folder / "before"), engines.full_tensors(folder / "after")
    return {name: after[name] - before[name] for name in before if name.startswith("optimizer.state.fp32_param.")}


@needs_muon
@pytest.mark.parametrize(
    ("layout", "mode", "orthogonal"),
    [
        ("DP2", "duplicated", True),
        ("TP2 with SP", "duplicated", True),
        ("TP2 with SP", "distributed", True),
        ("TP2 with SP", "blockwise", False),
    ],
)
def test_an_update_of_muon_is_orthogonal_also_of_a_matrix_that_ranks_share(
    run_ranks: RunRanks, tmp_path: Path, layout: str, mode: str, orthogonal: bool
) -> None:
    """Newton-Schulz brings most singular values near 1, none above 1.2; two orthogonal halves reach the root of 2."""
    overrides = [*LAYOUTS[layout], f"optimizer.muon_tp_mode={mode}"]
    updates = run_ranks(update_of_muon, 2, overrides, tmp_path)[0]
    (stacked,) = [update for name, update in updates.items() if name.endswith("self_attention.linear_proj.weight")]
    for update in stacked:
        values = torch.linalg.svdvals(update.float()) / (0.2 * max(update.shape) ** 0.5)
        assert (values.max() < 1.25) == orthogonal
        assert 0.8 < values.median() < 1.2


# ---- overrides by name -----------------------------------------------------------------------------------------------

LAYER_1_STANDS_STILL = (
    "optimizer.overrides=[{match:'*.linear_fc1.weight',lr_mult:0.5},{match:'decoder.layers.1.*',lr_mult:0,wd_mult:0}]"
)


def what_moves(
    rank: int, world: int, store: str, overrides: list[str]
) -> tuple[set[str], list[dict[str, Any]], set[tuple[float, float]]]:
    """Parameters that one step moves, by their name in the whole model; the groups as told and as they are."""
    from shardwright.parallel.mcore.optimizers import named_parameters

    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    parameters = {name: own for chunk in engine.chunks for name, own in named_parameters(chunk.module).items()}
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    engines.train(engine, 1)
    engine.gather_parameters()
    moved = {name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])}
    real = {(group["lr_mult"], group["wd_mult"]) for group in engine.optimizer.param_groups}
    return moved, engine.parameter_groups, real


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        (LAYOUTS["DP2"], "adam"),
        pytest.param(LAYOUTS["TP2 with SP"], "adam", marks=pytest.mark.slow),
        (LAYOUTS["PP2"], "adam"),
        pytest.param(LAYOUTS["PP2"], "sgd", marks=pytest.mark.slow),
        (CHUNKS, "adam"),
        pytest.param(LAYOUTS["PP2"], "muon", marks=needs_muon),
        pytest.param(LAYOUTS["DP2"], "muon", marks=[needs_muon, pytest.mark.slow]),
        pytest.param(CHUNKS, "muon", marks=[needs_muon, pytest.mark.slow]),
    ],
)
def test_parameters_are_treated_apart_by_their_name_in_the_whole_model(
    run_ranks: RunRanks, layout: list[str], optimizer: str
) -> None:
    chosen = MUON if optimizer == "muon" else [f"optimizer={optimizer}"]
    results = run_ranks(what_moves, 2, [*chosen, *layout, LAYER_1_STANDS_STILL])
    moved = {name for names, *_ in results for name in names}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in moved
    assert not [name for name in moved if name.startswith("decoder.layers.1.")]
    for _, told, real in results:
        rows = {row["name"]: (row["lr_mult"], row["weight_decay"]) for row in told}
        decay = told[0]["weight_decay"] or told[1]["weight_decay"]
        assert rows["*.linear_fc1.weight"] == (0.5, decay)
        assert rows["decoder.layers.1.*"] == (0.0, 0.0)
        assert rows["*.linear_fc1.weight, decoder.layers.1.*"] == (0.0, 0.0), "the later override counts"
        assert {(0.5, 1.0), (0.0, 0.0), (1.0, 1.0)} <= real


def still_experts(rank: int, world: int, store: str, overrides: list[str]) -> set[str]:
    """Parameters of experts that one step does not move, by their name in the whole model."""
    from shardwright.parallel.mcore.optimizers import named_parameters

    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    parameters = {name: own for name, own in named_parameters(engine.model.module).items() if ".local_experts." in name}
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    engines.train(engine, 1)
    engine.gather_parameters()
    return {name for name, parameter in parameters.items() if torch.equal(parameter, before[name])}


@pytest.mark.parametrize("layout", [[], ["parallel.ep=2"]], ids=["DP2", "EP2"])
def test_an_expert_is_treated_apart_by_its_number_in_the_whole_model(run_ranks: RunRanks, layout: list[str]) -> None:
    expert = "decoder.layers.1.mlp.experts.local_experts.3"
    overrides = ["model=tiny_mixtral", "model.num_layers=2", f"optimizer.overrides=[{{match:'{expert}.*',lr_mult:0}}]"]
    found = run_ranks(still_experts, 2, [*overrides, *layout])
    assert set().union(*found) == {f"{expert}.linear_fc1.weight", f"{expert}.linear_fc2.weight"}


def test_half_the_learning_rate_makes_half_the_step(run_ranks: RunRanks) -> None:
    whole = run_ranks(first_step, 1, [])[0]
    half = run_ranks(first_step, 1, ["optimizer.overrides=[{match:'*.linear_fc1.weight',lr_mult:0.5}]"])[0]
    for name, step in whole.items():
        factor = 0.5 if name.endswith("linear_fc1.weight") else 1.0
        # a weight is some 1e5 times its step, so an fp32 step is known to some 1e-2 of itself
        torch.testing.assert_close(half[name], factor * step, rtol=1e-2, atol=1e-7)


def first_step(rank: int, world: int, store: str, overrides: list[str]) -> dict[str, torch.Tensor]:
    """What one step of Adam adds to every parameter."""
    engine = engines.engine_of(engines.config_of(["optimizer=adam", *overrides], world), rank, store)
    before = {name: parameter.detach().clone() for name, parameter in engine.model.module.named_parameters()}
    engine.train_step(engines.share(engine, engines.random_step(0)), lr=1e-3, weight_decay=0.0)
    engine.gather_parameters()
    return {name: now.detach() - before[name] for name, now in engine.model.module.named_parameters()}


def test_overrides_go_on_in_another_layout(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder, overrides = tmp_path / "saved", ["optimizer=adam", LAYER_1_STANDS_STILL]
    whole = run_ranks(save_in_the_middle, 2, [*overrides, *LAYOUTS["PP2"]], folder)
    for layout in ("DP2", "TP2 with SP"):
        for curve in run_ranks(go_on, 2, [*overrides, *LAYOUTS[layout]], folder, False):
            assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in whole[0]], rel=1e-5)


def refusal(rank: int, world: int, store: str, overrides: list[str]) -> str:
    with pytest.raises(RefusedError) as caught:
        engines.engine_of(engines.config_of(overrides, world), rank, store)
    return str(caught.value)


def test_a_glob_that_matches_nothing_is_refused_on_all_ranks_with_names_near_it(run_ranks: RunRanks) -> None:
    wrong = "optimizer.overrides=[{match:'decoder.layers.1.*',lr_mult:1},{match:'*.linear_fc3.weight',lr_mult:0.5}]"
    first, second = run_ranks(refusal, 2, ["parallel.pp=2", wrong])
    assert first == second
    assert "1 problem" in first
    assert "optimizer.overrides[1].match=*.linear_fc3.weight: matches none of the" in first
    assert "decoder.layers.*.mlp.linear_fc1.weight" in first


def refused_load(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> str:
    engine = engines.engine_of(engines.config_of(overrides, world), rank, store)
    with pytest.raises(RefusedError) as caught:
        shards.load(engine, folder, with_rng=False)
    return str(caught.value)


def test_a_checkpoint_of_another_optimizer_or_with_other_groups_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_ranks(save_in_the_middle, 2, ["optimizer=adam", LAYER_1_STANDS_STILL], folder)
    for message in run_ranks(refused_load, 2, ["optimizer=sgd", LAYER_1_STANDS_STILL], folder):
        assert "optimizer.optimizer=sgd: the checkpoint was written by another optimizer" in message
    for message in run_ranks(refused_load, 2, ["optimizer=adam"], folder):
        assert "optimizer.overrides=[]: the checkpoint has other parameter groups: lr_mult=0.0 wd_mult=0.0;" in message


@needs_muon
def test_muon_refuses_a_checkpoint_of_adam(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(save_in_the_middle, 1, ["optimizer=adam", "precision=bf16"], tmp_path / "saved")
    assert "optimizer.optimizer=muon" in run_ranks(refused_load, 1, MUON, tmp_path / "saved")[0]


# ---- kernels and what a checkpoint says of a group -------------------------------------------------------------------


def kernels_by_choice(rank: int, world: int, store: str) -> list[str]:
    """What updates the weights with a package of apex's shape, and without choosing it."""
    import megatron.core.optimizer as mcore_optimizer

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params: Any, adam_w_mode: bool, **arguments: Any) -> None:
            assert adam_w_mode
            super().__init__(params, **arguments)

    FusedAdam.__module__ = "apex.optimizers.fused_adam"
    apex, stand_in = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    vars(stand_in).update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    sys.modules.update({"apex": apex, "apex.optimizers": stand_in})
    seen = []
    config = engines.config_of(["optimizer.kernel=apex"], world)
    engine = engines.engine_of(config, rank, store)
    engines.train(engine, 1)
    seen.append(engine.kernels()["optimizer"])
    from shardwright.conf.choices import OptimizerKernel
    from shardwright.parallel.mcore.optimizers import use_kernel

    for kernel in (OptimizerKernel.torch, OptimizerKernel.apex, OptimizerKernel.auto):
        use_kernel(kernel)
        seen.append(mcore_optimizer.Adam.__module__.split(".")[0])
    return seen


def test_the_chosen_kernel_is_the_one_in_use_and_auto_is_megatron_core_s_own(run_ranks: RunRanks) -> None:
    assert run_ranks(kernels_by_choice, 1) == [["apex FusedAdam", "torch", "apex", "torch"]]


def betas_after_resume(rank: int, world: int, store: str, folder: Path) -> list[tuple[tuple[float, float], float]]:
    """Betas and step of every group, of a run that goes on with another beta and other learning rates."""
    changed = ["optimizer.adam_beta2=0.9", "optimizer.lr=3e-5", "optimizer.min_lr=2e-5"]
    engine = engines.engine_of(engines.config_of(changed, world), rank, store)
    shards.load(engine, folder, with_rng=False)
    return [(group["betas"], group["step"]) for group in engine.optimizer.param_groups]


def test_a_run_goes_on_with_betas_and_rates_of_its_configuration_and_the_step_of_its_checkpoint(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(save_in_the_middle, 1, ["optimizer.adam_beta2=0.95"], tmp_path / "saved")
    assert run_ranks(betas_after_resume, 1, tmp_path / "saved")[0] == [((0.9, 0.9), 2.0)] * 2
