"""Where every rank stands: integers only, no torch, so that a login node can plan any world size in a second.

Two grids share the ranks, in megatron-core's order (`RankGenerator`, parallel_state.py:465, "tp-cp-ep-dp-pp", the first
axis varies fastest):

* dense layers:  rank = tp_rank + TP * (cp_rank + CP * (dp_rank + DP * pp_rank))
* expert layers: rank = etp_rank + ETP * (ep_rank + EP * (edp_rank + EDP * pp_rank))

A group is the set of ranks that differ along the axes of its name and agree along the others. Nodes hold neighbouring
ranks, so the axes that come first stay inside a node: tensor parallelism, then context and expert parallelism.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.conf.problems import Problem, refuse

DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
"""Axes of the two grids, fastest first."""
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "dp_cp": ("cp", "dp"),
    "mp": ("tp", "pp"),
    "embd": ("pp",),
    "pos_embd": ("pp",),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "intra_dp_cp": ("cp", "dp"),
    "intra_expt_dp": ("edp",),
    "intra_dist_opt": ("etp", "ep", "edp", "pp"),
    "inter_dist_opt": ("edp",),
}
"""Group -> its axes, by the names of megatron-core's `ProcessGroupCollection` (process_groups_config.py:27).

Of `embd` only the first and the last stage of a pipeline are members (they hold a tied embedding), of `pos_embd` the
first. The `intra_` groups are those of one instance of the distributed optimizer, which has neighbouring ranks of every
stage; `inter_dist_opt` has the ranks that hold the same shards in all instances, and does not exist with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """One rank's place on both grids."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of all axes of a world; checked at construction.

    Args:
        world_size: ranks of the run.
        tp, pp, cp: tensor, pipeline and context parallelism of the dense grid.
        ep, etp: expert and expert-tensor parallelism of the expert grid; `etp` is spelt out, not inherited from `tp`.
        vpp: model chunks of each pipeline rank; a chunk is no rank, so it is on neither grid.
        instances: of the distributed optimizer; each has its part of the data-parallel ranks of both grids.

    Raises:
        RefusedError: a size below 1, or a product that does not divide the world.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    instances: int = 1

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "vpp": self.vpp}
        refuse(self.problems(self.world_size, **sizes, instances=self.instances))

    @staticmethod
    def problems(
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int = 1,
        instances: int = 1,
        ranks_per_node: int | None = None,
    ) -> list[Problem]:
        """All rules that these sizes break; an empty list means that a `Layout` of them exists.

        Args:
            world_size, tp, pp, cp, ep, vpp, instances: as of a `Layout`.
            etp: None for the default, which is `tp`; the problem then spells that out.
            ranks_per_node: where the world is so many ranks on every node, and what can be changed is the nodes.
        """
        sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": tp if etp is None else etp, "vpp": vpp}
        found = [
            Problem(key=f"parallel.{name}", value=size, rule="must be at least 1", remedy=f"parallel.{name}=1 works")
            for name, size in sizes.items()
            if size < 1 and not (name == "etp" and etp is None)
        ]
        if world_size < 1:
            found.append(Problem(key="cluster.ranks", value=world_size, rule="must be at least 1"))
        if found:
            return found
        dense, expert = tp * cp * pp, sizes["etp"] * ep * pp
        fitting, key, now = math.lcm(dense, expert), "cluster.ranks", world_size
        if ranks_per_node is not None:
            fitting, key, now = fitting // math.gcd(fitting, ranks_per_node), "cluster.nodes", now // ranks_per_node
        below, above = now // fitting * fitting, -(-now // fitting) * fitting
        works = f"{' or '.join(f'{key}={number}' for number in dict.fromkeys((below, above)) if number)} works"
        if world_size % dense:
            found.append(_does_not_divide(world_size, sizes, ("tp", "cp", "pp"), "", works))
        if world_size % expert and (ep > 1 or sizes["etp"] != tp):
            default = f", where parallel.etp is parallel.tp={tp} by default" if etp is None and tp > 1 else ""
            alone = ", or parallel.etp=1" if sizes["etp"] > 1 and not world_size % (ep * pp) else ""
            found.append(_does_not_divide(world_size, sizes, ("etp", "ep", "pp"), default, works + alone))
        shared = math.gcd(world_size // (tp * pp), world_size // expert)
        if not found and (instances < 1 or shared % instances):
            found.append(_not_shared(instances, shared))
        return found

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense grid."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        """Place of global `rank` on both grids."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of the world of {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        edp = rest % self.edp
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Every group of a name in `GROUPS`, each in rank order; together they hold every rank of theirs once.

        There is no `inter_dist_opt` where the distributed optimizer has one instance.
        """
        return list(self._groups(name))

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The group of that name in which `rank` stands; empty where it stands in none (a middle stage's `embd`)."""
        at, grid = self.coordinates(rank), self._grid(name)
        start = rank - sum(getattr(at, axis) * grid[axis][1] for axis in GROUPS[name])
        ranks = [start + offset for offset in _offsets([grid[axis] for axis in GROUPS[name]])]
        return next((members for members in self._members(name, ranks) if rank in members), ())

    def num_nodes(self, name: str, ranks_per_node: int) -> int:
        """The most nodes on which one group of that name stands; 1 where none crosses the border of a node."""
        return max((len({rank // ranks_per_node for rank in group}) for group in self._groups(name)), default=1)

    def _groups(self, name: str) -> Iterator[tuple[int, ...]]:
        grid = self._grid(name)
        inside = _offsets([grid[axis] for axis in GROUPS[name]])
        outside = _offsets([place for axis, place in grid.items() if axis not in GROUPS[name]])
        for start in outside:
            yield from self._members(name, [start + offset for offset in inside])

    def _members(self, name: str, ranks: list[int]) -> Iterator[tuple[int, ...]]:
        """The groups of a name among `ranks`, which agree along all axes but its own: one, or one an instance."""
        if name == "embd":
            yield tuple(dict.fromkeys((ranks[0], ranks[-1])))
        elif name == "pos_embd":
            yield (ranks[0],)
        elif name == "inter_dist_opt":
            size = len(ranks) // self.instances
            yield from (tuple(ranks[first::size]) for first in range(size) if self.instances > 1)
        elif name.startswith("intra_"):
            # neighbours along the data-parallel axes; of the whole instance, in every stage
            stages = self.pp if "pp" in GROUPS[name] else 1
            size = len(ranks) // stages // self.instances
            parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
            for number in range(self.instances):
                yield tuple(rank for part in parts[number :: self.instances] for rank in part)
        else:
            yield tuple(ranks)

    def _grid(self, name: str) -> dict[str, tuple[int, int]]:
        """The grid of a group: axis -> its size and the distance of neighbours along it."""
        grid, stride = {}, 1
        for axis in DENSE if set(GROUPS[name]) <= set(DENSE) else EXPERT:
            size = getattr(self, axis)
            grid[axis], stride = (size, stride), stride * size
        return grid


def _offsets(axes: Sequence[tuple[int, int]]) -> list[int]:
    """All distances along axes of (size, stride), the first axis varying fastest."""
    steps = [[index * stride for index in range(size)] for size, stride in reversed(axes)]
    return [sum(places) for places in itertools.product(*steps)]


def _not_shared(instances: int, shared: int) -> Problem:
    key, fitting = "parallel.num_distributed_optimizer_instances", [n for n in range(1, shared + 1) if shared % n == 0]
    near = [*[n for n in fitting if n < instances][-1:], *[n for n in fitting if n > instances][:1]] or [1]
    return Problem(
        key=key,
        value=instances,
        rule=f"does not divide the {shared} ranks over which dense layers and experts both repeat their weights",
        remedy=f"{' or '.join(f'{key}={number}' for number in near)} works",
    )


def _does_not_divide(world: int, sizes: dict[str, int], axes: tuple[str, ...], remark: str, remedy: str) -> Problem:
    used = [axis for axis in axes if sizes[axis] > 1]
    product = math.prod(sizes[axis] for axis in used)
    return Problem(
        key=" * ".join(f"parallel.{axis}" for axis in used),
        value=f"{' * '.join(str(sizes[axis]) for axis in used)} = {product}" if len(used) > 1 else product,
        rule=f"does not divide the {world} ranks of the run{remark}",
        remedy=remedy,
    )
