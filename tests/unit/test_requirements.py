"""A package is found by the modules that are used of it, without an import; a namesake is not it."""

import sys
from pathlib import Path

import pytest

from shardwright.pretrain import requirements

RAISES = "raise RuntimeError('imported')\n"


def package(root: Path, *files: str) -> None:
    """Files below `root`, each of which would raise if it were imported."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(RAISES)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is looked through first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


NVIDIA_S_APEX = ("apex/__init__.py", "apex/optimizers/__init__.py", "amp_C.py")
MUON = (
    "emerging_optimizers/__init__.py",
    "emerging_optimizers/orthogonalized_optimizers/__init__.py",
    "emerging_optimizers/soap/__init__.py",
    "absl/__init__.py",
)


@pytest.mark.parametrize(
    ("feature", "files", "found"),
    [
        ("apex", NVIDIA_S_APEX, True),
        ("apex", ("apex/__init__.py", "apex/models.py"), False),  # the namesake of the index
        ("apex", NVIDIA_S_APEX[:2], False),  # built without its extensions
        ("emerging_optimizers", MUON, True),
        ("emerging_optimizers", MUON[:1], False),  # a placeholder
        ("emerging_optimizers", ("emerging_optimizers.py",), False),
    ],
)
def test_a_package_is_known_by_what_it_provides(
    site: Path, monkeypatch: pytest.MonkeyPatch, feature: str, files: tuple[str, ...], found: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    package(site, *files)
    assert (requirements.version(feature) == "9.9") == found
    assert requirements.version(feature) in ("9.9", None)


def test_a_package_without_metadata_is_there_in_an_unknown_version(site: Path) -> None:
    package(site, *NVIDIA_S_APEX)
    assert requirements.version("apex") == "unknown"
    assert requirements.problem("apex", "unknown") is None


def test_what_is_installed_here_is_found() -> None:
    assert requirements.version("torch") and requirements.version("megatron_core")
