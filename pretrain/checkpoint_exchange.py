"""`shardwright checkpoint export|import`: to and from Hugging Face's safetensors, and from Megatron-LM.

One process does it, tensor by tensor: no ranks, no model and no GPU are needed, and no more memory than for one file of
the result. The maps between ours and Hugging Face's are those of `parallel/mcore/hf`, which also load a model of
transformers into the ranks of a test.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.conf import compose
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config
from shardwright.conf.schema_model import Model
from shardwright.data.cache import flush
from shardwright.parallel.layout import Layout
from shardwright.pretrain import checkpoint_integrity, checkpoint_report, checkpoint_store, checks, plan, provenance
from shardwright.pretrain.events import now
from shardwright.pretrain.faults import DamagedError
from shardwright.pretrain.trainer_state import TrainerState

if TYPE_CHECKING:
    import torch

FILE_BYTES = 5 * 10**9
"""Size of the exported files, as Hugging Face makes them."""
_INDEX = "model.safetensors.index.json"


def export(
    path: Path,
    target: Path,
    step: int | None,
    *,
    file_bytes: int = FILE_BYTES,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the weights of a checkpoint as a folder that transformers loads.

    Args:
        path: a run's folder, its checkpoints' folder, or one checkpoint.
        target: new folder; it appears when it is complete.
        step: of these; None for the newest whole one.
        file_bytes: about how large a file gets, and how much memory is taken.
        say: told of what cannot be exported.

    Returns:
        The checkpoint that was exported.

    Raises:
        RefusedError: there is no such checkpoint, no family for its model, or `target` exists.
        DamagedError: its content is not what was written.
    """
    checkpoint = whole(path, step)
    config = compose.load(checkpoint / checkpoint_store.CONFIG)
    use_cpu()
    from shardwright.parallel.mcore.hf import mapping
    from shardwright.parallel.mcore.hf.families import family_of
    from shardwright.parallel.mcore.tensor_files import TensorReader

    family, reader = family_of(config.model), TensorReader(checkpoint)
    if config.model.mtp_num_layers:
        say(f"left out: the layers of multi-token prediction, which {family.architecture} lacks")

    def tensors() -> Iterator[tuple[str, "torch.Tensor"]]:
        for row in mapping.rows_of(family.rows, config.model):
            parts = row.kind.split(reader.read(row.megatron), config.model)
            yield from zip(row.hugging_face, parts, strict=True)

    with _appearing(target) as folder:
        dtype = _write_safetensors(folder, tensors(), file_bytes)
        told = {**family.config(config.model), "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")
        tokenizer = Path(config.data.tokenizer or "")
        if tokenizer.name == "tokenizer.json" and tokenizer.is_file():
            shutil.copy(tokenizer, folder / tokenizer.name)
    return checkpoint


def import_(source: Path, target: Path, overrides: Sequence[str]) -> Path:
    """Write somebody's weights as a checkpoint of step 0, from which `checkpoint.load=TARGET` starts.

    Args:
        source: folder with `config.json` and safetensors, or a `torch_dist` checkpoint of Megatron-LM.
        target: folder that gets `step_00000000`.
        overrides: what the run will be composed of; its model must be that of `source`. A checkpoint of Megatron-LM
            needs `checkpoint.trusted=true`, since its arguments are pickled.

    Returns:
        The new checkpoint, weights alone.

    Raises:
        RefusedError: the model is another one, files are missing, or `target` has a checkpoint.
    """
    config = compose.compose(overrides)
    refuse(checks.config_problems(config))
    use_cpu()
    from shardwright.parallel.mcore import megatron_lm, shards, tensor_files

    final = checkpoint_store.step_folder(target, 0)
    if final.exists():
        raise RefusedError([Problem(key="TARGET", value=target, rule=f"it already holds {final.name}")])
    megatron = megatron_lm.find(source)
    weights = _of_transformers(source, config.model) if megatron is None else _of_megatron_lm(megatron, config)
    folder = checkpoint_store.begin(target, 0)
    stacked = None if config.model.num_moe_experts else config.model.num_layers  # None where layers may differ
    with tensor_files.TensorWriter(folder, stacked, {"content_metadata": dict(shards.METADATA)}) as writer:
        for name, tensor in weights:
            writer.write(name, tensor)
    content = TrainerState().to_json(Layout(world_size=1), 0) | {
        "validation_loss": None,
        "time": now(),
        "precision": plan.precision_name(config),
        "versions": provenance.versions(),
    }
    return checkpoint_store.commit(folder, content, {}, config=compose.dump(config)).path


