"""One rank inside of the test process: groups are started once, engines are built one after another.

As a program (`one_rank.py OVERRIDES`) it trains one engine and prints its curve as JSON: a recorded CUDA graph, above
all one that failed, changes the process it was in.
"""

import dataclasses
import gc
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.mcore import environment
from shardwright.pretrain import checks, machine, plan, process

SMALL = [
    "model=llama",
    "model.num_layers=4",
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.kv_channels=128",
    "model.vocab_size=4096",
    "model.max_position_embeddings=1024",
    "data=mock",
    "data.seq_length=512",
    "data.micro_batch_size=2",
    "data.global_batch_size=8",
    "precision=bf16",
]
"""A model whose every width is a multiple of 128, in milliseconds a step."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Some steps of one engine over the same tokens."""

    losses: list[float]
    norms: list[float | None]
    peak_bytes: int
    kernels: dict[str, str]


class OneRank:
    """The process as the only rank; made once, before anything else imports megatron-core.

    Args:
        device: cuda or cpu.
        *overrides: of the process, above all `execution=deterministic`.
    """

    def __init__(self, device: str, *overrides: str) -> None:
        config = self.config(*overrides)
        process.prepare(config, device, 0)
        deterministic = config.execution.deterministic_mode
        self.kind, self.device = device, environment.prepare(device, deterministic=deterministic)
        from shardwright.parallel.mcore import groups

        layout = plan.layout(self.config())
        store = FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        self.groups = groups.start(layout, self.device, 0, 600, store)

    def config(self, *overrides: str) -> Config:
        """The small run with `overrides`."""
        return compose([*SMALL, "cluster.ranks=1", *overrides])

    def refusals(self, config: Config) -> list[str]:
        """What `train` would say against `config` on this machine."""
        problems = [*checks.config_problems(config), *checks.machine_problems(config, machine.detect())]
        return [str(problem) for problem in problems]

    def train(self, *overrides: str, num_steps: int = 6) -> Curve:
        """Build an engine, train it on tokens that depend on the step alone, and let it go."""
        from shardwright.conf.choices import CudaGraph
        from shardwright.parallel.mcore import groups
        from shardwright.parallel.mcore.engine import Engine

        config = self.config(*overrides)
        assert self.refusals(config) == []
        layout, on_gpu = plan.layout(config), self.kind == "cuda"
        recorded = config.execution.cuda_graph_impl is not CudaGraph.none
        groups.seed_everything(config.run.seed, layout, 0, recorded=recorded)
        before = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        engine = Engine(config, layout, self.groups, self.device, 0, plan.padded_vocab_size(config.model))
        results = [engine.train_step(step_of(config, number), 1e-3, 0.1) for number in range(num_steps)]
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        curve = Curve([each.loss for each in results], [each.grad_norm for each in results], peak, engine.kernels())
        del engine, results
        self.forget()
        return curve

    def forget(self) -> None:
        """Give back what the last engine held."""
        if self.kind == "cuda":
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            FP8GlobalStateManager.reset()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def step_of(config: Config, seed: int) -> list[Batch]:
    """The micro-batches of one step: random tokens that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed % 3)  # steps repeat, so the loss falls
    size, length = config.data.micro_batch_size, config.data.seq_length
    steps = []
    for _ in range(config.data.global_batch_size // size):
        tokens = torch.randint(config.data.vocab_size, (size, length + 1), generator=generator)
        steps.append(
            {
                "tokens": tokens[:, :-1].contiguous(),
                "labels": tokens[:, 1:].contiguous(),
                "loss_mask": torch.ones(size, length),
                "position_ids": torch.arange(length).expand(size, -1).contiguous(),
            }
        )
    return steps


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(OneRank("cuda", *sys.argv[1:]).train(*sys.argv[1:]))))
