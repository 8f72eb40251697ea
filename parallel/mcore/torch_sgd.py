"""SGD inside megatron-core's distributed optimizer, which 0.19.2 knows with Adam and Lion alone.

It refuses SGD because it has no function that creates its state (assertion, distrib_optimizer.py:689), and would save
Adam's two moments (`optimizer_state_keys`, :806). Both are told here. A momentum of zero before the first step changes
nothing: torch's first step takes the gradient as it is, and 0 * momentum + gradient is that.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STATE_KEYS = ("momentum_buffer",)


def create_state(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    """Create the momentum of every parameter, and the step that the distributed optimizer expects of torch's kind."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                if isinstance(optimizer, torch.optim.SGD):
                    optimizer.state[parameter]["step"] = torch.tensor(0.0)


def allow() -> None:
    """Let `DistributedOptimizer` take SGD; idempotent."""
    if getattr(DistributedOptimizer, "_sgd_allowed", False):
        return
    initialize, keys = DistributedOptimizer.__init__, DistributedOptimizer.optimizer_state_keys

    def initialize_with_state(
        self: Any, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any, **kwargs: Any
    ) -> None:
        if config.optimizer == "sgd":
            init_state_fn = create_state
        initialize(self, optimizer, config, grad_scaler, init_state_fn, **kwargs)

    def state_keys(self: Any) -> tuple[str, ...]:
        known: tuple[str, ...] = keys.fget(self)
        return STATE_KEYS if self.config.optimizer == "sgd" else known

    DistributedOptimizer.__init__ = initialize_with_state
    DistributedOptimizer.optimizer_state_keys = property(state_keys)
    DistributedOptimizer._sgd_allowed = True
