"""The documents say what the program does: commands break no rule, tables are the schema's, links lead somewhere."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.pretrain import checks, model_size, sweep
from shardwright.pretrain.metrics import COLUMNS

from .. import models

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODELS = (ROOT / "docs" / "models.md").read_text()
RUNNING = (ROOT / "docs" / "running.md").read_text()


def commands() -> list[str]:
    """What follows every `train`, `plan` and `bench step` in a block of code."""
    blocks = [block for path in DOCUMENTS for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL)]
    text = "\n".join(blocks).replace("\\\n", " ")
    return re.findall(r"shardwright (?:train|plan|bench step) ([^#\n]+)", re.sub(r" --plot \S+", "", text))


def overrides_of(word: str) -> list[str]:
    """Of the one documented command with that override."""
    ((*overrides,),) = [shlex.split(command) for command in commands() if word in shlex.split(command)]
    return overrides


@pytest.mark.parametrize("command", commands())
def test_a_command_breaks_no_rule(command: str) -> None:
    words = shlex.split(command)
    overrides = [word for word in words if "=" in word]
    for point in sweep.expand(overrides) if "-m" in words else [overrides]:
        assert checks.config_problems(compose.compose(point)) == []


def test_the_readme_shows_both_commands() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_are_there(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"`((?:conf|data|parallel|pretrain|tests)/[\w/]+\.py)`", text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("section", compose.SECTIONS)
def test_the_table_of_resume_policies_is_the_schema_s(section: str) -> None:
    (row,) = re.findall(rf"^\| `{section}` \|(.*)\|(.*)\|(.*)\|$", RUNNING, re.MULTILINE)
    named = [set(cell.strip("` ").split()) for cell in row]
    policies = {field.name: field.metadata["resume"].name for field in dataclasses.fields(compose.SECTIONS[section])}
    for policy, names in zip(("free", "warn", "refuse"), named, strict=True):
        expected = {name for name, own in policies.items() if own == policy}
        assert names == expected or (section == "model" and policy == "refuse" and names == {"all", "others"})


def test_the_table_of_models_is_what_plan_counts() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) [^|]*\| (?:all |([\d,]+) [^|]*)\|$", MODELS, re.MULTILINE)
    counted = {}
    for choice in models.MODELS:
        model = models.model_of(choice)
        whole = model_size.weights(model)
        counted[choice] = (f"{whole.total:,}", f"{whole.active(model):,}" if model.num_moe_experts else "")
    assert {name: (total, active) for name, total, active in rows} == counted


def test_every_group_and_every_column_of_the_metrics_is_named() -> None:
    for name in (*compose.groups(), *COLUMNS):
        assert re.search(rf"\b{name}\b", RUNNING), name


def test_every_kind_of_event_is_named() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "pretrain").glob("*.py"))
    kinds = set(re.findall(r"(?:events|log|EventLog\([^)]*\))\.write\(\s*\"(\w+)\"", sources))
    assert {"start", "end", "checkpoint"} <= kinds
    (named,) = re.findall(r"Kinds: `([^`]+)`", RUNNING)
    assert kinds == set(named.split())
