"""The process around a rank: variables that must stand before CUDA starts, and the CPU cores that it may use.

Whoever started the rank (our own launcher, torchrun, srun), the rank itself sets them, before it imports torch: one
place, one behaviour. A variable that the user set stays as it is.
"""

import os
from collections.abc import Mapping

from shardwright.conf.schema import Config
from shardwright.conf.spans import spans
from shardwright.pretrain import machine

DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What `execution.deterministic_mode` wants on a GPU. Source: megatron-core 0.19.2, training/determinism.py."""
_OF_A_GPU = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_", "NCCL_", "CUBLAS_", "PYTORCH_")
"""Names and beginnings of names of variables that bear on speed and results on a GPU."""


def variables(config: Config, device: str) -> dict[str, str]:
    """Variables that a rank should have.

    Args:
        config: the run.
        device: "cuda" or "cpu".
    """
    if device == "cpu":
        return {"OMP_NUM_THREADS": "1"}
    # megatron-core's overlap of communication and computation relies on the order of one queue
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return wanted | DETERMINISTIC if config.execution.deterministic_mode else wanted


def prepare(config: Config, device: str, local_rank: int) -> None:
    """Set this rank's variables and cores; before torch is imported."""
    for name, value in variables(config, device).items():
        os.environ.setdefault(name, value)
    if device == "cuda" and config.execution.bind_to_gpu:
        near = machine.cores_near_gpu(local_rank) & os.sched_getaffinity(0)
        if near:  # a job step may have been given other cores alone
            os.sched_setaffinity(0, near)


def facts(device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For people: the variables that bear on speed and results on this device, and the cores of this process."""
    prefixes = _OF_A_GPU if device == "cuda" else ()
    told = {
        name: value
        for name, value in sorted(environ.items())
        if name == "OMP_NUM_THREADS" or (name.startswith(prefixes) and len(value) < 100)
    }
    return {**told, "cores": spans(sorted(os.sched_getaffinity(0)))}
