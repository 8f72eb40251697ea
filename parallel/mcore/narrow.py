"""The linear layers of one rank that compute in a narrow format, whoever computes: emulation or Transformer Engine.

Which of them are in BF16 now, their amax state, whether it is the same on all ranks that share it, and whether a
quantised tensor was not finite. Names are those of the whole model (`parallel.linears`).
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.conf.choices import Fp8Recipe
from shardwright.conf.schema import Config
from shardwright.parallel.fp8.delayed import DelayedScaling, Regions
from shardwright.parallel.layout import Layout
from shardwright.parallel.linears import InBf16
from shardwright.parallel.mcore import te_fp8
from shardwright.parallel.mcore.emulated import emulated_layers, is_emulated
from shardwright.parallel.mcore.groups import Groups
from shardwright.parallel.mcore.names import in_whole_model


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of the amax state that is not the same on all ranks that share it."""

    tensor: str
    ranks: tuple[int, ...]
    """Those that have something else than most; where there are two, the second."""
    others: tuple[int, ...]
    """Those that agree."""

    def __str__(self) -> str:
        ranks, others = (", ".join(map(str, found)) for found in (self.ranks, self.others))
        return f"{self.tensor}: not the same on rank {ranks} as on rank {others}"


class NarrowLinears:
    """Every method is called by all ranks together where it says so.

    Args:
        config: the run.
        layout, groups: where the ranks stand.
        chunks: this rank's model, wrapped for data parallelism.
        rank: global rank.
    """

    def __init__(self, config: Config, layout: Layout, groups: Groups, chunks: list[Any], rank: int) -> None:
        precision = config.precision
        self._config, self._layout, self._rank = config, layout, rank
        self._control, self._device = groups.control, next(chunks[0].parameters()).device
        self.is_narrow = precision.fp8 is not None or precision.fp4 is not None
        self.is_delayed = precision.fp8 is not None and precision.fp8_recipe is Fp8Recipe.delayed
        self.is_emulated = is_emulated(precision)
        self.layers: dict[str, Any] = {}
        """Linear layers of this rank by name."""
        self._reduction: te_fp8.AmaxReduction | None = None
        self._fixed = InBf16.of(config)
        if not self.is_narrow:
            return
        self._group = getattr(groups.model, precision.amax_group.name)
        for chunk in chunks:
            found = emulated_layers(chunk.module) if self.is_emulated else te_fp8.linear_layers(chunk.module)
            self.layers |= {in_whole_model(chunk.module, name): module for name, module in found.items()}
        self._regions: list[Regions] = [chunk.module.amax_regions for chunk in chunks if self._has_regions(chunk)]
        if not self.is_emulated:
            self._take_hold(chunks)
        self.demote(())

    def _has_regions(self, chunk: Any) -> bool:
        return self.is_emulated and hasattr(chunk.module, "amax_regions")

    def _take_hold(self, chunks: list[Any]) -> None:
        """Of Transformer Engine's layers, and under delayed scaling of its reduction."""
        if self._fixed.globs or self._config.resilience.fp8_guard:
            for module in self.layers.values():
                te_fp8.step_out(module)
        if self.is_delayed:
            with_state = {
                in_whole_model(chunk.module, name): module
                for chunk in chunks
                for name, module in te_fp8.layers_with_state(chunk.module).items()
            }
            self._reduction = te_fp8.AmaxReduction(self._group, with_state)
            self._reduction.install()

    @property
    def keeps_own_state(self) -> bool:
        """Whether replicas of this rank's layers have other scales, so that a checkpoint holds those of every rank."""
        replicas = self._layout.group("tp_dp_cp", self._rank)
        return self.is_delayed and len(replicas) > len(self._layout.group(self._group_name, self._rank))

    @property
    def _group_name(self) -> str:
        return self._config.precision.amax_group.name

    def demote(self, names: Collection[str]) -> None:
        """Let exactly these layers compute in BF16 from now on, beside those that the configuration names."""
        for name, module in self.layers.items():
            module.in_bf16 = name in self._fixed or name in names

    def in_bf16(self) -> list[str]:
        """Layers of this rank that compute in BF16 now."""
        return [name for name, module in self.layers.items() if module.in_bf16]

    def scale_of(self, name: str, operand: str) -> torch.Tensor | None:
        """Delayed scaling's scale of an operand (x, w, dy), fp32 []; None with other recipes."""
        if not self.is_delayed:
            return None
        module = self.layers[name]
        if self.is_emulated:
            scale: torch.Tensor = module.recipe.histories[operand].scale
            return scale
        return te_fp8.scale_of(module, operand)

    def amax_state(self) -> dict[str, torch.Tensor]:
        """Histories and scales of this rank by name; empty without delayed scaling."""
        if self._reduction is not None:
            return self._reduction.tensors()
        found: dict[str, torch.Tensor] = {}
        for name, module in self.layers.items():
            if isinstance(getattr(module, "recipe", None), DelayedScaling):
                for operand, history in module.recipe.histories.items():
                    found |= {f"{name} {operand} amaxes": history.amaxes, f"{name} {operand} scale": history.scale}
        return found

    def own_state(self) -> dict[str, torch.Tensor]:
        """The amax state for a checkpoint of every rank (`keeps_own_state`)."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.amax_state().items()}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """What `own_state` gave on this rank; tensors of another shape (a history of another length) stay."""
        for name, tensor in self.amax_state().items():
            if name in state and state[name].shape == tensor.shape:
                tensor.copy_(state[name])

    def take_non_finite(self) -> tuple[tuple[int, str], ...]:
        """Rank and tensor of every NaN and infinity that was quantised under delayed scaling since the last call.

        Collective: all-reduce(MAX) of one number over the world's control group; an all-gather of names where there
        are any.
        """
        if not self.is_delayed:
            return ()
        own: list[str] = []
        if self._reduction is not None:
            number = self._reduction.take_num_bad()
        else:
            number = sum(regions.num_bad for regions in self._regions)
        worst = torch.tensor([number])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._control)
        if not worst.item():
            return ()
        if self._reduction is not None:
            own = self._reduction.take_own_non_finite()
        for regions in self._regions:
            own += regions.own_non_finite
            regions.own_non_finite.clear()
            regions.num_bad = 0
        everywhere: list[list[str]] = [[]] * self._layout.world_size
        dist.all_gather_object(everywhere, own, group=self._control)
        return tuple((rank, tensor) for rank, tensors in enumerate(everywhere) for tensor in tensors)

    def differences(self) -> list[Difference]:
        """Where amax histories or scales are not the same, bit by bit, on all ranks that share them.

        Experts are compared over the ranks that have the same ones.

        Collective: all-gather of four numbers a rank over the world's control group, of all digests where they differ.
        """
        digests = {
            name: hashlib.blake2b(tensor.detach().cpu().contiguous().numpy().tobytes(), digest_size=7).digest()
            for name, tensor in self.amax_state().items()
        }
        place = self._layout.coordinates(self._rank)
        group = self._layout.group(self._group_name, self._rank)[0]
        sets = {"": (group, -1), ".experts.": (group, place.ep)}
        """Kind of layer -> the ranks that share its state: first of their group, and which experts they have."""
        own = []
        for kind, (first, experts) in sets.items():
            parts = [name.encode() + digest for name, digest in sorted(digests.items()) if _kind(name) == kind]
            whole = hashlib.blake2b(b"".join(parts), digest_size=7).digest()
            own += [first * (self._layout.ep + 1) + experts + 1, int.from_bytes(whole)]
        numbers = torch.tensor(own)
        everywhere = [torch.empty_like(numbers) for _ in range(self._layout.world_size)]
        dist.all_gather(everywhere, numbers, group=self._control)
        seen: dict[tuple[int, int], set[int]] = {}
        for row in everywhere:
            dense, dense_digest, experts, experts_digest = row.tolist()
            seen.setdefault((0, dense), set()).add(dense_digest)
            seen.setdefault((1, experts), set()).add(experts_digest)
        if all(len(values) == 1 for values in seen.values()):
            return []
        told: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(told, (sets, digests), group=self._control)
        return _differences(told)


def _kind(name: str) -> str:
    return ".experts." if ".experts." in name else ""


def _differences(told: list[tuple[dict[str, tuple[int, int]], dict[str, bytes]]]) -> list[Difference]:
    """From what every rank told of its groups and digests."""
    by_tensor: dict[tuple[str, tuple[int, int]], dict[int, bytes | None]] = {}
    for rank, (sets, digests) in enumerate(told):
        for name, digest in digests.items():
            by_tensor.setdefault((name, sets[_kind(name)]), {})[rank] = digest
    found = []
    for (name, _), digests_of_ranks in by_tensor.items():
        usual, _number = Counter(digests_of_ranks.values()).most_common(1)[0]
        others = tuple(rank for rank, digest in digests_of_ranks.items() if digest == usual)
        ranks = tuple(rank for rank in digests_of_ranks if rank not in others)
        if ranks:
            found.append(Difference(name, ranks, others))
    return found
