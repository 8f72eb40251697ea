"""Where every rank stands: integers only, no torch, so that a login node can plan any world size in a second.

Two grids share the ranks, in megatron-core's order (`RankGenerator`, parallel_state.py:465, "tp-cp-ep-dp-pp", the first
axis varies fastest):

* dense layers:  rank = tp_rank + TP * (cp_rank + CP * (dp_rank + DP * pp_rank))
* expert layers: rank = etp_rank + ETP * (ep_rank + EP * (edp_rank + EDP * pp_rank))

A group is the set of ranks that differ along the named axes and agree along the others.
"""

import itertools
import math
from dataclasses import dataclass

from shardwright.conf.problems import Problem, refuse


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

    Raises:
        RefusedError: a size below 1, or a product that does not divide the world.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        refuse(self.problems(self.world_size, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, etp=self.etp))

    @staticmethod
    def problems(world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> list[Problem]:
        """All rules that these sizes break; an empty list means that a `Layout` of them exists."""
        sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
        found = [
            Problem(key=f"parallel.{name}", value=size, rule="must be at least 1", remedy=f"parallel.{name}=1 works")
            for name, size in sizes.items()
            if size < 1
        ]
        if world_size < 1:
            found.append(Problem(key="cluster.ranks", value=world_size, rule="must be at least 1"))
        if found:
            return found
        grids = (("tp", "cp", "pp"), ("etp", "ep", "pp")) if max(ep, etp) > 1 else (("tp", "cp", "pp"),)
        for axes in grids:
            product = math.prod(sizes[name] for name in axes)
            used = [name for name in axes if sizes[name] > 1]
            if world_size % product:
                below, above = world_size // product * product, -(-world_size // product) * product
                fitting = " or ".join(str(n) for n in (below, above) if n)
                found.append(
                    Problem(
                        key=" * ".join(f"parallel.{name}" for name in used),
                        value=product,
                        rule=f"does not divide the {world_size} ranks of the run",
                        remedy=f"cluster.ranks={fitting} works",
                    )
                )
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

    def groups(self, axes: str) -> list[tuple[int, ...]]:
        """Every group that communicates over `axes`, each in rank order.

        Args:
            axes: axis names joined by "-": "tp", "dp-cp", "tp-pp" of the dense grid, "ep", "etp-ep", "edp" of the
                expert grid ("pp" belongs to both).
        """
        named = axes.split("-")
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        expert = {"etp": self.etp, "ep": self.ep, "edp": self.edp, "pp": self.pp}
        grid = dense if set(named) <= set(dense) else expert
        if not set(named) <= set(grid):
            raise ValueError(f"axes {axes!r} are not of one grid: dense {list(dense)}, expert {list(expert)}")
        strides, stride = {}, 1
        for name, size in grid.items():
            strides[name] = stride
            stride *= size
        inside = [name for name in grid if name in named]
        outside = [name for name in grid if name not in named]

        def offsets(names: list[str]) -> list[int]:
            # the first axis varies fastest, itertools.product varies the last one fastest
            ranges = [range(grid[name]) for name in reversed(names)]
            return [
                sum(i * strides[name] for i, name in zip(place, reversed(names), strict=True))
                for place in itertools.product(*ranges)
            ]

        return [tuple(start + step for step in offsets(inside)) for start in offsets(outside)]
