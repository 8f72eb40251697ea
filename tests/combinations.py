"""Optimizers, number formats, recomputation and layouts in one table, and cases that meet every pair of them.

A pair of choices is met by a case that runs, if any case with both runs; else by one that the rules refuse. `cases`
finds them for a device, so that tests on the CPU and on GPUs share the table.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from shardwright.conf.compose import SECTIONS, compose, differences
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.pretrain import checks
from shardwright.pretrain.machine import Machine

NUM_STEPS = 5
SIZES = [
    "data=mock",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.kv_channels=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.vocab_size=512",
    "data.seq_length=64",
    "data.global_batch_size=4",
    "data.micro_batch_size=1",
]
"""A model whose matrices FP8 and FP4 can cut into their blocks, also over two tensor-parallel ranks."""
DEVICES = {"cpu": ["cluster.gpu=none"], "cuda": ["cluster.gpu=auto"]}

SELECTIVE = "model.recompute_granularity=selective"
FULL = ["model.recompute_granularity=full", "model.recompute_num_layers=1"]
FACTORS: dict[str, dict[str, list[str]]] = {
    "precision": {
        "fp32": ["precision=fp32"],
        "bf16": ["precision=bf16"],
        "fp16": ["precision=fp16", "precision.initial_loss_scale=1024"],
        **{
            name: [f"precision={name}"]
            for name in ("fp8_delayed", "fp8_guide", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4")
        },
    },
    "optimizer": {
        "adam": ["optimizer=adam"],
        "adam_bf16_states": ["optimizer=adam_bf16_states", "precision.grad_reduce_in_fp32=false"],
        "sgd": ["optimizer=sgd"],
        "muon": ["optimizer=muon"],
    },
    "recompute": {
        "none": [],
        "full uniform": [*FULL, "model.recompute_method=uniform"],
        "full block": [*FULL, "model.recompute_method=block"],
        "core_attn": [SELECTIVE, "model.recompute_modules=[core_attn]"],
        "mlp": [SELECTIVE, "model.recompute_modules=[mlp]"],
        "layernorm": [SELECTIVE, "model.recompute_modules=[layernorm]"],
    },
    "layout": {
        "one rank": ["cluster.ranks=1"],
        "TP2 with SP": ["cluster.ranks=2", "parallel.tp=2", "parallel.sp=true"],
        "PP2": ["cluster.ranks=2", "parallel.pp=2"],
        "DP2": ["cluster.ranks=2"],
    },
}
"""Factor -> its choices -> their overrides."""

type Row = tuple[str, ...]
"""One choice of every factor, in their order."""
type Pair = tuple[tuple[int, str], tuple[int, str]]
"""Two choices, each with the number of its factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table on one device."""

    row: Row
    overrides: list[str]
    problems: list[Problem]
    """Why the rules refuse it; none if it runs."""

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(self.row)


def cases(device: str, machine: Machine) -> list[Case]:
    """Cases that meet every pair of choices on `device` (cpu or cuda) of `machine`."""
    problems = _judge(device, machine)
    return [
        Case(
            row=row,
            overrides=[*SIZES, *DEVICES[device], *itertools.chain(*_overrides(row))],
            problems=problems(row),
        )
        for row in all_pairs(FACTORS, lambda row: not problems(row))
    ]


def all_pairs(factors: Mapping[str, Sequence[str] | Mapping[str, Any]], runs: Callable[[Row], bool]) -> list[Row]:
    """Rows in which every pair of choices occurs, and in one that `runs` if there is one with both."""
    rows = list(itertools.product(*factors.values()))
    running = [row for row in rows if runs(row)]
    found: list[Row] = []
    open_pairs = {pair for row in rows for pair in pairs_of(row)}
    for some in (running, rows):
        within = open_pairs & {pair for row in some for pair in pairs_of(row)}
        open_pairs -= within
        found += covering(some, within)
    return found


def covering(rows: Sequence[Row], pairs: Set[Pair]) -> list[Row]:
    """Few of `rows` that meet all `pairs`. Greedy: next is the one that meets most of those that are still open."""
    found, still_open = [], set(pairs)
    while still_open:
        best = max(rows, key=lambda row: len(still_open & pairs_of(row)))
        found.append(best)
        still_open -= pairs_of(best)
    return found


def pairs_of(row: Row) -> set[Pair]:
    """All pairs of choices in a row."""
    return set(itertools.combinations(enumerate(row), 2))


def _overrides(row: Row) -> list[list[str]]:
    return [choices[choice] for choices, choice in zip(FACTORS.values(), row, strict=True)]


def _judge(device: str, machine: Machine) -> Callable[[Row], list[Problem]]:
    """What the rules say of a row. Each choice is composed once, and rows are put together from what it changes."""
    base = compose([*SIZES, *DEVICES[device]])
    changed = {
        (factor, choice): [
            (difference.key, difference.present)
            for difference in differences(base, compose([*SIZES, *DEVICES[device], *overrides]))
        ]
        for factor, choices in FACTORS.items()
        for choice, overrides in choices.items()
    }

    def problems(row: Row) -> list[Problem]:
        config: Config = copy.copy(base)
        for section in SECTIONS:
            setattr(config, section, copy.copy(getattr(base, section)))
        for chosen in zip(FACTORS, row, strict=True):
            for key, value in changed[chosen]:
                section, _, name = key.partition(".")
                setattr(getattr(config, section), name, value)
        return checks.config_problems(config) + checks.machine_problems(config, machine)

    judged = {row: problems(row) for row in itertools.product(*FACTORS.values())}
    return judged.__getitem__


def train(rank: int, world: int, store: str, some: Sequence[Case], device_kind: str) -> dict[str, list[float]]:
    """Losses of five steps on one batch, for each of some cases of the same layout; every rank calls it."""
    from shardwright.parallel.mcore.environment import prepare

    device = prepare(device_kind, rank)  # before anything imports megatron-core

    from torch._C._distributed_c10d import FileStore

    from shardwright.parallel.mcore import groups
    from shardwright.parallel.mcore.engine import Engine
    from shardwright.pretrain import plan

    from .distributed import engines

    layout = plan.layout(compose(some[0].overrides))
    connected = groups.start(layout, device, rank, 60, FileStore(store, world))
    losses = {}
    for case in some:
        config = compose(case.overrides)
        groups.seed_everything(config.run.seed, layout, rank)
        try:
            engine = Engine(config, layout, connected, device, rank, plan.padded_vocab_size(config.model))
            batch = engines.share(engine, engines.random_step(0))
            results = [engine.train_step(batch, config.optimizer.lr, 0.1) for _ in range(NUM_STEPS)]
        except Exception as error:
            error.add_note(f"in the case {case.name}")
            raise
        losses[case.name] = [result.loss for result in results]
    return losses
