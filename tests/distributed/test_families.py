"""Every family trains: all its parameters move, in tensor parallel as on one rank, and its extra losses count."""

from pathlib import Path

import pytest
import torch

from shardwright.parallel.mcore import shards

from . import engines
from .harness import RunRanks
from .tail import long_tail

RELATIVE = 1e-5
"""As for layouts: fp32 sums in another order."""

FAMILIES = ["tiny_gpt", "tiny_qwen3", "tiny_qwen3_moe", "tiny_mixtral", "tiny_deepseek"]
SMALL = ["model.vocab_size=500", "model.num_layers=2"]
LATENT_ATTENTION = [
    "model=tiny_deepseek",
    "model={num_moe_experts:null,moe_ffn_hidden_size:null,moe_shared_expert_intermediate_size:null}",
    "model={moe_router_topk:null,moe_router_num_groups:null,moe_router_group_topk:null}",
    "model={moe_router_topk_scaling_factor:null,moe_router_enable_expert_bias:false}",
    "model={moe_router_load_balancing_type:none,moe_aux_loss_coeff:0.0,mtp_num_layers:null}",
]
type Curve = list[tuple[float, float | None]]


def config_overrides(family: str) -> list[str]:
    pattern = ["model.moe_layer_freq='[0,1]'"] if family == "tiny_deepseek" else []
    return [f"model={family}", *SMALL, *pattern]


def train_from(rank: int, world: int, store: str, overrides: list[str], start: Path) -> tuple[Curve, list[str]]:
    """Losses and norms of three steps and of the first batch again; and what did not move of parameters and biases."""
    engine = engines.engine_of(engines.family_config(overrides, world), rank, store)
    if start.exists():
        shards.load(engine, start, with_rng=False)
    else:
        engines.save(engine, start)

    def tensors() -> dict[str, torch.Tensor]:
        gpt = engine.model.module
        biases = {name: buffer for name, buffer in gpt.named_buffers() if name.endswith("expert_bias")}
        return {**dict(gpt.named_parameters()), **biases}

    before = {name: tensor.clone() for name, tensor in tensors().items()}
    curve = engines.train(engine, 3) + engines.train(engine, 1, first_seed=0)
    engine.gather_parameters()
    now = tensors()
    return curve, [name for name, old in before.items() if torch.equal(old, now[name])]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory):
    start = tmp_path_factory.mktemp("start") / "checkpoint"
    overrides = config_overrides(request.param)
    return overrides, start, run_ranks(train_from, 1, overrides, start)[0]


@pytest.mark.parametrize("alone", FAMILIES, indirect=True)
def test_a_family_learns_and_moves_every_parameter(alone) -> None:
    _, _, (curve, still) = alone
    assert curve[-1][0] < curve[0][0]
    assert still == []


@pytest.mark.parametrize("alone", long_tail(FAMILIES, quick=["tiny_qwen3_moe", "tiny_deepseek"]), indirect=True)
def test_a_family_trains_in_tensor_parallel_like_on_one_rank(run_ranks: RunRanks, alone) -> None:
    overrides, start, (expected, _) = alone
    for curve, still in run_ranks(train_from, 2, [*overrides, "parallel.tp=2", "parallel.sp=true"], start):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=RELATIVE, atol=0)
        assert still == []


def test_latent_attention_has_right_gradients_without_sequence_parallelism(run_ranks: RunRanks, tmp_path: Path) -> None:
    overrides = [*LATENT_ATTENTION, *SMALL]
    (expected, _), *_ = run_ranks(train_from, 1, overrides, tmp_path / "start")
    for curve, _ in run_ranks(train_from, 2, [*overrides, "parallel.tp=2"], tmp_path / "start"):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=RELATIVE, atol=0)


def third_and_fourth_step(rank: int, world: int, store: str, overrides: list[str], folder: Path) -> Curve:
    """Two more steps of a run that saves after two, or continues from there where that is saved."""
    engine = engines.engine_of(engines.family_config([*SMALL, *overrides], world), rank, store)
    if folder.exists():
        shards.load(engine, folder, with_rng=False)
    else:
        engines.train(engine, 2)
        engines.save(engine, folder)
    return engines.train(engine, 2, first_seed=2)  # the fourth shows what the third update did


