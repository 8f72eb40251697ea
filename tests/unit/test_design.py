"""Rules of the design as tests: packaging, who may import whom, what schema and config files must look like."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.conf import choices, schema
from shardwright.conf.keys import ResumePolicy

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("conf", "data", "parallel", "pretrain", "slurm")
FOLDERS = (*SHIPPED, "tests")
FOREIGN = {"megatron", "transformer_engine", "transformer_engine_torch", "apex"}

# What plans, checks, submits and watches runs must start in a second, on machines without torch.
TORCH_FREE = (
    "conf/**/*.py",
    "data/corpus.py",
    "parallel/layout.py",
    "parallel/linears.py",
    "parallel/stages.py",
    "slurm/**/*.py",
    "pretrain/__main__.py",
    "pretrain/bench.py",
    "pretrain/bench_rank.py",
    "pretrain/checkpoint_choice.py",
    "pretrain/checkpoint_integrity.py",
    "pretrain/checkpoint_store.py",
    "pretrain/checkpoint_trouble.py",
    "pretrain/checks.py",
    "pretrain/cli.py",
    "pretrain/display.py",
    "pretrain/folder.py",
    "pretrain/fp8_guard.py",
    "pretrain/fp8_report.py",
    "pretrain/guard.py",
    "pretrain/heartbeat.py",
    "pretrain/launch.py",
    "pretrain/lint.py",
    "pretrain/machine.py",
    "pretrain/plan.py",
    "pretrain/preflight.py",
    "pretrain/preflight_examine.py",
    "pretrain/preflight_lead.py",
    "pretrain/preflight_versions.py",
    "pretrain/ranks.py",
    "pretrain/train.py",
    "pretrain/watch.py",
)


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    return tuple(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every file that belongs to the project: by git, or where this is no clone by the folders that have files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*")]
        paths += [path for path in ROOT.iterdir() if path.is_file()]
    return tuple(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(path: Path) -> str:
    """`pretrain/cli.py` is the module `shardwright.pretrain.cli`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shardwright", *parts)).removesuffix(".__init__")


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of all that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def yaml_files() -> list[Path]:
    return sorted((ROOT / "conf").rglob("*.yaml"))


def sections() -> dict[str, Any]:
    """Group name -> dataclass."""
    return typing.get_type_hints(schema.Config)


def unknown_keys(values: Any, kind: Any, prefix: str) -> list[str]:
    """Keys of a YAML mapping that the dataclass `kind` does not have, also below nested dataclasses."""
    if isinstance(kind, types.UnionType):
        kind = next((part for part in typing.get_args(kind) if dataclasses.is_dataclass(part)), None)
    if not (dataclasses.is_dataclass(kind) and isinstance(values, dict)):
        return []
    hints = typing.get_type_hints(kind)
    found = [f"{prefix}{name}" for name in values if name not in hints]
    for name in values.keys() & hints.keys():
        found += unknown_keys(values[name], hints[name], f"{prefix}{name}.")
    return found


def test_the_packages_in_pyproject_are_the_folders_with_code() -> None:
    folders = {path.parent.relative_to(ROOT) for path in python_files(*SHIPPED)}
    packages = pyproject()["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted("shardwright." + ".".join(folder.parts) for folder in folders)
    assert pyproject()["tool"]["setuptools"]["package-dir"] == {f"shardwright.{name}": name for name in SHIPPED}


def test_every_init_file_is_there_and_empty() -> None:
    for folder in {path.parent for path in python_files(*FOLDERS)}:
        assert (folder / "__init__.py").read_bytes() == b"", folder


def test_planning_and_submitting_import_no_torch() -> None:
    modules = [module_name(path) for pattern in TORCH_FREE for path in sorted(ROOT.glob(pattern))]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'megatron'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", SHIPPED)
def test_parallel_mcore_alone_imports_megatron_transformer_engine_and_apex(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(folder)
        if (ROOT / "parallel/mcore") not in path.parents
        for name in imported_modules(path)
        if name.split(".")[0] in FOREIGN
    }
    assert not found


def test_our_own_modules_are_imported_by_their_full_name() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(*FOLDERS)
        for name in imported_modules(path)
        if name.split(".")[0] in FOLDERS or name.startswith("shardwright.tests")
    }
    assert not found, "the root of the repository is on nobody's path, and tests are not installed"


@pytest.mark.parametrize("group", sorted(sections()))
def test_every_field_of_the_schema_has_a_docstring_and_a_resume_policy(group: str) -> None:
    kind = sections()[group]
    for field in dataclasses.fields(kind):
        assert isinstance(field.metadata.get("resume"), ResumePolicy), f"{group}.{field.name}"
    tree = ast.parse(Path(inspect.getfile(kind)).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert documented, f"{group}.{ast.unparse(node.target)}"


@pytest.mark.parametrize(
    "enum", [kind for kind in vars(choices).values() if isinstance(kind, type) and kind.__module__ == choices.__name__]
)
def test_enum_names_equal_their_values(enum: Any) -> None:
    assert [member.name for member in enum] == [member.value for member in enum]


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_every_key_of_a_config_file_is_in_the_schema(path: Path) -> None:
    values = dict(yaml.safe_load(path.read_text()) or {})
    values.pop("defaults", None)
    values.pop("hydra", None)
    group = path.relative_to(ROOT / "conf").parts[0]
    is_global = "@package _global_" in path.read_text() or path.parent == ROOT / "conf"
    kind = schema.Config if is_global else sections()[group]
    assert not unknown_keys(values, kind, "" if is_global else f"{group}.")


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_no_config_file_chooses_an_import(path: Path) -> None:
    assert "_target_" not in path.read_text()


def test_no_source_file_is_longer_than_500_lines() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in python_files(*FOLDERS)}
    assert not {path: length for path, length in lengths.items() if length > 500}


def test_constraints_pin_versions_of_everything_that_pyproject_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!_-]+", line) for line in lines), "NAME==VERSION, no URL"

    def normalized(requirement: str) -> str:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name
        return re.sub(r"[-_.]+", "-", name[0]).lower()

    project = pyproject()["project"]
    asked = [*project["dependencies"], *(need for needs in project["optional-dependencies"].values() for need in needs)]
    assert {normalized(need) for need in asked} <= {normalized(line) for line in lines}


def test_no_file_names_a_home_folder() -> None:
    home = re.compile(rb"(?<![\w.])/(?:ho" rb"me/\w|ro" rb"ot/|Us" rb"ers/\w|wo" rb"rk/)")
    found = [path.relative_to(ROOT) for path in tracked_files() if home.search(path.read_bytes())]
    assert not found
