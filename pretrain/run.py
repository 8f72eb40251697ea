"""The composition root of a rank: the one place where parts are built, in reading order.

checkpoint verified → data on disk → process groups → model and optimizer → resume → loop → end. On an error nothing is
torn down by collectives: the exception leaves, `rank` writes it down and ends the process.
"""

import gc
import os
import time
from collections.abc import Generator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwright.conf.choices import CudaGraph
from shardwright.data.batch_size import BatchSizes
from shardwright.data.loader import Batch, batches
from shardwright.data.sampler import DataPosition, samples_needed
from shardwright.data.source import Source
from shardwright.parallel.layout import Layout
from shardwright.parallel.mcore import environment as mcore_environment
from shardwright.pretrain import checkpoint_integrity, checkpoint_store, checkpoint_trouble
from shardwright.pretrain.faults import STOPPED, DamagedError
from shardwright.pretrain.heartbeat import FORWARD_AND_BACKWARD, collective_timeout_seconds
from shardwright.pretrain.plan import make_plan
from shardwright.pretrain.rank import RankContext
from shardwright.pretrain.trainer_state import TrainerState

if TYPE_CHECKING:
    from shardwright.parallel.mcore.groups import Groups
    from shardwright.pretrain.loop import Loop


def run_rank(context: RankContext) -> int:
    """Train as one rank of a run, from its data to its last checkpoint.

    Returns:
        0 when the run is done, 75 when it was asked to stop and saved.
    """
    started, rank = time.monotonic(), context.environment.rank
    loop, state = assemble(context)
    outcome, state = loop.train(state)

    # Everybody is done before anybody leaves. The groups are not destroyed: the process ends by os._exit, and NCCL
    # takes nine seconds over a few groups.
    dist.barrier(group=loop.engine.control_group)
    context.heart.rest()
    code = STOPPED if outcome == "stopped" else 0
    if rank == 0:
        seconds = round(time.monotonic() - started, 3)
        context.events.write("end", state.step, state=outcome, seconds=seconds, exit_code=code)
    return code


def assemble(context: RankContext) -> tuple["Loop", TrainerState]:
    """Build all parts of a rank.

    Returns:
        The loop, and where it starts.
    """
    env, config = context.environment, context.config
    plan = make_plan(config)

    context.phase("importing megatron-core")
    deterministic = config.execution.deterministic_mode
    device = mcore_environment.prepare(context.device, env.local_rank, deterministic=deterministic)
    from shardwright.parallel.mcore import shards
    from shardwright.parallel.mcore.datasets import gpt_epoch
    from shardwright.parallel.mcore.engine import Engine
    from shardwright.pretrain import rollback
    from shardwright.pretrain.checkpoint import Checkpoints
    from shardwright.pretrain.describe import HOST, describe, rank_map
    from shardwright.pretrain.fp8_watch import Fp8Watch
    from shardwright.pretrain.loop import Loop
    from shardwright.pretrain.rollback import Rollback
    from shardwright.pretrain.stragglers import Stragglers

    store = meet(context)
    load = _sound_checkpoint(context, store) if context.load else None

    context.phase("preparing data")
    state = TrainerState() if load is None else TrainerState.read(load)
    source = Source(config.data, seed=config.run.seed, build_epoch=gpt_epoch)
    state = state.on_data(source.identity)
    batch_sizes, eval_steps = BatchSizes.of(config.data), config.schedule.eval_iters
    share = partial(
        batches,
        micro_batch_size=config.data.micro_batch_size,
        dp_rank=plan.layout.coordinates(env.rank).dp,
        dp_size=plan.layout.dp,
    )

    num_steps = max(0, config.schedule.train_iters - state.step)
    longest = num_steps + (config.resilience.rollback - state.rollbacks) * rollback.farthest(config)
    stream = source.stream("train", samples_needed(state.position, batch_sizes, max(num_steps, longest)))

    def feed(state: TrainerState) -> Generator[list[Batch], None, None]:
        """This rank's micro-batches from a state on."""
        num_steps, workers = max(0, config.schedule.train_iters - state.step), config.data.num_workers
        return share(stream, state.position, batch_sizes=batch_sizes, num_workers=workers, num_steps=num_steps)

    evaluation = None
    if config.schedule.eval_interval and eval_steps:
        full = BatchSizes.constant(config.data.global_batch_size)
        validation = source.stream("validation", samples_needed(DataPosition(), full, eval_steps))
        evaluation = partial(share, validation, DataPosition(), batch_sizes=full, num_workers=0, num_steps=eval_steps)

    groups = connect(context, plan.layout, device, store)

    context.phase("building the model")
    engine = Engine(config, plan.layout, groups, device, env.rank, plan.padded_vocab_size)
    if load is not None:
        context.phase(checkpoint_trouble.LOADING)
        shards.load(engine, load, with_rng=TrainerState.read_layout(load) == plan.layout)

    if config.execution.gc_interval:  # from here on the loop collects
        gc.collect()
        gc.freeze()
        gc.disable()
    ranks = rank_map(plan, engine)
    if env.rank == 0:
        _forget_later_steps(context, state.step, load)
        context.events.write("start", state.step, **describe(context, plan, engine, source, ranks, state))
    stragglers = Stragglers([row[HOST] for row in ranks], config.telemetry, engine.control_group)

    def on_part(part: str) -> None:
        context.heart.beat(part)
        if part == FORWARD_AND_BACKWARD:  # the first collective comes
            stragglers.waits()

    engine.on_part = on_part
    loop = Loop(
        context=context,
        plan=plan,
        engine=engine,
        training_batches=feed(state),
        evaluation_batches=evaluation,
        checkpoints=Checkpoints(engine, context.folder.checkpoints, context.attempt, context.events, context.fence),
        stragglers=stragglers,
        fp8=Fp8Watch(context, engine, state.fp8_guard),
        rollback=Rollback(context, engine, feed, partial(_reason_against, context, store)),
    )
    return loop, state


