"""Your own text, trained on as the documentation says; and a split that leaves nothing to evaluate on."""

import json
import re
import shlex
from pathlib import Path

from . import commands

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


def example() -> list[str]:
    """Overrides of the example."""
    (overrides,) = re.findall(r"^shardwright train (.*)$", DOCUMENT, re.MULTILINE)
    return shlex.split(overrides)


def test_the_example_trains_on_ten_documents_unless_it_has_to_evaluate_on_none(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    lines = [json.dumps({"text": f"Document {number}. " * 20}) + "\n" for number in range(10)]
    (tmp_path / "texts" / "some.jsonl").write_text("".join(lines))
    few = (*commands.SMALL, *commands.TWO_TENSOR_PARALLEL, "data.split=[969,30,1]", "schedule.train_iters=3")

    refused = commands.train(tmp_path / "run", *example(), *few, "schedule.eval_iters=2")
    assert refused.code == 2, refused.out
    assert "validation: 0 documents of 10" in " ".join(refused.out.split())
    assert [row["data"]["phase"] for row in commands.events(tmp_path / "run", "phase")][-1] == "preparing data"

    trained = commands.train(tmp_path / "run", *example(), *few, "schedule.eval_iters=0")
    assert trained.code == 0, trained.out
    assert commands.steps(tmp_path / "run") == [1, 2, 3]
    (started,) = commands.events(tmp_path / "run", "start")
    assert (started["data"]["data"]["source"], started["data"]["data"]["documents"]) == ("text", 10)
