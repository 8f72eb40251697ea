"""Let megatron-core run on the CPU: its "current CUDA device" becomes the CPU where a process has no CUDA.

megatron-core allocates on `torch.cuda.current_device()` all over its training path. Instead of a second engine for
machines without a GPU, two mechanisms let the same code run over gloo; nothing in megatron-core is touched:

1. a process-wide `TorchFunctionMode` (the mechanism behind `torch.set_default_device`) reads device "cuda" as "cpu" and
   keeps the legacy strings of `Tensor.type()` that megatron-core keys its buffers by;
2. the handful of `torch.cuda` functions that the training path calls (streams, events, RNG) get CPU meanings: the CPU
   runs in order, so there is one stream and every event is done.

`torch.cuda.is_available()` itself is left alone and stays False. `enable()` must come before the first
`import megatron.core`; `environment.prepare` does so.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


class CudaMeansCpu(TorchFunctionMode):
    """Reads device "cuda" as "cpu" in every torch function call of the process."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)  # 'torch.cuda.FloatTensor'
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a device that runs in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    """An event of a device that runs in order: it is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _OnStream:
    """`torch.cuda.stream(stream)`; megatron-core enters one of them twice."""

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return self._stream

    def __exit__(self, *error: Any) -> None: ...


def enable() -> None:
    """Give `torch.cuda`'s training-path functions their CPU meaning; does nothing where CUDA exists or twice."""
    cuda: Any = torch.cuda
    if cuda.is_available() or getattr(cuda, "_cpu_stand_in", False):
        return
    cuda._cpu_stand_in = True
    generator, stream = torch.default_generator, _Stream()
    cuda.current_device = lambda: CPU  # used as device=torch.cuda.current_device()
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _OnStream
    cuda.is_current_stream_capturing = lambda: False
    cuda.device_count = lambda: 1
    cuda.default_generators = {CPU: generator}
    cuda._lazy_call = lambda fn, **kwargs: fn()

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    for module in (cuda, cuda.random):  # dynamo wants one function a name
        module.manual_seed = manual_seed
        module.get_rng_state = lambda device="cuda": generator.get_state()
        module.set_rng_state = lambda state, device="cuda": generator.set_state(state)
    # megatron-core warns about each fork of the "CUDA" generator that changes the CPU's: here they are one
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    torch.compiler.set_stance("force_eager")  # megatron-core's jit_fuser is torch.compile
    mode = CudaMeansCpu()
    mode.__enter__()  # for the life of the process
    # backward() is itself dispatched to the mode, which is off while its handler runs: switch it on again for what the
    # engine calls (recomputation, custom backwards)
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward_with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_with_mode  # type: ignore[attr-defined]