def _of_transformers(source: Path, model: Model) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Our weights from a folder of transformers'; what can be refused is refused at once."""
    from shardwright.parallel.mcore.hf import mapping
    from shardwright.parallel.mcore.hf.families import family_of

    family = family_of(model)
    if model.mtp_num_layers:
        rule = f"{family.architecture} has no layers of multi-token prediction to import"
        remedy = "import with model.mtp_num_layers=null model.mtp_loss_scaling_factor=null"
        raise RefusedError([Problem(key="model.mtp_num_layers", value=model.mtp_num_layers, rule=rule, remedy=remedy)])
    _refuse_other_model(source, family.config(model))
    theirs = _Safetensors(source)
    rows = mapping.rows_of(family.rows, model)
    return ((row.megatron, row.kind.join([theirs.read(name) for name in row.hugging_face], model)) for row in rows)


def _of_megatron_lm(folder: Path, config: Config) -> Iterator[tuple[str, "torch.Tensor"]]:
    """The weights of a checkpoint of Megatron-LM's; what can be refused is refused at once."""
    from shardwright.parallel.mcore import megatron_lm, safe_load
    from shardwright.parallel.mcore.hf.mapping import VOCABULARY

    if not config.checkpoint.trusted:
        rule = f"{folder.name} is a checkpoint of Megatron-LM, which says by pickled objects what model it holds"
        remedy = "checkpoint.trusted=true reads them, by an allow-list, where you trust whoever wrote it"
        raise RefusedError([Problem(key="checkpoint.trusted", value="false", rule=rule, remedy=remedy)])
    with safe_load.refusing(folder):
        typed = megatron_lm.arguments(folder)
    refuse(
        [
            Problem(key=f"args.{name}", value=value, rule=f"the composed model has {own}")
            for name, (value, own) in megatron_lm.differences(typed, config.model).items()
        ]
    )
    return (
        (name, VOCABULARY.join([tensor], config.model) if name in megatron_lm.VOCABULARY else tensor)
        for name, tensor in megatron_lm.weights(folder, config.model)
    )


def whole(path: Path, step: int | None) -> Path:
    """The checkpoint to export: of `step`, or the newest whole one; every byte of it has been compared.

    Raises:
        DamagedError: a byte differs.
    """
    entry = checkpoint_report.choose(path, step)
    reasons = checkpoint_integrity.verify(Path(entry.path)).reasons
    if reasons:
        raise DamagedError(f"{entry.path} is damaged: {'; '.join(reasons)}")
    return Path(entry.path)


def use_cpu() -> None:
    """Let megatron-core be imported for the CPU, whatever the machine has."""
    from shardwright.parallel.mcore import environment

    environment.prepare("cpu")


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is complete and on disk."""
    if target.exists():
        raise RefusedError([Problem(key="TARGET", value=target, rule="exists", remedy="name a new folder")])
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for path in (*partial.iterdir(), partial):
        flush(path)
    partial.rename(target)
    flush(target.parent)


def _write_safetensors(folder: Path, tensors: Iterator[tuple[str, "torch.Tensor"]], file_bytes: int) -> str:
    """Write files of about `file_bytes` with an index; returns the weights' number format, as config.json names it."""
    from safetensors.torch import save_file

    files: list[dict[str, Any]] = []
    held: dict[str, torch.Tensor] = {}
    total, dtype = 0, ""

    def write() -> None:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(dict.fromkeys(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        total += tensor.nbytes
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")  # the embedding's; biases of experts are fp32 always
        if sum(each.nbytes for each in held.values()) >= file_bytes:
            write()
    if held:
        write()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    where = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtype


class _Safetensors:
    """Tensors of a folder of transformers' by name, in one file or several."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / _INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
        files = [folder / name for name in names or ["model.safetensors"]]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise RefusedError([Problem(key="SOURCE", value=folder, rule=f"{', '.join(missing)} is missing")])
        self._folder = folder
        self._files = [safe_open(file, framework="pt") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def read(self, name: str) -> "torch.Tensor":
        if name not in self._where:
            raise RefusedError([Problem(key="SOURCE", value=self._folder, rule=f"it has no tensor {name}")])
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor


def _refuse_other_model(source: Path, ours: dict[str, Any]) -> None:
    """Every value of their `config.json` that the composed model contradicts, in one message."""
    from shardwright.parallel.mcore.hf import configs

    try:
        theirs = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        rule = f"its config.json cannot be read ({error})"
        raise RefusedError([Problem(key="SOURCE", value=source, rule=rule)]) from None
    if theirs.get("quantization_config"):
        rule = f"its weights are quantized ({theirs['quantization_config'].get('quant_method')})"
        raise RefusedError([Problem(key="SOURCE", value=source, rule=rule, remedy="import weights in bf16 or fp32")])
    refuse(
        [
            Problem(key=f"config.json: {name}", value=value, rule=f"the composed model has {own}")
            for name, (value, own) in configs.differences(theirs, ours).items()
        ]
    )
