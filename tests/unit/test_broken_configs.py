"""Broken configurations and what a user reads of them: `broken_configs.yaml` holds every word.

`python -m shardwright.tests.unit.test_broken_configs` writes the messages anew; read the difference as a user would.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shardwright.conf.compose import compose
from shardwright.conf.problems import Problem
from shardwright.pretrain import checks

GOLDEN = Path(__file__).with_name("broken_configs.yaml")
NODE = "cluster=dgx_h200 precision=bf16 data.seq_length=4096 data.micro_batch_size=1 data.global_batch_size=128"
BASES = {
    "llama": f"model=llama3_8b {NODE}",
    "mixtral": f"model=mixtral_8x7b {NODE}",
    "deepseek": f"model=deepseek_v3 {NODE}",
    "tiny_mixtral": "model=tiny_mixtral cluster.gpu=none data.global_batch_size=16",
    "tiny_deepseek": "model=tiny_deepseek cluster.gpu=none data.global_batch_size=16",
}
"""Sound configurations; each case breaks one of them."""
CASES = [(base, case) for base, cases in yaml.safe_load(GOLDEN.read_text()).items() for case in cases]
IDS = [case["case"] for _, case in CASES]
TOKEN = re.compile(r"([a-z]+\.\w+)=(\[[^]]*\]|[^\s,;]+)")
ONE_MESSAGE = [pytest.param(base, case, id=case["case"]) for base, case in CASES if len(case["messages"]) == 1]


def broken(base: str, *overrides: str) -> list[Problem]:
    return checks.config_problems(compose([*BASES[base].split(), *overrides]))


@pytest.mark.parametrize("base", BASES)
def test_each_base_is_sound(base: str) -> None:
    assert broken(base) == []


@pytest.mark.parametrize(("base", "case"), CASES, ids=IDS)
def test_a_broken_configuration_is_told_so_in_these_words(base: str, case: dict) -> None:
    assert [str(problem) for problem in broken(base, *case["overrides"].split())] == case["messages"]


def offers(problem: Problem) -> Iterator[list[str]]:
    """What a remedy offers, each as the overrides to type: `a.b=1 or a.b=2 works, or c.d=true` are three."""
    for part in re.split(r",? or |; ", problem.remedy):
        typed = [f"{key}={value}" for key, value in TOKEN.findall(part)]
        if typed:
            yield typed


@pytest.mark.slow
@pytest.mark.parametrize(("base", "case"), ONE_MESSAGE)
def test_what_is_offered_works(base: str, case: dict) -> None:
    overrides = case["overrides"].split()
    (problem,) = broken(base, *overrides)
    assert problem.remedy
    for typed in offers(problem):
        assert broken(base, *overrides, *typed) == [], f"{' '.join(typed)} was offered"


def test_thirty_configurations_are_broken_in_different_ways() -> None:
    assert len(set(IDS)) == len(IDS) >= 30
    first = [case["messages"][0] for _, case in CASES]
    assert len(set(first)) == len(first)


def write() -> None:
    """Put what is said now into the file."""
    lines = [f"# Broken configurations and their messages; {Path(__file__).name} says how to renew them."]
    for base in BASES:
        lines.append(f"{base}:")
        for name, case in CASES:
            if name == base:
                messages = [str(problem) for problem in broken(base, *case["overrides"].split())]
                told = yaml.safe_dump(
                    [{"case": case["case"], "overrides": case["overrides"], "messages": messages}],
                    sort_keys=False,
                    width=110,
                    allow_unicode=True,
                )
                lines.append(textwrap.indent(told, "  ").rstrip())
    GOLDEN.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
