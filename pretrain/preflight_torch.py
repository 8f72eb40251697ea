"""What a preflight measures with torch: products, copies, and all-reduces of groups of ranks.

Groups are made from torch's backends themselves and not by `init_process_group`: each test has a group of its own that
may fail without taking others along, and NCCL's watchdog, which ends a process, stays out of it. Every function here
may hang on broken hardware: `preflight_local.bounded` calls it.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shardwright.pretrain.preflight_results import BAD, OK, Finding

_SEED = 20260101
_GROUP_BYTES = {"cuda": 512 * 2**20, "cpu": 4 * 2**20}
_GROUP_ROUNDS = 5
_COPY_BYTES = 256 * 2**20
_EXACT_SIZE = {"cuda": 4096, "cpu": 512}
_FAST_SIZE = {"cuda": 8192, "cpu": 1024}
_FAST_ROUNDS = {"cuda": 50, "cpu": 3}


def devices(local_rank: int, local_world_size: int) -> list[torch.device]:
    """The devices that a rank tests: its share of the visible GPUs, or the CPU.

    A rank that is alone on its node tests all GPUs; ranks that see one GPU each test that.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(local_rank % count, count, local_world_size)]


def name_of(device: torch.device) -> str:
    """The GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def gemm(device: torch.device) -> Finding:
    """Whether products are right, and how fast they are.

    Right: the product of two seeded matrices of -1, 0 and 1, so sparse that every partial sum is a small integer, exact
    in bf16 in any order; compared through a vector, C x = A (B x), with the right side in integers on the CPU. Then a
    dense product in the device's training format, twice, bit for bit the same. Source: the check by a vector is
    Freivalds' (1977); one wrong element changes it, since no element of x is 0.
    """
    _use(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator().manual_seed(_SEED)
    size = _EXACT_SIZE[device.type]
    a, b = (_sparse(size, random) for _ in range(2))
    x = torch.randint(1, 8, (size, 1), generator=random)
    product = (a.to(device, dtype) @ b.to(device, dtype)).cpu().to(torch.int64)
    wrong = wrong_rows(product, a, b, x)
    if wrong:
        return Finding(BAD, f"{device}: {wrong} of {size} rows of an integer product are wrong")
    size, rounds = _FAST_SIZE[device.type], _FAST_ROUNDS[device.type]
    left, right = (torch.randn(size, size, generator=random).to(device, dtype) for _ in range(2))
    first = left @ right
    if not torch.equal(first, left @ right):
        return Finding(BAD, f"{device}: the same product twice is not the same")
    out = torch.empty_like(first)
    seconds = _seconds(lambda: torch.mm(left, right, out=out), device, rounds)
    return Finding(OK, "", {"gemm_tflops": 2 * size**3 / seconds / 1e12})


def wrong_rows(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> int:
    """Rows of `product` that cannot be those of a b; integers of shapes (n, n), and (n, 1) for x."""
    return int((product @ x != a @ (b @ x)).sum())


def copies(device: torch.device) -> Finding:
    """Rates between pinned host memory and the device, and whether what comes back is what was sent."""
    _use(device)
    host = torch.arange(_COPY_BYTES // 8, dtype=torch.int64).pin_memory()
    back = torch.empty_like(host).pin_memory()
    there = torch.empty_like(host, device=device)
    to_device = _seconds(lambda: there.copy_(host, non_blocking=True), device, 5)
    to_host = _seconds(lambda: back.copy_(there, non_blocking=True), device, 5)
    if not torch.equal(host, back):
        return Finding(BAD, f"{device}: what was copied there and back is not the same")
    rates = {"h2d_gb_per_second": _COPY_BYTES / to_device / 1e9, "d2h_gb_per_second": _COPY_BYTES / to_host / 1e9}
    return Finding(OK, "", rates)


def all_reduce(
    store: Store, name: str, members: Sequence[int], rank: int, device: torch.device, *, timeout_seconds: float
) -> float:
    """Bus bandwidth of an all-reduce, in GB/s; the members call it together.

    Bytes / seconds x 2 (n - 1) / n: what every rank's link has to carry, whatever n is. Source: nccl-tests,
    doc/PERFORMANCE.md.

    Args:
        store: where all ranks meet.
        name: of the test; each test has keys of its own in the store.
        members: global ranks, this one among them.
        rank: this global rank.
        device: this rank's.
        timeout_seconds: for each step of the way.

    Raises:
        RuntimeError: a member did not come in time, the transport failed, or the sum is wrong.

    Collective: all-reduce(SUM) over `members`.
    """
    _use(device)
    timeout, place = timedelta(seconds=timeout_seconds), PrefixStore(f"{name}/{min(members)}", store)
    place.set(f"here/{rank}", "")
    for member in members:  # NCCL itself would wait for a missing one without an end
        try:
            place.wait([f"here/{member}"], timeout)
        except RuntimeError:
            raise RuntimeError(f"rank {member} did not come within {timeout_seconds:g} s") from None
    group = _group(place, members.index(rank), len(members), device, timeout)
    count = _GROUP_BYTES[device.type] // 4
    tensor = torch.full((count,), float(members.index(rank) + 1), device=device)
    group.allreduce([tensor]).wait(timeout)
    expected = len(members) * (len(members) + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"the sum over ranks {list(members)} is wrong")
    tensor.zero_()
    seconds = _seconds(lambda: group.allreduce([tensor]).wait(timeout), device, _GROUP_ROUNDS)
    return count * 4 / seconds / 1e9 * 2 * (len(members) - 1) / len(members)


def _group(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, size, timeout)
    from torch.distributed import ProcessGroupNCCL

    # a wait ends with an exception at its timeout, and no watchdog ends the process that has to tell of it
    os.environ |= {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)


def _sparse(size: int, random: torch.Generator) -> torch.Tensor:
    """Integers -1, 0, 1, a sixteenth of them not 0: of `size` products of a sum about `size` / 256 count."""
    signs = torch.randint(0, 2, (size, size), generator=random) * 2 - 1
    return signs * (torch.randint(0, 16, (size, size), generator=random) == 0)


def _seconds(action: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of one `action`, after one that does not count."""
    action()
    _wait(device)
    start = time.perf_counter()
    for _ in range(rounds):
        action()
    _wait(device)
    return (time.perf_counter() - start) / rounds


def _use(device: torch.device) -> None:
    """Make it the current device of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
