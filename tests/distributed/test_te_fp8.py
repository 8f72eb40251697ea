"""What takes the place of Transformer Engine's amax reduction, on the CPU.

Transformer Engine is not here, so the two modules that the adapter takes hold of are imitated: the manager's buffers as
transformer_engine 2.20.2 keeps them, and its kernel by the formulas of `parallel/fp8`. What is tested is ours: groups,
flags, names, and that what is not finite enters nothing.
"""

import math
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.fp8 import quantize
from shardwright.parallel.fp8.formats import E4M3

from .harness import RunRanks

KEY = "forward_recipe,group"
NAMES = ["first", "second"]
COLUMNS = 3
"""Input, weight, output of a layer's one product."""


@dataclass
class State:
    """As FP8GlobalState."""

    global_amax_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    autocast_arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)


class Manager:
    """As FP8GlobalStateManager: what the adapter reads, and the function that it replaces."""

    quantization_state = State()

    @staticmethod
    def get_buffer_info() -> str:
        return "place in buffers"

    @staticmethod
    def split_key_in_buffer(key: str) -> tuple[bool, str]:
        direction, rest = key.split("_", 1)
        return direction == "forward", rest

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        raise AssertionError("Transformer Engine's own reduction was called")

    @classmethod
    def leave_region(cls) -> None:
        """As autocast_exit."""
        cls.reduce_and_update_fp8_tensors(forward=True)


def kernel(amax: torch.Tensor, histories: Any, scales: Any, algorithm: str, dtype: Any, margin: int) -> None:
    """As fused_amax_and_scale_update_after_reduction: an amax of 0 leaves history and scale alone."""
    start = 0
    for history, scale in zip(histories, scales, strict=True):
        for column in range(history.shape[1]):
            value = amax[start + column]
            if value != 0:
                rolled = torch.cat([history[1:, column], history[:1, column]])
                rolled[-1] = value
                history[:, column] = rolled
                scale[column] = quantize.delayed_scale(history[1:, column].max(), scale[column], E4M3, margin)
            history[0, column] = 0.0
        start += history.shape[1]


class Layer:
    """A module with FP8 state; unlike a namespace it can be referred to weakly."""

    def __init__(self, fp8_meta: dict[str, Any]) -> None:
        self.fp8_meta = fp8_meta


def imitate(group: dist.ProcessGroup) -> dict[str, Any]:
    """Put the imitation in place, with two layers that are registered as their first call would."""
    quantization: Any = ModuleType("transformer_engine.pytorch.quantization")
    quantization.FP8GlobalStateManager, quantization.get_fp8_te_dtype = Manager, lambda recipe, forward: "e4m3"
    tex: Any = ModuleType("transformer_engine_torch")
    tex.fused_amax_and_scale_update_after_reduction = kernel
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
    sys.modules[quantization.__name__], sys.modules[tex.__name__] = quantization, tex
    state, modules = Manager.quantization_state, {}
    recipe = SimpleNamespace(reduce_amax=True, amax_compute_algo="max", margin=0)
    state.autocast_arguments["recipe,group"] = recipe, group
    for place, name in enumerate(NAMES):
        scaling = SimpleNamespace(amax_history=torch.zeros(4, COLUMNS), scale=torch.full((COLUMNS,), 224.0))
        modules[name] = Layer({"scaling_fwd": scaling, "place in buffers": [place, KEY]})
        state.global_amax_buffer.setdefault(KEY, []).append(scaling.amax_history[0])
        state.global_amax_history_buffer.setdefault(KEY, []).append(scaling.amax_history)
        state.global_scale_buffer.setdefault(KEY, []).append(scaling.scale)
    return modules


def region(rank: int, world: int, store: str, amaxes: list[float]) -> Any:
    """Two regions: in the first, the first layer's input has an amax of `amaxes[rank]`, in the second of 2."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    world_group = dist.group.WORLD
    assert world_group is not None
    modules = imitate(world_group)
    from megatron.core import parallel_state

    from shardwright.parallel.mcore.te_fp8 import AmaxReduction

    reduction = AmaxReduction(world_group, modules)
    reduction.install()
    assert parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=True) is world_group
    found = []
    for value in (amaxes[rank], 2.0):
        for module in modules.values():
            module.fp8_meta["scaling_fwd"].amax_history[0] = torch.tensor([2.0, 1.0, 0.0])
        modules["first"].fp8_meta["scaling_fwd"].amax_history[0, 0] = value
        Manager.leave_region()
        number = reduction.take_num_bad()
        own = reduction.take_own_non_finite() if number else []
        found.append((number, own, {name: tensor.tolist() for name, tensor in reduction.tensors().items()}))
    return found


def test_scales_follow_the_largest_amax_of_the_group(run_ranks: RunRanks) -> None:
    first, second = run_ranks(region, 2, [2.0, 8.0])
    assert first == second
    number, own, state = first[0]
    assert (number, own) == (0, [])
    assert state["first scaling_fwd scales"] == [56.0, 448.0, 224.0]  # the output was not quantised
    assert state["second scaling_fwd scales"] == [224.0, 448.0, 224.0]
    assert [row[0] for row in state["first scaling_fwd amaxes"]] == [0.0, 0.0, 0.0, 8.0]


@pytest.mark.parametrize("amaxes", [[math.nan, 8.0], [8.0, math.nan], [math.inf, 8.0], [8.0, math.inf]], ids=str)
def test_what_is_not_finite_on_any_rank_changes_nothing_and_is_named_where_it_is(
    run_ranks: RunRanks, amaxes: list[float]
) -> None:
    ranks = run_ranks(region, 2, amaxes)
    for amax, ((number, own, state), (later, _, after)) in zip(amaxes, ranks, strict=True):
        assert number == 1 and later == 0
        assert own == ([] if math.isfinite(amax) else ["first x"])
        assert state["first scaling_fwd scales"][0] == 224.0
        assert [row[0] for row in state["first scaling_fwd amaxes"]] == [0.0] * 4
        assert state["second scaling_fwd scales"] == [224.0, 448.0, 224.0]
        assert after["first scaling_fwd scales"][0] == 224.0  # 448 / 2, by an amax of the second region
        assert [row[0] for row in after["first scaling_fwd amaxes"]] == [0.0, 0.0, 0.0, 2.0]
    assert ranks[0][0][2] == ranks[1][0][2]