def _reason_against(context: RankContext, store: Store, path: Path, number: int) -> str:
    """Why a checkpoint of this very attempt is not as it was written; every rank asks together.

    Args:
        context, store: of the rank.
        path: the checkpoint.
        number: of the rollback: each has keys of its own in the store.
    """
    env = context.environment
    readers = len(os.sched_getaffinity(0)) // env.local_world_size
    own = PrefixStore(f"rollback {number}", store)
    verdict = checkpoint_integrity.verify_together(path, own, env.rank, env.world_size, readers=readers)
    return "; ".join(verdict.reasons)


def _sound_checkpoint(context: RankContext, store: Store) -> Path:
    """The newest candidate whose every byte is as written; the same on all ranks.

    Raises:
        DamagedError: no candidate is left; on all ranks alike.
    """
    env, lead = context.environment, context.environment.rank == 0
    found = [f"{Path(known['path']).name} ({known['reason']})" for known in context.damaged]
    for known in context.damaged if lead else ():
        path = Path(known["path"])
        context.events.write("checkpoint_damaged", checkpoint_store.step_of(path), **known)
    readers = len(os.sched_getaffinity(0)) // env.local_world_size
    for path in context.load:
        context.phase("verifying the checkpoint")
        verdict = checkpoint_integrity.verify_together(path, store, env.rank, env.world_size, readers=readers)
        step, reason = checkpoint_store.step_of(path), "; ".join(verdict.reasons)
        told = {"path": str(path), "bytes": verdict.num_bytes, "seconds": round(verdict.seconds, 3)}
        if not reason:
            if lead:
                context.events.write("checkpoint_verified", step, **told)
            return path
        if lead:
            context.events.write("checkpoint_damaged", step, **told, reason=reason)
        found.append(f"{path.name} ({reason})")
    raise DamagedError(f"no checkpoint to continue from is whole: {', '.join(found)}")


def meet(context: RankContext) -> Store:
    """Where the ranks meet; each attempt has its own keys, since torchrun's agent keeps one store over restarts."""
    env, timeout_seconds = context.environment, collective_timeout_seconds(context.config.resilience)
    store = TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master=env.serves_store,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=env.master_listen_fd,
    )
    return PrefixStore(context.attempt.id, store)


def connect(context: RankContext, layout: Layout, device: torch.device, store: Store) -> "Groups":
    """Build all process groups among the ranks, and seed what draws random numbers; `prepare` came before."""
    from shardwright.parallel.mcore import groups

    context.phase("connecting ranks")
    rank, timeout_seconds = context.environment.rank, collective_timeout_seconds(context.config.resilience)
    connected = groups.start(layout, device, rank, timeout_seconds, store)
    recorded = context.config.execution.cuda_graph_impl is not CudaGraph.none
    groups.seed_everything(context.config.run.seed, layout, rank, recorded=recorded)
    return connected


def _forget_later_steps(context: RankContext, step: int, load: Path | None) -> None:
    """Rank 0, before the first step: put away what earlier attempts left behind after `step`."""
    root = context.folder.checkpoints
    for path in checkpoint_store.clean(root):
        context.events.write("checkpoint_removed", path=str(path), reason="unfinished")
    for path in checkpoint_store.supersede(root, step, context.attempt.number):
        context.events.write("checkpoint_superseded", step, path=str(path))
    context.folder.cut_metrics(step, context.attempt)
    if load is None:
        context.events.write("no_checkpoint", step, folder=str(root))
    else:
        context.events.write("resume", step, path=str(load))
