"""Which layouts train like one rank: axes are declared here, and the layouts that are tried follow from them.

A layout is one choice of every axis, on up to four ranks. The rules of `plan` say which are legal; so many of the legal
ones are proven (`tests/distributed/test_layouts_agree.py`) that every pair of choices is in one of them. What is
unequal by its nature is in `UNEQUAL`, with the reason. Nothing here imports torch.
"""

import copy
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.conf.compose import SECTIONS, compose
from shardwright.conf.problems import Problem
from shardwright.conf.schema import Config
from shardwright.pretrain import checks

from .combinations import Pair, Row, covering, pairs_of

MOST_RANKS = 4
NUM_STEPS = 10
BATCHES = ["data.seq_length=64", "data.global_batch_size=4", "data.micro_batch_size=1"]
"""What `tests/distributed/engines.py` feeds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One size of one axis, or one way of it."""

    ranks: int = 1
    """By how much it multiplies the world."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Dotted keys that it sets."""


def _tensor(size: int, *, sp: bool) -> Choice:
    return Choice(size, {"parallel.tp": size, "parallel.sp": sp})


NONE = Choice()
AXES: dict[str, dict[str, Choice]] = {
    "data": {"": NONE, "DP2": Choice(2), "DP4": Choice(4)},
    "tensor": {
        "": NONE,
        **{f"TP{size}": _tensor(size, sp=False) for size in (2, 4)},
        **{f"TP{size}+SP": _tensor(size, sp=True) for size in (2, 4)},
    },
    "pipeline": {
        "": NONE,
        "PP2": Choice(2, {"parallel.pp": 2}),
        "PP2+VPP2": Choice(2, {"parallel.pp": 2, "parallel.vpp": 2}),
        "PP4": Choice(4, {"parallel.pp": 4}),
    },
    "context": {"": NONE, "CP2": Choice(2, {"parallel.cp": 2}), "CP4": Choice(4, {"parallel.cp": 4})},
    "micro-batch": {"": NONE, "MBS2": Choice(1, {"data.micro_batch_size": 2})},
    "optimizer": {"": NONE, "OI2": Choice(1, {"parallel.num_distributed_optimizer_instances": 2})},
}
"""Axis -> its choices; the first is none of it. MBS2: two samples a micro-batch instead of one. OI2: two instances of
the distributed optimizer."""
EXPERT_AXES: dict[str, dict[str, Choice]] = {
    "experts": {"": NONE, **{f"EP{size}": Choice(1, {"parallel.ep": size}) for size in (2, 4)}},
    "parts of experts": {"": NONE, **{f"ETP{size}": Choice(1, {"parallel.etp": size}) for size in (1, 2, 4)}},
}
"""The axes that a model with experts has besides; they share the ranks with the others. Without ETP it is TP."""

