"""Faults of megatron-core 0.19.2 wherever neither Transformer Engine nor apex supplies Adam, mended in one place.

torch's Adam keeps `step` as a tensor inside its per-parameter state. The distributed optimizer of 0.19.2

1. reads that state when it saves or loads, also before the first step, when it does not exist yet (assertion,
   distrib_optimizer.py:839): `create_state` makes what the first step would make;
2. does not supply `step` when it loads a fully reshardable checkpoint (KeyError, :1223), and
3. hands all parameters ONE `step` tensor after a load (~:1046), so that one update adds N to it and a resumed run
   silently diverges: `mend` gives each parameter its own;
   of a `dp_reshardable` one it takes, as every parameter's, the step from before the load: `mend` leaves it out;
4. finds no step to save where it has no parameters (:839), which is so on a pipeline stage whose layers are all dense,
   for the optimizer of experts: `link` lets it take the step of the others, for rank 0 writes it for all ranks.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def create_state(optimizer: torch.optim.Adam) -> None:
    """Create the state of every parameter, as the first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )


def link(parts: list[Any]) -> None:
    """Let the optimizers of a chain know each other."""
    for part in parts:
        part.chain = parts


def _state_dict_without_parameters(optimizer: Any) -> dict[str, Any]:
    """What `DistributedOptimizer.state_dict` would give if it had parameters, with the step of the chain."""
    inner = [part.optimizer for part in optimizer.chain if getattr(part, "optimizer", None) is not None]
    steps = [state["step"].item() for each in inner for state in each.state.values() if "step" in state]
    step = steps[0] if steps else 0.0
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"step": step}
        for group in optimizer.optimizer.state_dict()["param_groups"]
    ]
    scaler = {"grad_scaler": optimizer.grad_scaler.state_dict()} if optimizer.grad_scaler else {}
    return {"optimizer": {"param_groups": groups}, **scaler}


def mend() -> None:
    """Mend loading; idempotent, harmless with Transformer Engine's Adam, whose step is a number of the group."""
    if getattr(DistributedOptimizer, "_torch_adam_mended", False):
        return
    set_states, load = DistributedOptimizer._set_main_param_and_optimizer_states, DistributedOptimizer.load_state_dict

    @torch.no_grad()  # which a load of `dp_reshardable` lacks: fp32 main weights are views of parameters
    def set_states_with_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    state_dict = DistributedOptimizer.state_dict

    def state_dict_with_step(self: Any) -> dict[str, Any]:
        empty = isinstance(self.optimizer, torch.optim.Adam | torch.optim.SGD) and not self.optimizer.state
        found: dict[str, Any] = _state_dict_without_parameters(self) if empty else state_dict(self)
        return found

    DistributedOptimizer.state_dict = state_dict_with_step
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps
    DistributedOptimizer._torch_adam_mended = True
