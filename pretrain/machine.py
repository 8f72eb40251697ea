"""What this machine has, asked of NVML and of package metadata: without torch, without touching a GPU's memory.

NVML is a library of the driver that may be missing, refuse one query or all of them. None of that stops a run on the
CPU: what cannot be read is None, and a note says why. `CUDA_VISIBLE_DEVICES` is honoured as CUDA does it: indices or
UUIDs (a prefix is enough), read up to the first entry that names nothing. NVML counts in PCI order, which is CUDA's
order too unless different models of GPU are mixed.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwright.conf.choices import GpuKind
from shardwright.conf.schema import Config
from shardwright.pretrain import requirements

try:
    with warnings.catch_warnings():  # the package `pynvml`, which others install beside nvidia-ml-py, warns of itself
        warnings.simplefilter("ignore", FutureWarning)
        import pynvml
except ImportError:  # a container without nvidia-ml-py: as without NVML
    pynvml = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; None where NVML does not say."""

    name: str | None
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as far as a run depends on it."""

    gpus: tuple[Gpu, ...] = ()
    """Visible GPUs, in the order in which local ranks take them."""
    driver: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """Feature of `requirements.REQUIREMENTS` -> installed version, None where missing."""
    notes: tuple[str, ...] = ()
    """Why something could not be read, one sentence per cause."""


def detect(environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at this machine; never raises for what is missing or denied."""
    versions = {feature: requirements.version(feature) for feature in requirements.REQUIREMENTS}
    notes: list[str] = []
    with _visible_gpus(environ, notes) as handles:
        if handles is None:
            return Machine(versions=versions, notes=tuple(notes))
        return Machine(
            gpus=tuple(_gpu(handle, notes) for handle in handles),
            driver=_ask(pynvml.nvmlSystemGetDriverVersion, notes),
            versions=versions,
            notes=tuple(dict.fromkeys(notes)),
        )


def gpu_state(local_rank: int, environ: Mapping[str, str] = os.environ) -> dict[str, float | None]:
    """Clocks, temperature and power of the GPU that a local rank has, now; None where NVML does not say."""
    notes: list[str] = []
    state: dict[str, float | None] = dict.fromkeys(
        ("sm_clock_mhz", "memory_clock_mhz", "temperature_celsius", "power_watts")
    )
    with _visible_gpus(environ, notes) as handles:
        for handle in (handles or [])[local_rank : local_rank + 1]:
            answers = (
                _ask(pynvml.nvmlDeviceGetClockInfo, notes, handle, pynvml.NVML_CLOCK_SM),
                _ask(pynvml.nvmlDeviceGetClockInfo, notes, handle, pynvml.NVML_CLOCK_MEM),
                _ask(pynvml.nvmlDeviceGetTemperature, notes, handle, pynvml.NVML_TEMPERATURE_GPU),
                _ask(pynvml.nvmlDeviceGetPowerUsage, notes, handle),
            )
            for name, answer, unit in zip(state, answers, (1, 1, 1, 1e-3), strict=True):  # NVML counts milliwatts
                state[name] = None if answer is None else answer * unit
    return state


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHealth:
    """What says whether one visible GPU is fit, now; None where NVML does not say."""

    index: int
    """Among the visible ones."""
    uuid: str
    ecc_enabled: bool | None
    ecc_uncorrected: int | None
    """Errors that ECC could not correct, since the driver was loaded."""
    remap_pending: bool | None
    """Memory rows wait for a reset of the GPU to be replaced."""
    remap_failed: bool | None
    """A row could not be replaced: there are no spare ones left."""
    pcie_generation: int | None
    """Falls while the GPU is idle, so ask under load."""
    pcie_max_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    throttle_reasons: int | None
    """Bits `nvmlClocksThrottleReason*`."""
    sm_clock_mhz: int | None
    sm_max_clock_mhz: int | None


def gpu_health(environ: Mapping[str, str] = os.environ) -> tuple[list[GpuHealth], list[str]]:
    """The health of every visible GPU, and why something could not be read."""
    notes: list[str] = []
    with _visible_gpus(environ, notes) as handles:
        found = [_health(index, handle, notes) for index, handle in enumerate(handles or [])]
    return found, list(dict.fromkeys(notes))


@contextmanager
def watch_xids(environ: Mapping[str, str] = os.environ) -> Iterator[Callable[[], list[tuple[int, int]]]]:
    """Listen for critical errors (XID) of the visible GPUs: NVML tells those alone that come while somebody listens.

    Yields:
        A function that returns what came since the last call: index of the visible GPU, XID.
    """
    notes: list[str] = []
    with _visible_gpus(environ, notes) as handles:
        events = _ask(pynvml.nvmlEventSetCreate, notes) if handles else None
        kind = pynvml.nvmlEventTypeXidCriticalError if handles else 0
        uuids = [_uuid(handle, notes) for handle in handles or []]
        if events is not None:
            for handle in handles or []:
                _ask(pynvml.nvmlDeviceRegisterEvents, notes, handle, kind, events)

        def came() -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            while events is not None:
                event = _ask(pynvml.nvmlEventSetWait, notes, events, 0)  # an error says that none waits
                if event is None:
                    break
                uuid = _uuid(event.device, notes)
                if uuid in uuids:
                    found.append((uuids.index(uuid), int(event.eventData)))
            return found

        try:
            yield came
        finally:
            if events is not None:
                _ask(pynvml.nvmlEventSetFree, notes, events)


