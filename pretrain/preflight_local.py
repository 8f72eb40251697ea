"""What a rank checks by itself without torch: variables, GPUs through NVML, InfiniBand through sysfs, the disk.

Each function looks at one thing and returns a `Finding`; none raises for what is missing, denied or broken.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwright.pretrain import lint
from shardwright.pretrain.machine import GpuHealth
from shardwright.pretrain.preflight_results import BAD, OK, SKIPPED, WARNING, Finding

IB_ROOT = Path("/sys/class/infiniband")
ERROR_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_rcv_errors",
)
"""Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband. They count since the driver was loaded or reset."""
THROTTLED = {0x8: "slowed down by hardware", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""Bits of NVML's `nvmlClocksThrottleReason*` that are no part of normal work; a power cap (0x4) is, under load."""
GIB, MIB = 2**30, 2**20
_CHUNK_BYTES = 8 * MIB


class HungError(RuntimeError):
    """A check did not return in time; its thread still hangs in it."""


def bounded[T](seconds: float, action: Callable[[], T]) -> T:
    """The result of `action`, which may hang in a driver or in a file system.

    Raises:
        HungError: it did not return in time; this process can end by `os._exit` alone then.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="preflight-check", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise HungError(f"did not return within {seconds:g} s")
    return answers[0]


def environment(environ: Mapping[str, str]) -> Finding:
    """Variables that tune or debug; worth a warning, since a run may want them for a while."""
    left = lint.left_set(environ)
    return Finding(WARNING, "; ".join(f"{one.name}={one.value}" for one in left)) if left else Finding(OK)


def gpus(found: Sequence[GpuHealth], notes: Sequence[str], expected: int | None) -> Finding:
    """How many GPUs are visible.

    Args:
        found: visible ones.
        notes: why NVML does not answer.
        expected: as many as there should be; None where nobody said.
    """
    count = len(found)
    if expected is not None and count < expected:
        return Finding(BAD, "; ".join([f"{count} of {expected}", *notes]), counts={"gpus": count})
    if not found:
        return Finding(SKIPPED, "; ".join(notes) or "no GPU is visible")
    return Finding(OK, f"{count} visible", counts={"gpus": count})


def gpu_health(found: Sequence[GpuHealth], notes: Sequence[str]) -> Finding:
    """ECC, rows to be remapped, PCIe and clocks of GPUs that work at this moment, or did just before."""
    if not found:
        return Finding(SKIPPED, "; ".join(notes) or "no GPU is visible")
    bad = [f"GPU {gpu.index}: {fault}" for gpu in found for fault in _faults(gpu)]
    odd = [f"GPU {gpu.index}: {oddity}" for gpu in found for oddity in _oddities(gpu)]
    clocks = [gpu.sm_clock_mhz for gpu in found if gpu.sm_clock_mhz is not None]
    most = [gpu.sm_max_clock_mhz for gpu in found if gpu.sm_max_clock_mhz is not None]
    told = [f"SM clock {min(clocks)} of {max(most)} MHz"] if clocks and most else list(notes)
    state = BAD if bad else WARNING if odd else OK
    return Finding(state, "; ".join(bad or odd or told))


def _faults(gpu: GpuHealth) -> list[str]:
    faults = []
    if gpu.ecc_uncorrected:
        faults.append(f"{gpu.ecc_uncorrected} uncorrected ECC errors")
    if gpu.remap_pending:
        faults.append("memory rows wait for a reset to be remapped")
    if gpu.remap_failed:
        faults.append("a memory row could not be remapped")
    if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
        faults.append(f"PCIe x{gpu.pcie_width} of x{gpu.pcie_max_width}")
    return faults + [text for bit, text in THROTTLED.items() if (gpu.throttle_reasons or 0) & bit]


def _oddities(gpu: GpuHealth) -> list[str]:
    oddities = []
    if gpu.ecc_enabled is False:
        oddities.append("ECC is off")
    if gpu.pcie_generation and gpu.pcie_max_generation and gpu.pcie_generation < gpu.pcie_max_generation:
        # falls within seconds of idleness: the rates of copies are what says whether it is slow
        oddities.append(f"PCIe generation {gpu.pcie_generation} of {gpu.pcie_max_generation}")
    return oddities


def xids(came: Sequence[tuple[int, int]], watched: bool) -> Finding:
    """Critical errors that NVML told while the checks ran."""
    if not watched:
        return Finding(SKIPPED, "no GPU is visible")
    return Finding(BAD, "; ".join(f"GPU {gpu}: XID {xid}" for gpu, xid in came)) if came else Finding(OK)


def infiniband(root: Path = IB_ROOT) -> Finding:
    """Ports: which are active, how fast, and what their error counters say.

    A port that is down is worth a warning, since many have no cable on purpose; fewer active ones than other nodes have
    is bad (`preflight_results.compare`). All down is bad. Counters since boot are told, growth during the checks is
    bad (`grown`).

    Args:
        root: `/sys/class/infiniband`, or a tree like it.
    """
    ports = sorted(root.glob("*/ports/*")) if root.is_dir() else []
    if not ports:
        return Finding(SKIPPED, f"no port in {root}")
    active, down, gbits = [], [], 0.0
    for port in ports:
        name = f"{port.parent.parent.name}/{port.name}"
        state, physical = (_word(port / part) for part in ("state", "phys_state"))
        if (state, physical) == ("ACTIVE", "LinkUp"):
            active.append(name)
            gbits += _gbits(port / "rate")
        else:
            down.append(f"{name} is {state or 'unknown'}, {physical or 'unknown'}")
    counts = {"ib_active_ports": len(active), "ib_gbit_per_second": gbits}
    if not active:
        return Finding(BAD, "; ".join(down), counts=counts)
    errors = {name: value for name, value in counters(root).items() if value}
    if down or errors:
        since = [f"{name} {value} since boot" for name, value in errors.items()]
        return Finding(WARNING, "; ".join(down + since), counts=counts)
    return Finding(OK, f"{len(active)} active, {gbits:g} Gbit/s", counts=counts)


def counters(root: Path = IB_ROOT) -> dict[str, int]:
    """Error counters of all ports by name, such as `mlx5_0/1 symbol_error`."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        for counter in ERROR_COUNTERS:
            text = _text(port / "counters" / counter)
            if text.isdecimal():
                found[f"{port.parent.parent.name}/{port.name} {counter}"] = int(text)
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> Finding:
    """Whether error counters of InfiniBand grew."""
    more = {name: after[name] - before[name] for name in before.keys() & after.keys() if after[name] > before[name]}
    if not more:
        return Finding(OK)
    return Finding(BAD, "; ".join(f"{name} grew by {value}" for name, value in sorted(more.items())))


