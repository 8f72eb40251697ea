"""A rank of `bench step`: makes the steps of one of the two loops and takes the time of each.

`ours` is what `train` does for every step: `loop.Loop.step`, with its loader, its row of metrics and its question
whether to stop, put together by `run.assemble`. `bare` is `parallel/mcore/bare.py`, over the same samples, which wait
on the device. A step ends when the host has seen the device finish it: ours reads the loss then, the bare loop
synchronises. Nothing else waits.
"""

import itertools
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.pretrain import machine, rank
from shardwright.pretrain.events import read_rows
from shardwright.pretrain.folder import write_atomic
from shardwright.pretrain.launch import STOP_SIGNALS
from shardwright.pretrain.plan import make_plan
from shardwright.pretrain.rank import RankContext

if TYPE_CHECKING:  # torch is imported when the rank is guarded
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """A loop that is ready to make its first step."""

    device: "torch.device"
    control_group: "dist.ProcessGroup"
    step: Callable[[], None]
    losses: Callable[[], Sequence[float]]
    """Of all steps so far, on rank 0; called once, at the end, by all ranks together."""


def measure(context: RankContext) -> int:
    """Make the steps that the attempt asks for; rank 0 writes what was seen into `result.json` of the attempt."""
    for signum in STOP_SIGNALS:  # there is nothing to save
        signal.signal(signum, signal.SIG_DFL)
    import torch
    import torch.distributed as dist

    told, env = context.attempt.launch, context.environment
    subject = {"ours": _ours, "bare": _bare}[told["loop"]](context)
    on_gpu, ends, processor = subject.device.type == "cuda", [time.perf_counter()], [time.process_time()]
    for number in range(told["warmup"] + told["steps"]):
        if on_gpu and number == told["warmup"]:
            torch.cuda.reset_peak_memory_stats()
        subject.step()
        ends.append(time.perf_counter())
        processor.append(time.process_time())
    context.heart.rest()
    state = machine.gpu_state(env.local_rank) if on_gpu else None
    ranks: list[Any] = [None] * env.world_size
    dist.all_gather_object(ranks, (state, _peak_memory(subject.device)), group=subject.control_group)
    states, memory = zip(*ranks, strict=True)
    waits = None
    if told["trace"]:
        from shardwright.pretrain.tracing import trace

        waits = trace(subject.step, Path(told["trace"]) if env.rank == 0 else None)
    losses = subject.losses()[: told["warmup"] + told["steps"]]
    if env.rank == 0:
        result = {
            "seconds": [end - start for start, end in itertools.pairwise(ends)],
            "processor_seconds": [end - start for start, end in itertools.pairwise(processor)],
            "waits": waits,
            "losses": list(losses),
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "memory": {name: max(each[name] for each in memory) for name in memory[0]},
            "gpus": states if on_gpu else None,
        }
        write_atomic(context.attempt.path / "result.json", json.dumps(result))
    dist.barrier(group=subject.control_group)
    return 0


def _ours(context: RankContext) -> _Subject:
    from shardwright.pretrain.run import assemble

    loop, state = assemble(context)

    def step() -> None:
        nonlocal state
        state, _ = loop.step(state)

    return _Subject(
        device=loop.engine.device,
        control_group=loop.engine.control_group,
        step=step,
        losses=lambda: [row["loss"] for row in read_rows(context.folder.metrics)],
    )


def _bare(context: RankContext) -> _Subject:
    import torch
    import torch.distributed as dist

    from shardwright.parallel.mcore import environment

    config, env, plan = context.config, context.environment, make_plan(context.config)
    deterministic = config.execution.deterministic_mode
    device = environment.prepare(context.device, env.local_rank, deterministic=deterministic)
    from shardwright.data.batch_size import BatchSizes
    from shardwright.data.loader import batches
    from shardwright.data.sampler import DataPosition, samples_needed
    from shardwright.data.source import Source
    from shardwright.parallel.mcore.bare import bare_step
    from shardwright.parallel.mcore.datasets import gpt_epoch
    from shardwright.pretrain.run import connect, meet

    position, batch, num_steps = DataPosition(), plan.batch, config.schedule.train_iters
    sizes = BatchSizes.of(config.data)
    source = Source(config.data, seed=config.run.seed, build_epoch=gpt_epoch)
    loaded = batches(
        source.stream("train", samples_needed(position, sizes, num_steps)),
        position,
        batch_sizes=sizes,
        micro_batch_size=batch.micro_batch_size,
        dp_rank=plan.layout.coordinates(env.rank).dp,
        dp_size=plan.layout.dp,
        num_workers=0,
        num_steps=num_steps,
    )
    on_device = [[{name: value.to(device) for name, value in each.items()} for each in step] for step in loaded]
    groups = connect(context, plan.layout, device, meet(context))
    context.heart.rest()  # its steps do not beat
    train_step = bare_step(config, plan.layout, groups.model, device, env.rank, plan.padded_vocab_size)
    upcoming, sums = iter(on_device), []

    def step() -> None:
        sums.append(train_step(next(upcoming)))
        torch.cuda.synchronize()  # on the CPU it has nothing to wait for

    def losses() -> list[float]:
        total = torch.stack(sums)
        dist.all_reduce(total)  # tensor-parallel ranks repeat losses and counts alike
        return (total[:, 0] / total[:, 1]).tolist()

    return _Subject(device=device, control_group=groups.control, step=step, losses=losses)


def _peak_memory(device: "torch.device") -> dict[str, int]:
    """Bytes of this rank at most: of the GPU over the timed steps, of the process on the CPU."""
    import resource

    import torch

    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        return {"allocated_bytes": allocated, "reserved_bytes": reserved}
    return {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


if __name__ == "__main__":
    rank.main(measure)
