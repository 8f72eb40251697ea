"""Which tests run here: a test that needs GPUs is skipped where they are missing, and the skip says what is missing."""

import functools

import pytest


@functools.cache
def num_gpus() -> tuple[int, str]:
    """Count the NVIDIA GPUs of this machine by NVML, so that no test imports torch for the question.

    Returns:
        The count, and why it is 0 where NVML itself cannot answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return 0, f": {error}"
    try:
        return pynvml.nvmlDeviceGetCount(), ""
    finally:
        pynvml.nvmlShutdown()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of `gpu` or `gpus(n)` that asks for more than there is."""
    needed = max((mark.args[0] for mark in item.iter_markers("gpus")), default=0)
    if item.get_closest_marker("gpu"):
        needed = max(needed, 1)
    if needed:
        present, reason = num_gpus()
        if present < needed:
            pytest.skip(f"needs {needed} NVIDIA GPU{'s' if needed > 1 else ''}, this machine shows {present}{reason}")
