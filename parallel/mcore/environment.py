"""What must happen in a process before megatron-core is imported. Import this module first, call `prepare`, then go on.

Every other module of `parallel/mcore` imports megatron-core at its top, so `run` imports them after `prepare`.
"""

import logging
import sys
import warnings
from importlib import metadata

import torch
from packaging.version import InvalidVersion, Version

from shardwright.parallel.mcore import cpu_device

_RESILIENCY_EXT = Version("0.6.0")
"""What megatron-core 0.19 asks for. Source: megatron/core/dist_checkpointing/strategies/nvrx.py."""


def prepare(device: str, local_rank: int = 0, *, deterministic: bool = False) -> torch.device:
    """Make this process ready for megatron-core on `device` ("cpu" or "cuda"); every rank calls it once.

    On the CPU Transformer Engine is hidden: it imports without a GPU, and megatron-core would then take its Adam, which
    refuses to run there.

    Returns:
        The torch device of this rank.
    """
    _hide_old_resiliency_ext()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\.distributed.*")
    torch.use_deterministic_algorithms(deterministic)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    for name in ("transformer_engine", "transformer_engine_torch", "apex"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    cpu_device.enable()
    return torch.device("cpu")


def _hide_old_resiliency_ext() -> None:
    """Let megatron-core not find a nvidia-resiliency-ext that is too old for it, and use its own parts instead.

    The package index has 0.4.1, which tells no version; megatron-core 0.19 fails on importing it.
    """
    try:
        if Version(metadata.version("nvidia-resiliency-ext")) < _RESILIENCY_EXT:
            sys.modules.setdefault("nvidia_resiliency_ext", None)  # type: ignore[arg-type]
    except (metadata.PackageNotFoundError, InvalidVersion):
        return
