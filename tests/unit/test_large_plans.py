"""Two of the largest published models over thousands of ranks, by the commands of docs/parallelism.md."""

import subprocess
import sys

import pytest
from rich.console import Console

from shardwright.conf.compose import compose
from shardwright.parallel.stages import Stages
from shardwright.pretrain import plan, plan_table
from shardwright.pretrain.plan import Plan

from .test_documents import overrides_of

COMMANDS = {model: overrides_of(f"model={model}") for model in ("llama3_405b", "deepseek_v3")}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {model: plan.make_plan(compose(overrides)) for model, overrides in COMMANDS.items()}


def letters(stages: Stages) -> list[str]:
    return [" | ".join(chunk.letters for chunk in chunks) for chunks in stages]


def test_llama_405b_over_2048_ranks(plans: dict[str, Plan]) -> None:
    planned = plans["llama3_405b"]
    places = planned.layout
    assert (places.world_size, places.tp, places.pp, places.vpp, places.dp) == (2048, 8, 16, 8, 16)
    first, *between, last = letters(planned.stages)
    assert first == "E" + " | t" * 7
    assert set(between) == {" | ".join("t" * 8)}
    assert last == "t | " * 7 + "L"
    assert places.num_nodes("tp", 8) == 1 and places.num_nodes("pp", 8) == 16
    assert max(planned.parameters_per_rank) < 3.2e9


def test_deepseek_v3_over_1024_ranks(plans: dict[str, Plan]) -> None:
    planned = plans["deepseek_v3"]
    places = planned.layout
    assert (places.world_size, places.pp, places.dp, places.ep, places.edp) == (1024, 16, 64, 64, 1)
    first, *between, last = letters(planned.stages)
    assert (first, set(between), last) == ("Ettt", {"tttt"}, "ttmL")
    assert places.num_nodes("ep", 8) == 8
    assert (planned.parameters, planned.active_parameters) == (671_026_404_352, 37_552_282_624)


@pytest.mark.parametrize("model", COMMANDS)
def test_every_layer_stands_once_and_every_rank_has_its_place(plans: dict[str, Plan], model: str) -> None:
    planned = plans[model]
    layers = [number for chunks in planned.stages for chunk in chunks for number in chunk.layers]
    assert sorted(layers) == list(range(planned.config.model.num_layers))
    rank_map = plan.as_json(planned)["layout"]["rank_map"]
    assert len({tuple(place[axis] for axis in ("tp", "cp", "dp", "pp")) for place in rank_map}) == len(rank_map)
    assert len({tuple(place[axis] for axis in ("etp", "ep", "edp", "pp")) for place in rank_map}) == len(rank_map)


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("llama3_405b", ["2048 on 256 nodes", "inside a node TP", "2040-2047   0-7   15   15"]),
        ("deepseek_v3", ["1024 on 128 nodes", "EP over 8", "1016-1023    0   56-63   15   56-63"]),
    ],
)
def test_the_map_shows_a_row_for_each_node(plans: dict[str, Plan], model: str, rows: list[str]) -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    plan_table.show(plans[model], console)
    text = console.export_text()
    for row in rows:
        assert row in text


def test_the_largest_plan_imports_no_torch() -> None:
    code = (
        "import sys; from shardwright.pretrain.cli import main; code = main(['plan', *sys.argv[1:]]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *COMMANDS["deepseek_v3"]], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "1024 on 128 nodes" in ended.stdout
