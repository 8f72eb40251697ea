"""Which packages a feature needs, found without importing any of them.

An import of torch costs seconds and one of Transformer Engine initialises CUDA, while a refusal must come within
seconds and before any process group exists. So modules are looked up and a version is read from the package's metadata.
The same name may stand for another project on the package index (`apex` does, and a placeholder is called
`emerging-optimizers`), so what counts are the modules that the feature uses.
"""

from dataclasses import dataclass
from importlib import metadata, util
from importlib.machinery import PathFinder
from pathlib import Path

from packaging.version import InvalidVersion, Version

from shardwright.conf.problems import Problem


@dataclass(frozen=True, slots=True)
class Requirement:
    """One package and the least version that is known to work."""

    modules: str
    """What is imported, separated by blanks; all of it must be there."""
    distributions: tuple[str, ...]
    """Names on the package index, the first installed one tells the version."""
    least: str
    install: str
    """How a user gets it."""
    without: str
    """What does not work where it is missing."""
    known: str = ""
    """The version that everything was checked with, as in constraints.txt; empty where none was."""
    extension: str = ""
    """A compiled part: the beginning of its file's name, in the package's folder or beside it."""
    always: bool = False
    """Whether every run needs it, also on the CPU."""


REQUIREMENTS = {
    "torch": Requirement(
        "torch", ("torch",), "2.11", "pip install torch", "nothing runs but plan and submit", "2.11.0", always=True
    ),
    "megatron_core": Requirement(
        "megatron.core",
        ("megatron-core",),
        "0.19.2",
        "pip install megatron-core",
        "nothing trains",
        "0.19.2",
        always=True,
    ),
    "hydra": Requirement(
        "hydra", ("hydra-core",), "1.3.8", "pip install hydra-core", "no configuration is read", "1.3.8", always=True
    ),
    "omegaconf": Requirement(
        "omegaconf", ("omegaconf",), "2.3", "pip install omegaconf", "no configuration is read", "2.3.1", always=True
    ),
    "nvidia_ml": Requirement(
        "pynvml", ("nvidia-ml-py",), "13", "pip install nvidia-ml-py", "GPUs are neither seen nor checked", "13.615.71"
    ),
    "transformer_engine": Requirement(
        "transformer_engine",
        ("transformer-engine", "transformer-engine-torch"),
        "2.20",
        "in the checkout: pip install --no-build-isolation -c constraints.txt -e '.[te]'",
        "no run on a GPU: every layer there is Transformer Engine's",
        "2.20.2",
    ),
    "transformer_engine_torch": Requirement(
        "transformer_engine",
        ("transformer-engine-torch", "transformer-engine"),
        "2.20",
        "compiled at installation, against the torch that is there: docs/install-cluster.md",
        "transformer_engine cannot be imported",
        "2.20.2",
        extension="transformer_engine_torch",
    ),
    "flash_attn": Requirement(
        "flash_attn",
        ("flash-attn", "flash-attn-3"),
        "2.7",
        "pip install --no-build-isolation flash-attn",
        "execution.attention_backend=flash is refused; cuDNN's attention is taken",
    ),
    "deep_ep": Requirement(
        "deep_ep",
        ("deep-ep", "deep_ep"),
        "1.0",
        "model.moe_token_dispatcher_type=alltoall needs no DeepEP",
        "model.moe_token_dispatcher_type=flex is refused",
    ),
    "plotly": Requirement(
        "plotly",
        ("plotly",),
        "6",
        "in the checkout: pip install -c constraints.txt -e '.[telemetry]'",
        "no drawings",
        "7.1.0",
    ),
    "tensorboard": Requirement(
        "tensorboard",
        ("tensorboard",),
        "2.20",
        "in the checkout: pip install -c constraints.txt -e '.[telemetry]'",
        "no histograms of what FP8 quantises",
        "2.21.0",
    ),
    "sentencepiece": Requirement(
        "sentencepiece",
        ("sentencepiece",),
        "0.2.1",
        "in the checkout: pip install -c constraints.txt -e '.[sentencepiece]'",
        "no tokenizer files *.model",
        "0.2.2",
    ),
    "emerging_optimizers": Requirement(
        "emerging_optimizers.orthogonalized_optimizers emerging_optimizers.soap absl",
        ("emerging-optimizers",),
        "0.3",
        "in the checkout: pip install -c constraints.txt -e '.[muon]'",
        "optimizer=muon is refused",
        "0.3.0",
    ),
    "nvidia_resiliency_ext": Requirement(
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        ("nvidia-resiliency-ext",),
        "0.4.1",
        "pip install nvidia-resiliency-ext; cluster.launcher=torchrun needs none",
        "cluster.launcher=ft_launcher is refused: no spare nodes inside of a job",
    ),
    "apex": Requirement(
        "apex.optimizers amp_C",
        ("apex",),
        "0.1",
        "build NVIDIA's apex with its C++ and CUDA extensions: https://github.com/NVIDIA/apex",
        "optimizer.kernel=apex is refused; Transformer Engine's kernels are taken",
    ),
}
"""Feature -> what it needs."""


def version(feature: str) -> str | None:
    """Installed version of a feature's package, `unknown` for a source tree; None if it is not there."""
    requirement = REQUIREMENTS[feature]
    if not all(map(_importable, requirement.modules.split())) or not _compiled(requirement):
        return None
    for distribution in requirement.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def problem(feature: str, installed: str | None) -> Problem | None:
    """What stands against using a feature whose package is `installed` in this version (None: not at all)."""
    requirement = REQUIREMENTS[feature]
    name = requirement.distributions[0]
    rule = f"{name} {requirement.least} or newer is needed"
    if installed is None:
        return Problem(key=name, value="missing", rule=rule, remedy=requirement.install)
    try:
        # NVIDIA's images hold snapshots of a version to come, 2.11.0a0+...nv26.02, which count as that version
        old = Version(Version(installed).base_version) < Version(requirement.least)
    except InvalidVersion:  # a source tree or a build of one's own: nothing to compare
        old = False
    return Problem(key=name, value=installed, rule=rule, remedy=f"{requirement.install} --upgrade") if old else None


def _compiled(requirement: Requirement) -> bool:
    """Whether the compiled part of a package is there, which may be installed apart from it."""
    if not requirement.extension:
        return True
    spec = util.find_spec(requirement.modules)
    folders = [Path(path) for path in (spec.submodule_search_locations if spec else None) or ()]
    places = [place for folder in folders for place in (folder, folder / "wheel_lib", folder.parent)]
    return any(True for place in places for _ in place.glob(f"{requirement.extension}*.so"))


def _importable(module: str) -> bool:
    """Whether a dotted module can be found; nothing on the way to it is imported."""
    top, *below = module.split(".")
    try:
        spec = util.find_spec(top)
        path = top
        for name in below:  # the whole path: `megatron` alone is a namespace that many projects share
            if spec is None or spec.submodule_search_locations is None:
                return False
            path = f"{path}.{name}"
            spec = PathFinder.find_spec(path, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return False
    return spec is not None
