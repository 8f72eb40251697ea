"""Which pipeline stage holds which layers: integers only, no torch.

A pipeline of `pp` ranks with `vpp` model chunks each has `pp * vpp` virtual stages; rank p holds the stages p, p + pp,
p + 2 * pp, ... Layers may be shared out in four ways:

* evenly: every virtual stage holds equally many;
* evenly, where the embedding, the loss, or both count as a layer, which leaves one less to their stages;
* with a first and a last rank that hold other numbers than the ranks between them;
* as written out: `Et*3|(tt|)*2t*4L` says what each virtual stage holds, in megatron-core's letters: E embedding,
  t transformer layer, m layer of multi-token prediction, L loss.

megatron-core is given every uneven split written out, because its own arithmetic of the other ways can lose layers:
with a first and a last rank and none between them it does not look whether all layers are there
(transformer_config.py:1990), and fails with chunks (transformer_layer.py:155, both of 0.19.2).
"""

import re
from dataclasses import dataclass
from typing import Self

from shardwright.conf.schema import Config

LETTERS = "EtmL"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual stage holds."""

    layers: range
    """Numbers of its transformer layers, from 0."""
    embedding: bool = False
    loss: bool = False
    num_mtp_layers: int = 0
    """Layers of multi-token prediction."""

    @property
    def letters(self) -> str:
        """In megatron-core's letters: `Ett`."""
        return "E" * self.embedding + "t" * len(self.layers) + "m" * self.num_mtp_layers + "L" * self.loss


Stages = tuple[tuple[Chunk, ...], ...]
"""Pipeline rank -> its chunks, in the order of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the layers are to be shared out; whether that comes out even is for the rules of `pretrain.checks_stages`.

    Args:
        num_layers, num_mtp_layers: transformer layers of the model, and those of multi-token prediction, which stand
            before the loss unless they are written out.
        pp, vpp: pipeline ranks, and model chunks of each.
        with_embedding, with_loss: whether they count as a layer.
        first, last: layers of the first and of the last rank; None for as many as the others.
        written: every virtual stage written out; None for one of the other ways.
    """

    num_layers: int
    num_mtp_layers: int = 0
    pp: int = 1
    vpp: int = 1
    with_embedding: bool = False
    with_loss: bool = False
    first: int | None = None
    last: int | None = None
    written: str | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """What a configuration asks for."""
        parallel = config.parallel
        return cls(
            num_layers=config.model.num_layers,
            num_mtp_layers=config.model.mtp_num_layers or 0,
            pp=parallel.pp,
            vpp=parallel.vpp,
            with_embedding=parallel.account_for_embedding_in_pipeline_split,
            with_loss=parallel.account_for_loss_in_pipeline_split,
            first=parallel.num_layers_in_first_pipeline_stage,
            last=parallel.num_layers_in_last_pipeline_stage,
            written=parallel.pipeline_layout,
        )

    @property
    def is_uneven(self) -> bool:
        """Whether another way was asked for than equally many layers on every virtual stage."""
        other = (self.first, self.last, self.written)
        return self.with_embedding or self.with_loss or any(way is not None for way in other)

    def counts(self) -> list[int]:
        """Transformer layers of every virtual stage; they add up to `num_layers` where no rule is broken."""
        if self.written is not None:
            return [row.count("t") for row in rows(self.written)]
        if self.first is None and self.last is None:
            slots = self.num_layers + self.with_embedding + self.with_loss
            counts = [slots // (self.pp * self.vpp)] * (self.pp * self.vpp)
            counts[0] -= self.with_embedding
            counts[-1] -= self.with_loss
            return counts
        between = self.pp - (self.first is not None) - (self.last is not None)
        others = (self.num_layers - (self.first or 0) - (self.last or 0)) // between if between else 0
        each_rank = [others] * between
        if self.first is not None:
            each_rank.insert(0, self.first)
        if self.last is not None:
            each_rank.append(self.last)
        return [number // self.vpp for number in each_rank] * self.vpp

    def stages(self) -> Stages:
        """What every pipeline rank holds; of a split that breaks no rule."""
        counts = self.counts()
        mtp = [0] * (len(counts) - 1) + [self.num_mtp_layers]
        if self.written is not None:
            mtp = [row.count("m") for row in rows(self.written)]
        chunks, start = [], 0
        for number, count in enumerate(counts):
            at_ends = {"embedding": number == 0, "loss": number == len(counts) - 1}
            chunks.append(Chunk(range(start, start + count), num_mtp_layers=mtp[number], **at_ends))
            start += count
        return tuple(tuple(chunks[rank :: self.pp]) for rank in range(self.pp))


def rows(written: str) -> list[str]:
    """`Et*2|(t|)*2L` is `["Ett", "t", "t", "L"]`, a row of letters for each virtual stage.

    Source: megatron-core 0.19.2, `PipelineParallelLayerLayout.parse_str_to_list`; letters are not judged here.
    """
    text = re.sub(r"[,\s]", "", written)
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text.split("|")