def test_a_stage_without_experts_saves_what_goes_on_in_every_layout(run_ranks: RunRanks, tmp_path: Path) -> None:
    model = ["model=tiny_mixtral", "model.moe_layer_freq='[0,1]'"]
    expected = run_ranks(third_and_fourth_step, 2, [*model, "parallel.pp=2"], tmp_path / "saved")[0]
    for world, layout in ((2, ["parallel.pp=2"]), (1, [])):
        for found in run_ranks(third_and_fourth_step, world, [*model, *layout], tmp_path / "saved"):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=RELATIVE, atol=0)


# ---- extra losses ----------------------------------------------------------------------------------------------------


def first_norms(rank: int, world: int, store: str, *runs: list[str]) -> list[float]:
    """Gradient norm of the first step of each run; all start with the same weights and have the same batch."""
    configs = [engines.family_config([*SMALL, *overrides], world) for overrides in runs]
    return [float(engines.train(engine, 1)[0][1] or 0.0) for engine in engines.engines_of(configs, rank, store)]


@pytest.mark.parametrize("balancing", ["seq_aux_loss", "global_aux_loss", "aux_loss"])
def test_a_balancing_loss_is_in_the_gradient(run_ranks: RunRanks, balancing: str) -> None:
    model = ["model=tiny_mixtral", f"model.moe_router_load_balancing_type={balancing}"]
    weights = [[*model, f"model.moe_aux_loss_coeff={weight}"] for weight in (0.0, 0.01, 10.0)]
    ((without, little, much),) = run_ranks(first_norms, 1, *weights)
    assert little == pytest.approx(without, rel=0.01) and little != without
    assert much > 1.5 * without


def test_a_balancing_loss_per_sequence_does_not_depend_on_micro_batches(run_ranks: RunRanks) -> None:
    model = ["model=tiny_mixtral", "model.moe_router_load_balancing_type=seq_aux_loss", "model.moe_aux_loss_coeff=1.0"]
    ((one, two, four),) = run_ranks(first_norms, 1, *([*model, f"data.micro_batch_size={size}"] for size in (1, 2, 4)))
    assert [two, four] == pytest.approx([one, one], rel=RELATIVE)


def test_predicting_further_tokens_is_in_the_gradient_by_its_weight(run_ranks: RunRanks) -> None:
    runs = [
        ["model=tiny_deepseek", "model.moe_layer_freq='[0,1]'", f"model.mtp_loss_scaling_factor={weight}"]
        for weight in (0.0, 0.3, 3.0)
    ]
    ((without, little, much),) = run_ranks(first_norms, 1, *runs)
    assert without < little < much


# ---- what is reported ------------------------------------------------------------------------------------------------


def expert_losses(rank: int, world: int, store: str, overrides: list[str], start: Path) -> list[dict[str, float]]:
    """Of two steps with the weights of `start`, which do not move."""
    engine = engines.engine_of(engines.family_config([*SMALL, *overrides], world), rank, store)
    if start.exists():
        shards.load(engine, start, with_rng=False)
    else:
        engines.save(engine, start)
    batch = engines.share(engine, engines.random_step(0))
    results = [engine.train_step(batch, lr=0.0, weight_decay=0.0) for _ in range(2)]
    return [result.expert_losses | result.expert_load for result in results]


@pytest.mark.parametrize("balancing", long_tail(["aux_loss", "seq_aux_loss"], quick=["seq_aux_loss"]))
def test_the_balance_of_experts_is_reported_alike_in_every_layout(
    run_ranks: RunRanks, tmp_path: Path, balancing: str
) -> None:
    # layers with experts stand on the second stage alone
    model = ["model=tiny_mixtral", "model.moe_z_loss_coeff=1e-3", "model.moe_layer_freq='[0,1]'"]
    model.append(f"model.moe_router_load_balancing_type={balancing}")
    ((first, again),) = run_ranks(expert_losses, 1, model, tmp_path / "start")
    assert first == pytest.approx(again, rel=RELATIVE), "a step begins anew"
    balance = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}[balancing]
    assert set(first) == {balance, "z_loss", "expert_load_max", "expert_load_entropy"}
    assert 1.0 < first["expert_load_max"] <= 2.0 and 0.8 < first["expert_load_entropy"] < 1.0, "nearly even at first"
    assert 0.9 <= first[balance] <= 2.0, "four experts, two for a token"
    for layout in (["parallel.pp=2"], ["parallel.tp=2", "parallel.sp=true"], []):
        for found, _ in run_ranks(expert_losses, 2, [*model, *layout], tmp_path / "start"):
            assert found == pytest.approx(first, rel=RELATIVE), layout


def test_a_model_without_experts_reports_none(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(expert_losses, 1, ["model=tiny"], tmp_path / "start") == [[{}, {}]]
