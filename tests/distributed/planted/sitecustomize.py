"""A fault planted into one rank of a real `shardwright train`, without a hook for it in the product.

Python imports `sitecustomize` at its start from PYTHONPATH (`commands.start(fault=...)` puts this folder there). In the
rank that PLANTED_FAULT=RANK:STEP:KIND names (`*` for all) the engine is changed right after it is imported: its step
STEP goes wrong as KIND says, or, with `dies_loading`, the loading of that step's checkpoint. The launcher has no RANK,
so nothing happens there; tasks of srun have SLURM_PROCID.
"""

import functools
import importlib
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENGINE, PREFLIGHT = "shardwright.parallel.mcore.engine", "shardwright.pretrain.preflight_torch"
MICROBATCHES = 4
"""Of a step of the runs that are planted into, on one data-parallel rank."""
SLOW_SECONDS = 5.0
"""Before each file that a rank writes slowly."""


def happen(kind: str, engine: Any) -> None:
    """The fault itself, inside of the rank, where its step would begin."""
    match kind:
        case "exits":
            os._exit(7)
        case "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleeps":
            time.sleep(3600)
        case "is_slow":
            time.sleep(0.5)
        case "gets_no_data":
            loader: Any = importlib.import_module("torch.utils.data")
            loader.dataloader._BaseDataLoaderIter.__next__ = lambda self: time.sleep(3600)
        case "raises":
            raise ValueError("the planted error")
        case "has_bad_memory":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        case "has_no_room":  # for a file of more than 64 KiB
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        case "writes_slowly":
            writer: Any = importlib.import_module("shardwright.parallel.mcore.shard_writer")
            write = writer._write

            def write_later(*arguments: Any) -> None:
                time.sleep(SLOW_SECONDS)
                write(*arguments)

            writer._write = write_later
        case "has_nan":
            engine.optimizer.param_groups[0]["params"][0].data.fill_(float("nan"))
        case "scales_otherwise":  # by the least that a number can differ
            history = engine.narrow.layers["decoder.layers.1.mlp.linear_fc1"].recipe.histories["x"]

            def differ(*_: Any) -> None:
                history.scale = history.scale * (1 + 2**-23)

            engine.model.module.register_forward_hook(differ)
        case "quantizes_outliers":  # in one layer, in the micro-batches of this step
            layer, left = engine.narrow.layers["decoder.layers.0.mlp.linear_fc2"], iter(range(MICROBATCHES - 1, -1, -1))

            def enlarge(module: Any, inputs: Any) -> Any:
                if next(left) == 0:
                    hook.remove()
                return (inputs[0] * 1e4, *inputs[1:])

            hook = layer.register_forward_pre_hook(enlarge, prepend=True)
        case "loses_its_way":  # for two steps
            gpt = engine.model.module
            compute, left = gpt.compute_language_model_loss, iter(range(2 * MICROBATCHES - 1, -1, -1))

            def enlarged(*arguments: Any) -> Any:
                if next(left) == 0:
                    del gpt.compute_language_model_loss
                return compute(*arguments) * 5

            gpt.compute_language_model_loss = enlarged
        case "loses_a_loss":
            gpt, nan = engine.model.module, float("nan")
            compute = gpt.compute_language_model_loss

            def once(*arguments: Any) -> Any:
                del gpt.compute_language_model_loss
                return compute(*arguments) * nan

            gpt.compute_language_model_loss = once


def die_loading(engine: Any, step: int) -> None:
    """Let whoever loads the checkpoint of `step` die."""
    build = engine.__init__

    def build_and_plant(self: Any, *arguments: Any) -> None:
        build(self, *arguments)
        shards: Any = importlib.import_module("shardwright.parallel.mcore.shards")
        load = shards.load

        def load_or_die(engine: Any, folder: Any, **options: Any) -> None:
            if folder.name == f"step_{step:08d}":
                os._exit(7)
            load(engine, folder, **options)

        shards.load = load_or_die

    engine.__init__ = build_and_plant


def plant(module: ModuleType, step: int, kind: str) -> None:
    """Let the engine's step number `step`, counted from 1 in this process, go wrong."""
    engine: Any = module.Engine
    if kind == "dies_loading":
        die_loading(engine, step)
        return
    whole, calls = engine.train_step, iter(range(1, sys.maxsize))

    @functools.wraps(whole)
    def train_step(self: Any, *args: Any) -> Any:
        call = next(calls)
        if call == step or (call > step and kind == "is_slow"):
            happen(kind, self)
        return whole(self, *args)

    engine.train_step = train_step


def plant_in_preflight(module: Any) -> None:
    """Let a product be wrong."""
    results: Any = importlib.import_module("shardwright.pretrain.preflight_results")
    module.gemm = lambda device: results.Finding(results.BAD, "3 rows are wrong")


class Planter(MetaPathFinder):
    """Finds a module as everybody does, and changes it once it is there."""

    def __init__(self, step: int, kind: str) -> None:
        self.step, self.kind = step, kind
        self.module = PREFLIGHT if kind == "computes_wrongly" else ENGINE

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that plants the fault; None for all other modules."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_plant(module: ModuleType) -> None:
            execute(module)
            if name == PREFLIGHT:
                plant_in_preflight(module)
            else:
                plant(module, self.step, self.kind)

        spec.loader.exec_module = execute_and_plant  # type: ignore[method-assign]
        return spec


if "PLANTED_FAULT" in os.environ:
    faulty_rank, faulty_step, fault = os.environ["PLANTED_FAULT"].split(":")
    rank_here = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    if rank_here is not None and faulty_rank in (rank_here, "*"):
        sys.meta_path.insert(0, Planter(int(faulty_step), fault))