DEEP = [
    *("model=tiny", "model.num_layers=4", "model.hidden_size=64", "model.ffn_hidden_size=96"),
    *("model.kv_channels=16", "model.vocab_size=500"),
]
"""Enough layers for two stages of two chunks, a vocabulary that is padded, grouped queries and a tied embedding."""
EXPERTS = ["model.vocab_size=500", "optimizer.adam_eps=1e-6"]
"""With Adam's usual 1e-8, an element whose gradient is zero but for rounding moves by a whole step in either direction:
weights and all that follow then differ by up to 3e-5 between layouts. With 1e-6 they differ by at most 2e-6."""
WITHOUT_MTP = ["model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model, and up to how many ranks its layouts are tried."""

    overrides: list[str]
    most_ranks: int = MOST_RANKS
    what: str
    """For people."""


KINDS = {
    "dense": Kind(overrides=DEEP, what="grouped queries, tied embedding, padded vocabulary"),
    "experts": Kind(
        overrides=["model=tiny_mixtral", *EXPERTS, "model.moe_router_load_balancing_type=seq_aux_loss"],
        what="four experts, two for a token, balanced by a loss over each sequence (`seq_aux_loss`)",
    ),
    "aux_loss": Kind(
        overrides=["model=tiny_mixtral", *EXPERTS],
        most_ranks=2,
        what="as *experts*, but balanced by a loss over each micro-batch (`aux_loss`)",
    ),
    "dropping": Kind(
        overrides=["model=tiny_mixtral", *EXPERTS, "model.moe_expert_capacity_factor=1.0"],
        most_ranks=2,
        what="as *aux_loss*, and a full expert drops tokens (`moe_expert_capacity_factor`)",
    ),
    "allgather": Kind(
        overrides=["model=tiny_mixtral", *EXPERTS, "model.moe_token_dispatcher_type=allgather"],
        most_ranks=2,
        what="as *aux_loss*, and every rank gathers all tokens (`moe_token_dispatcher_type=allgather`)",
    ),
    "shared experts": Kind(
        overrides=["model=tiny_deepseek", *EXPERTS, *WITHOUT_MTP],
        what="latent attention, a shared expert, a sigmoid router with a bias, a dense first layer",
    ),
    "prediction": Kind(
        overrides=["model=tiny_deepseek", *EXPERTS],
        most_ranks=2,
        what="as *shared experts*, with multi-token prediction",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """Layouts that cannot train like one rank, by what they compute and not by a fault."""

    kinds: tuple[str, ...]
    choices: tuple[str, ...]
    """Any of them makes a layout unequal."""
    reason: str

    def covers(self, case: "Case") -> bool:
        """Whether `case` is one of them."""
        return case.kind in self.kinds and bool(set(self.choices) & set(case.choices))


WAYS: dict[str, dict[str, tuple[int, list[str]]]] = {
    "dense": {
        "DP2 without overlap": (2, ["parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"]),
        "PP2+VPP2 without overlap": (
            2,
            [
                *("parallel.pp=2", "parallel.vpp=2"),
                *("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
            ],
        ),
        "PP2+VPP2, the embedding and the loss alone": (
            2,
            ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=E|tt|tt|L"],
        ),
        "PP2, a short first stage": (2, ["parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"]),
        "PP2, a last stage of the loss alone": (2, ["parallel.pp=2", "parallel.pipeline_layout=Et*4|L"]),
        "PP3, embedding and loss count as layers": (
            3,
            [
                "parallel.pp=3",
                "parallel.account_for_embedding_in_pipeline_split=true",
                "parallel.account_for_loss_in_pipeline_split=true",
            ],
        ),
    },
    "shared experts": {
        "PP2, a stage without experts": (2, ["parallel.pp=2", "parallel.num_layers_in_first_pipeline_stage=1"]),
    },
    "prediction": {
        "PP2+VPP2, prediction and the loss alone": (
            2,
            ["parallel.pp=2", "parallel.vpp=2", "parallel.pipeline_layout=Et|tt|t|mL"],
        ),
        "DP2 PP2 EP2": (4, ["parallel.pp=2", "parallel.ep=2"]),
    },
}
"""What is no size of an axis: kind of model -> name -> ranks and overrides."""

UNEQUAL = (
    Unequal(
        kinds=("aux_loss", "allgather"),
        choices=("MBS2",),
        reason="`aux_loss` is a product of means over the tokens of a micro-batch: of another micro-batch it is "
        "another loss (`seq_aux_loss` is not)",
    ),
    Unequal(
        kinds=("dropping",),
        choices=("MBS2", "TP2+SP", "CP2"),
        reason="an expert's capacity is counted over the tokens that one rank has of one micro-batch: of other tokens "
        "others are dropped",
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One layout of one kind of model."""

    kind: str
    row: Row
    """The choice of every axis."""
    world: int
    values: tuple[tuple[str, object], ...]
    """What it sets beside the kind's own."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Of the axes that it uses."""
        return tuple(name for name in self.row if name)

    @property
    def layout(self) -> str:
        """`DP2 EP2`."""
        return " ".join(self.choices)

    @property
    def name(self) -> str:
        """For people and as a test's id: `experts: DP2 EP2`."""
        return f"{self.kind}: {self.layout}"

    @property
    def overrides(self) -> list[str]:
        """Of model and layout."""
        chosen = [f"{key}={str(value).lower()}" for key, value in self.values]
        return [*KINDS[self.kind].overrides, *chosen]

    @property
    def reason(self) -> str | None:
        """Why it is unequal by its nature; None where it must be equal."""
        return next((unequal.reason for unequal in UNEQUAL if unequal.covers(self)), None)


def axes_of(kind: str) -> dict[str, dict[str, Choice]]:
    """The axes of a kind of model."""
    return AXES | (EXPERT_AXES if _base(kind).model.num_moe_experts is not None else {})


@functools.cache
def candidates(kind: str) -> tuple[tuple[Case, tuple[Problem, ...]], ...]:
    """Every layout of several ranks or other micro-batches, and what the rules say of it."""
    base, axes, found = _base(kind), axes_of(kind), []
    for row in itertools.product(*axes.values()):
        chosen = [choices[name] for choices, name in zip(axes.values(), row, strict=True)]
        world = math.prod(choice.ranks for choice in chosen)
        values = {key: value for choice in chosen for key, value in choice.values.items()}
        says_the_default = values.get("parallel.etp") == values.get("parallel.tp", 1)
        if any(row) and world <= KINDS[kind].most_ranks and not says_the_default:
            case = Case(kind, row, world, tuple(values.items()))
            found.append((case, tuple(_problems(base, case))))
    return tuple(found)


@functools.cache
def legal(kind: str) -> tuple[Case, ...]:
    """The layouts of a kind of model that the rules accept."""
    return tuple(case for case, problems in candidates(kind) if not problems)


@functools.cache
def proven(kind: str) -> tuple[Case, ...]:
    """Of the legal layouts that must be equal every axis alone, and so many that all pairs of choices are met."""
    equal = {case.row: case for case in legal(kind) if case.reason is None}
    alone = [case for case in equal.values() if len(case.choices) == 1]
    further = covering(list(equal), pairs(equal.values()) - pairs(alone))
    return (*alone, *(equal[row] for row in further))


def unequal(kind: str) -> list[Case]:
    """The legal layouts that cannot train like one rank."""
    return [case for case in legal(kind) if case.reason is not None]


def pairs(some: Iterable[Case]) -> set[Pair]:
    """All pairs of choices that occur in some cases."""
    return {pair for case in some for pair in pairs_of(case.row)}


@functools.cache
def _base(kind: str) -> Config:
    return compose([*BATCHES, "cluster.gpu=none", *KINDS[kind].overrides])


def _problems(base: Config, case: Case) -> list[Problem]:
    """What the rules say of a case; composed once a kind, since a composition takes longer than all of its rules."""
    config = copy.copy(base)
    for section in SECTIONS:
        setattr(config, section, copy.copy(getattr(base, section)))
    config.cluster.ranks = case.world
    for key, value in case.values:
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return checks.config_problems(config)