def disk(folder: Path, *, num_bytes: int, least_free_bytes: int) -> Finding:
    """Write a file, make sure that it is on the disk, read it back, compare, remove it.

    The pages are given back to the system before reading; on a network file system they may still come from a server's
    memory, so the rate of reading is an upper bound.

    Args:
        folder: where a run would write; made if it is not there, and removed again if it was not.
        num_bytes: size of the file.
        least_free_bytes: less free space than that is bad.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < least_free_bytes + num_bytes:
            return Finding(BAD, f"{free / GIB:.1f} GiB free in {folder}, least {least_free_bytes / GIB:g} GiB")
        path = folder / f".preflight.{os.uname().nodename}.{os.getpid()}"
        try:
            write_seconds, read_seconds, same = _write_and_read(path, num_bytes)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Finding(BAD, f"{folder}: {error.strerror or errno.errorcode.get(error.errno or 0, error)}")
    finally:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not same:
        return Finding(BAD, f"{folder}: what was read is not what was written")
    rates = {
        "disk_write_gb_per_second": num_bytes / write_seconds / 1e9,
        "disk_read_gb_per_second": num_bytes / read_seconds / 1e9,
    }
    return Finding(OK, f"{free / GIB:.0f} GiB free", rates)


def _write_and_read(path: Path, num_bytes: int) -> tuple[float, float, bool]:
    chunk = os.urandom(min(num_bytes, _CHUNK_BYTES))
    sizes = [min(len(chunk), num_bytes - done) for done in range(0, num_bytes, len(chunk))]
    start = time.perf_counter()
    with path.open("xb", buffering=0) as file:
        for size in sizes:
            file.write(chunk[:size])
        os.fsync(file.fileno())
    written = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start_read = time.perf_counter()
        same = all(file.read(size) == chunk[:size] for size in sizes)
        return written - start, time.perf_counter() - start_read, same


def _word(path: Path) -> str:
    """The word of `4: ACTIVE`."""
    return _text(path).rpartition(": ")[2]


def _gbits(path: Path) -> float:
    """The number of `400 Gb/sec (4X NDR)`."""
    number = _text(path).partition(" ")[0]
    try:
        return float(number)
    except ValueError:
        return 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
