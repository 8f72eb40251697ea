"""One rank inside of the test process: groups are started once, engines are built one after another.

As a program (`one_rank.py OVERRIDES`) it trains one engine and prints its curve as JSON: a recorded CUDA graph, above
all one that failed, changes the process it was in.
"""

import dataclasses
import gc
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import FileStore

from shardwright.conf.compose import compose
from shardwright.conf.schema import Config
from shardwright.data.loader import Batch
from shardwright.parallel.mcore import environment
from shardwright.pretrain import checks, machine, plan, process

if TYPE_CHECKING:
    from shardwright.parallel.mcore.engine import Engine
    from shardwright.parallel.mcore.groups import Groups

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
    amaxes: str
    """Digest of all histories and scales of delayed scaling."""


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
        self._engines: WeakSet[Engine] = WeakSet()
        self.kind, self.device = device, environment.prepare(device, deterministic=deterministic)

    @cached_property
    def groups(self) -> "Groups":
        """The process groups, started for the first engine: data sets are built before."""
        from shardwright.parallel.mcore import groups

        store = FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
        return groups.start(plan.layout(self.config()), self.device, 0, 600, store)

    def config(self, *overrides: str) -> Config:
        """The small run with `overrides`."""
        return compose([*SMALL, "cluster.ranks=1", *overrides])

    def refusals(self, config: Config) -> list[str]:
        """What `train` would say against `config` on this machine."""
        problems = [*checks.config_problems(config), *checks.machine_problems(config, machine.detect())]
        return [str(problem) for problem in problems]

    def engine(self, *overrides: str) -> "Engine":
        """The small run's engine with `overrides`; `forget` it when it is done."""
        return self.engine_of(self.config(*overrides))

    def engine_of(self, config: Config) -> "Engine":
        """An engine as a new process would build it."""
        from shardwright.conf.choices import CudaGraph
        from shardwright.parallel.mcore import groups
        from shardwright.parallel.mcore.engine import Engine

        assert self.refusals(config) == []
        layout, recorded = plan.layout(config), config.execution.cuda_graph_impl is not CudaGraph.none
        connected = self.groups
        groups.seed_everything(config.run.seed, layout, 0, recorded=recorded)
        engine = Engine(config, layout, connected, self.device, 0, plan.padded_vocab_size(config.model))
        self._engines.add(engine)
        return engine

    def train(self, *overrides: str, num_steps: int = 6) -> Curve:
        """Build an engine, train it on tokens that depend on the step alone, and let it go."""
        on_gpu, before = self.kind == "cuda", 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        engine = self.engine(*overrides)
        results = [engine.train_step(step_of(engine.config, number), 1e-3, 0.1) for number in range(num_steps)]
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        losses, norms = [each.loss for each in results], [each.grad_norm for each in results]
        curve = Curve(losses, norms, peak, engine.kernels(), digest(engine.narrow.amax_state()))
        del engine, results
        self.forget()
        return curve

    def forget(self) -> None:
        """Give back what engines held that nobody holds any more."""
        for (
            engine
        ) in self._engines:  # hooks of autograd's nodes hold the wrapper that holds the nodes: nobody sees that
            for chunk in engine.chunks:
                chunk.grad_accs.clear()
                for (
                    module
                ) in chunk.modules():  # methods with a cache hold their objects, which hold hooks of the wrapper
                    for method in vars(type(module)).values():
                        getattr(method, "cache_clear", lambda: None)()
        if self.kind == "cuda":
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            FP8GlobalStateManager.reset()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def in_its_own_process(*overrides: str) -> Curve:
    """Train one engine there: variables of the environment and recordings stay in it."""
    done = subprocess.run([sys.executable, __file__, *overrides], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return Curve(**json.loads(done.stdout.splitlines()[-1]))


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
