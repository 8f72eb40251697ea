"""Amaxes of delayed scaling over several ranks: shared where they must be, compared, and never poisoned."""

import math
import zlib
from typing import Any

import pytest
import torch

from shardwright.parallel.mcore.engine import Engine
from shardwright.parallel.mcore.optimizers import named_parameters

from . import engines
from .harness import RunRanks
from .tail import long_tail

DELAYED = ["precision=fp8_delayed", "precision.dtype=fp32", "precision.backend=emulated"]
SHORT = "precision.fp8_amax_history_len=4"
LAYOUTS = {
    "TP2": (2, "tiny", ["parallel.tp=2"]),
    "TP2 with SP": (2, "tiny", ["parallel.tp=2", "parallel.sp=true"]),
    "DP2": (2, "tiny", []),
    "CP2": (2, "tiny", ["parallel.cp=2"]),
    "PP2": (2, "tiny", ["parallel.pp=2"]),
    "EP2": (2, "tiny_mixtral", ["parallel.ep=2", "model.num_layers=1"]),
    "TP2 with SP, DP2": (4, "tiny", ["parallel.tp=2", "parallel.sp=true"]),
}


def engine_of(rank: int, world: int, store: str, model: str, overrides: list[str]) -> Engine:
    if model == "tiny":
        config = engines.config_of([*DELAYED, SHORT, *overrides], world)
    else:
        config = engines.family_config([f"model={model}", *DELAYED, SHORT, *overrides], world)
    return engines.engine_of(config, rank, store)


def compared(rank: int, world: int, store: str, model: str, overrides: list[str]) -> Any:
    """Differences after two steps, then with a planted one; the scales, and how many amaxes each history holds."""
    engine = engine_of(rank, world, store, model, overrides)
    engines.train(engine, 2)
    before, state = engine.narrow.differences(), engine.narrow.amax_state()
    scales = {name: tensor.item() for name, tensor in state.items() if name.endswith("scale")}
    planted = next(name for name in state if name.endswith("linear_qkv dy scale"))
    if rank == 1:
        state[planted].copy_(torch.nextafter(state[planted], torch.tensor(math.inf)))
    after = [(each.tensor, each.ranks, each.others) for each in engine.narrow.differences()]
    return before, after, planted, scales


@pytest.mark.parametrize("layout", long_tail(list(LAYOUTS), quick=["TP2 with SP", "EP2"]))
def test_the_self_check_passes_and_finds_a_scale_that_is_one_bit_off(run_ranks: RunRanks, layout: str) -> None:
    world, model, overrides = LAYOUTS[layout]
    ranks = run_ranks(compared, world, model, overrides)
    others = tuple(rank for rank in range(world) if rank != 1)
    for before, after, _, scales in ranks:
        assert before == []
        assert any(scale != 1.0 for scale in scales.values())
        planted = ranks[1][2]
        if layout == "PP2":  # each stage shares with nobody: there is no other copy
            assert after == []
        else:
            assert after == [(planted, (1,), others)]


GROUPS = {"tp": [[0, 1], [2, 3]], "tp_cp": [[0, 1], [2, 3]], "tp_dp_cp": [[0, 1, 2, 3]]}


def scales_of(rank: int, world: int, store: str, group: str) -> dict[str, float]:
    overrides = ["parallel.tp=2", "parallel.sp=true", f"precision.amax_group={group}"]
    engine = engine_of(rank, world, store, "tiny", overrides)
    engines.train(engine, 1)
    return {name: tensor.item() for name, tensor in engine.narrow.amax_state().items() if name.endswith("x scale")}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_scales_are_shared_by_exactly_the_ranks_of_the_group(run_ranks: RunRanks, group: str) -> None:
    found = run_ranks(scales_of, 4, group)
    for members in GROUPS[group]:
        assert all(found[rank] == found[members[0]] for rank in members)
    firsts = [found[members[0]] for members in GROUPS[group]]
    assert all(one != other for place, one in enumerate(firsts) for other in firsts[:place])


def non_finite(rank: int, world: int, store: str, policy: str) -> Any:
    """Three steps; in the second, rank 1's first MLP gets an infinity. Per step: updated, moved, named, histories."""
    engine = engine_of(rank, world, store, "tiny", [f"precision.on_non_finite_amax={policy}"])
    module, seen = engine.narrow.layers["decoder.layers.1.mlp.linear_fc1"], []
    for number in range(3):
        hook = module.register_forward_pre_hook(infinite) if number == 1 and rank == 1 else None
        before = [parameter.clone() for parameter in engine.model.module.parameters()]
        result = engine.train_step(engines.share(engine, engines.random_step(number)), lr=1e-3, weight_decay=0.1)
        if hook is not None:
            hook.remove()
        engine.gather_parameters()
        now = engine.model.module.parameters()
        moved = any(not torch.equal(old, new) for old, new in zip(before, now, strict=True))
        state = engine.narrow.amax_state()
        all_finite = all(bool(tensor.isfinite().all()) for tensor in state.values())
        seen.append((result.updated, moved, result.non_finite_amaxes, all_finite))
    return seen, engine.narrow.differences()


