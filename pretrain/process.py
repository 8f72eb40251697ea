"""The process around a rank: variables that must stand before CUDA starts, and the CPU cores that it may use.

Whoever started the rank (our own launcher, torchrun, srun), the rank itself sets them, before it imports torch: one
place, one behaviour. A variable that the user set stays as it is.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.conf.schema import Config
from shardwright.conf.spans import spans
from shardwright.pretrain import machine
from shardwright.pretrain.folder import Attempt

DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What `execution.deterministic_mode` wants on a GPU. Source: megatron-core 0.19.2, training/determinism.py."""
NVFP4_WITHOUT = {
    "fp4_random_hadamard_transform": "NVTE_NVFP4_DISABLE_RHT",
    "fp4_stochastic_rounding": "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
}
"""Key of `precision` -> the switch of Transformer Engine for going without, which megatron-core has no setting for.

Source: transformer_engine 2.20.2, common/recipe, NVFP4BlockScaling."""
_OF_A_GPU = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_", "NCCL_", "CUBLAS_", "PYTORCH_")
"""Names and beginnings of names of variables that bear on speed and results on a GPU."""


@dataclass(frozen=True, slots=True)
class Traces:
    """Where NCCL's flight recorder writes the last collectives of a rank, and the pipe that makes it do so.

    torch appends the rank to both names, and `.pipe` to the second; the pipe lies on the machine itself, since a shared
    file system may not have any. Source: torch 2.11, FlightRecorder.cpp and ProcessGroupNCCL.hpp.
    """

    file_prefix: str
    pipe_prefix: str

    @classmethod
    def of(cls, attempt: Attempt) -> "Traces":
        """Those of the ranks of an attempt."""
        pipe = Path(tempfile.gettempdir()) / f"shardwright_{attempt.id}_rank_"
        return cls(str(attempt.path / "logs" / "nccl_trace_rank_"), str(pipe))

    def pipe(self, rank: int) -> str:
        """The pipe of one rank; as long as it has NCCL's process group, what is written into it asks for a trace."""
        return f"{self.pipe_prefix}{rank}.pipe"

    def variables(self) -> dict[str, str]:
        """What torch wants to be told."""
        return {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": self.file_prefix,
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": self.pipe_prefix,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }


def variables(config: Config, device: str, traces: Traces | None = None) -> dict[str, str]:
    """Variables that a rank should have.

    Args:
        config: the run.
        device: "cuda" or "cpu".
        traces: of the attempt, on a GPU; None for none.
    """
    if device == "cpu":
        return {"OMP_NUM_THREADS": "1"}
    # megatron-core's overlap of communication and computation relies on the order of one queue
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **(traces.variables() if traces else {})}
    if config.precision.fp4 is not None:
        wanted |= {variable: "1" for name, variable in NVFP4_WITHOUT.items() if not getattr(config.precision, name)}
    return wanted | DETERMINISTIC if config.execution.deterministic_mode else wanted


def prepare(config: Config, device: str, local_rank: int, traces: Traces | None = None) -> None:
    """Set this rank's variables and cores; before torch is imported."""
    for name, value in variables(config, device, traces).items():
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
