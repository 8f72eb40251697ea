"""Which packages a feature needs, found without importing any of them.

An import of torch costs seconds and one of Transformer Engine initialises CUDA, while a refusal must come within
seconds and before any process group exists. So modules are looked up and a version is read from the package's metadata.
The same name may stand for another project on the package index (`apex` does, and a placeholder is called
`emerging-optimizers`), so what counts are the modules that the feature uses.
"""

from dataclasses import dataclass
from importlib import metadata, util
from importlib.machinery import PathFinder

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


REQUIREMENTS = {
    "torch": Requirement("torch", ("torch",), "2.11", "pip install torch"),
    "megatron_core": Requirement("megatron.core", ("megatron-core",), "0.19.2", "pip install megatron-core"),
    "transformer_engine": Requirement(
        "transformer_engine",
        ("transformer-engine", "transformer-engine-torch"),
        "2.20",
        "in the checkout: pip install --no-build-isolation -c constraints.txt -e '.[te]'",
    ),
    "flash_attn": Requirement(
        "flash_attn", ("flash-attn", "flash-attn-3"), "2.7", "pip install --no-build-isolation flash-attn"
    ),
    "deep_ep": Requirement(
        "deep_ep", ("deep-ep", "deep_ep"), "1.0", "model.moe_token_dispatcher_type=alltoall needs no DeepEP"
    ),
    "plotly": Requirement(
        "plotly", ("plotly",), "6", "in the checkout: pip install -c constraints.txt -e '.[telemetry]'"
    ),
    "sentencepiece": Requirement(
        "sentencepiece",
        ("sentencepiece",),
        "0.2.1",
        "in the checkout: pip install -c constraints.txt -e '.[sentencepiece]'",
    ),
    "emerging_optimizers": Requirement(
        "emerging_optimizers.orthogonalized_optimizers emerging_optimizers.soap absl",
        ("emerging-optimizers",),
        "0.3",
        "in the checkout: pip install -c constraints.txt -e '.[muon]'",
    ),
    "nvidia_resiliency_ext": Requirement(
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        ("nvidia-resiliency-ext",),
        "0.4.1",
        "pip install nvidia-resiliency-ext; cluster.launcher=torchrun needs none",
    ),
    "apex": Requirement(
        "apex.optimizers amp_C",
        ("apex",),
        "0.1",
        "build NVIDIA's apex with its C++ and CUDA extensions: https://github.com/NVIDIA/apex",
    ),
}
"""Feature -> what it needs."""


def version(feature: str) -> str | None:
    """Installed version of a feature's package, `unknown` for a source tree; None if it is not there."""
    requirement = REQUIREMENTS[feature]
    if not all(map(_importable, requirement.modules.split())):
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
        old = Version(installed) < Version(requirement.least)
    except InvalidVersion:  # a source tree or a build of one's own: nothing to compare
        old = False
    return Problem(key=name, value=installed, rule=rule, remedy=f"{requirement.install} --upgrade") if old else None


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