def infinite(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """One element of the input beyond all numbers; what leaves the format saturates, so the loss stays finite."""
    changed = inputs[0].clone()
    changed.view(-1)[3] = math.inf
    return (changed, *inputs[1:])


@pytest.mark.parametrize("policy", long_tail(["stop", "skip", "keep_scale"], quick=["skip", "keep_scale"]))
def test_an_infinity_on_one_rank_is_named_on_all_and_enters_no_history(run_ranks: RunRanks, policy: str) -> None:
    for seen, differences in run_ranks(non_finite, 2, policy):
        assert [names for _, _, names, _ in seen] == [(), ((1, "decoder.layers.1.mlp.linear_fc1 x"),), ()]
        assert all(all_finite for *_, all_finite in seen) and differences == []
        made = policy == "keep_scale"
        assert [(updated, moved) for updated, moved, *_ in seen] == [(True, True), (made, made), (True, True)]


def one_expert(rank: int, world: int, store: str, overrides: list[str]) -> Any:
    """Three steps in which every token goes to experts 0 and 1: losses, and of all experts gradients and histories."""
    engine = engines.engine_of(
        engines.family_config(["model=tiny_mixtral", "model.num_layers=1", "precision=fp32", *overrides], world),
        rank,
        store,
    )
    same_weights(engine)
    router = engine.model.module.decoder.layers[0].mlp.router
    router.register_forward_hook(to_first_experts)
    losses = [loss for loss, _ in engines.train(engine, 3)]
    gradients = {
        name: parameter.main_grad.abs().max().item()
        for name, parameter in engine.model.module.named_parameters()
        if ".local_experts." in name
    }
    state = {name: tensor.tolist() for name, tensor in engine.narrow.amax_state().items() if ".experts." in name}
    return losses, gradients, state


def same_weights(engine: Engine) -> None:
    """Give every matrix weights that follow from its name in the whole model, whatever the layout."""
    for name, parameter in named_parameters(engine.model.module).items():
        if parameter.ndim > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    engine.optimizer.reload_model_params()


def to_first_experts(router: Any, inputs: Any, output: Any) -> Any:
    """Probabilities and map [tokens, experts]: one half each for the first two experts."""
    probabilities, routes = output
    first = torch.zeros_like(routes)
    first[:, :2] = True
    return probabilities.sum(-1, keepdim=True) * first.to(probabilities.dtype) / 2, first


def test_an_expert_without_tokens_has_gradients_of_zero_and_keeps_its_history(run_ranks: RunRanks) -> None:
    """Experts 2 and 3 stand on rank 1, which gets no token at all."""
    plain = run_ranks(one_expert, 1, [])[0][0]
    for recipe in ([], [*DELAYED, SHORT]):
        alone = run_ranks(one_expert, 1, recipe)[0][0]
        ranks = run_ranks(one_expert, 2, ["parallel.ep=2", *recipe])
        for losses, gradients, state in ranks:
            assert losses == pytest.approx(alone, rel=1e-5 if not recipe else 2e-3)
            assert losses == pytest.approx(plain, rel=1e-5 if not recipe else 2e-2)
            busy = losses is ranks[0][0]
            assert all((gradient > 0) == busy for gradient in gradients.values()), gradients
            for name, values in state.items():
                untouched = values == (1.0 if name.endswith("scale") else [0.0] * 4)
                assert untouched != busy, name


def products(rank: int, world: int, store: str) -> list[tuple[list[float], float]]:
    """One weight, five times the same micro-batch in each of three steps: errors of each output, of its evaluation."""
    engine = engine_of(rank, world, store, "tiny", [])
    module, errors = engine.narrow.layers["decoder.layers.1.mlp.linear_fc2"], []

    def compare(layer: Any, inputs: Any, output: Any) -> None:
        exact = inputs[0].detach().double() @ layer.weight.detach().double().T
        errors.append(((output[0].detach() - exact).norm() / exact.norm()).item())

    module.register_forward_hook(compare)
    batch = engines.share(engine, engines.random_step(0))[0]
    steps = []
    for _ in range(3):
        errors.clear()
        engine.train_step([batch] * 5, lr=1e-4, weight_decay=0.1)
        training = list(errors)
        errors.clear()
        engine.evaluate(iter([[batch]]))
        steps.append((training, errors[0]))
    return steps[1:]  # in the first one the histories begin to fill


def test_every_micro_batch_and_the_evaluation_multiply_with_the_weights_of_their_step(run_ranks: RunRanks) -> None:
    for training, evaluated in run_ranks(products, 1)[0]:
        assert len(training) == 5 and 0 < training[0] < 0.1
        assert all(error <= 1.2 * training[0] for error in [*training, evaluated])