def cores_near_gpu(local_rank: int, environ: Mapping[str, str] = os.environ) -> set[int]:
    """CPU cores on the NUMA node of the GPU that a local rank has; empty where NVML does not say."""
    notes: list[str] = []
    num_words = -(-(os.cpu_count() or 1) // 64)
    with _visible_gpus(environ, notes) as handles:
        for handle in (handles or [])[local_rank : local_rank + 1]:
            scope = pynvml.NVML_AFFINITY_SCOPE_NODE
            words = _ask(pynvml.nvmlDeviceGetCpuAffinityWithinScope, notes, handle, num_words, scope) or []
            return {64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    return set()


def device(config: Config, machine: Machine) -> str:
    """`cuda` or `cpu`: where the ranks of this machine compute."""
    if config.cluster.gpu is GpuKind.auto:
        return "cuda" if machine.gpus else "cpu"
    return "cpu" if config.cluster.gpu is GpuKind.none else "cuda"


@contextmanager
def _visible_gpus(environ: Mapping[str, str], notes: list[str]) -> Iterator[list[Any] | None]:
    """NVML while it is open: handles of the visible GPUs; None and a note where there is no NVML."""
    if pynvml is None:
        notes.append("NVML: the package nvidia-ml-py is not installed")
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.append(f"NVML: {error}")
        yield None
        return
    try:
        yield _visible(environ.get("CUDA_VISIBLE_DEVICES"), notes)
    finally:
        pynvml.nvmlShutdown()


def _visible(selection: str | None, notes: list[str]) -> list[Any]:
    """NVML handles of the GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order."""
    count = _ask(pynvml.nvmlDeviceGetCount, notes) or 0
    handles = [handle for index in range(count) if (handle := _ask(pynvml.nvmlDeviceGetHandleByIndex, notes, index))]
    if selection is None:
        return handles
    chosen = []
    for entry in (entry.strip() for entry in selection.split(",")):
        handle = _named(entry, handles, notes)
        if handle is None:
            break
        chosen.append(handle)
    if selection.strip() and len(chosen) < len(handles):
        notes.append(f"CUDA_VISIBLE_DEVICES={selection} leaves {len(chosen)} of {len(handles)} GPUs visible")
    return chosen


def _named(entry: str, handles: list[Any], notes: list[str]) -> Any | None:
    if entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        return _ask(pynvml.nvmlDeviceGetHandleByUUID, notes, entry)
    matches = [handle for handle in handles if entry and _uuid(handle, notes).startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _uuid(handle: Any, notes: list[str]) -> str:
    return str(_ask(pynvml.nvmlDeviceGetUUID, notes, handle))


def _gpu(handle: Any, notes: list[str]) -> Gpu:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, notes, handle)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, notes, handle)
    return Gpu(
        name=_ask(pynvml.nvmlDeviceGetName, notes, handle),
        compute_capability=None if capability is None else (capability[0], capability[1]),
        memory_bytes=None if memory is None else int(memory.total),
    )


def _health(index: int, handle: Any, notes: list[str]) -> GpuHealth:
    ecc = _ask(pynvml.nvmlDeviceGetEccMode, notes, handle)
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    remapped = _ask(pynvml.nvmlDeviceGetRemappedRows, notes, handle)  # corrected, uncorrected, pending, failed
    return GpuHealth(
        index=index,
        uuid=_uuid(handle, notes),
        ecc_enabled=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected=_ask(pynvml.nvmlDeviceGetTotalEccErrors, notes, handle, uncorrected, volatile),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        pcie_generation=_ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, notes, handle),
        pcie_max_generation=_ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, notes, handle),
        pcie_width=_ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, notes, handle),
        pcie_max_width=_ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, notes, handle),
        throttle_reasons=_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, notes, handle),
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, notes, handle, pynvml.NVML_CLOCK_SM),
        sm_max_clock_mhz=_ask(pynvml.nvmlDeviceGetMaxClockInfo, notes, handle, pynvml.NVML_CLOCK_SM),
    )


def _ask(query: Callable[..., Any], notes: list[str], *arguments: Any) -> Any | None:
    """The answer to one NVML query; None and a note if it is denied or unknown to this driver."""
    try:
        return query(*arguments)
    except pynvml.NVMLError as error:
        notes.append(f"NVML does not answer {query.__name__.removeprefix('nvml')}: {error}")
        return None
