"""One step under torch's profiler: a trace to look at, and how often the host waited for the device.

A wait in the midst of a step leaves the GPU without work until the host has launched something again. A training step
needs two: megatron-core's optimizer reads the gradient norm before it clips, and the loop reads the loss at the end.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardwright.parallel.mcore.engine import FORWARD_AND_BACKWARD, UPDATE

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of the CUDA runtime in which the host waits, as the profiler names them."""


def trace(step: Callable[[], object], path: Path | None = None) -> dict[str, int]:
    """Make one step under the profiler.

    Args:
        step: makes it, and returns when the device is done.
        path: where a trace for Perfetto or chrome://tracing goes (`.json`, or `.json.gz`); None for none.

    Returns:
        Waits of the host by the part of the step in which they happened.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        step()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    events = profiler.events() or []
    parts = [(event.name, event.time_range) for event in events if event.name in (FORWARD_AND_BACKWARD, UPDATE)]
    waits = Counter({FORWARD_AND_BACKWARD: 0, UPDATE: 0, "the rest": 0})
    for event in events:
        if event.name in WAITS:
            at = event.time_range.start
            inside = (name for name, span in parts if span.start <= at <= span.end)
            waits[next(inside, "the rest")] += 1
    return dict(waits)
