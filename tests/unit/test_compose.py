"""A configuration is composed once, and everything that is wrong with it is said at once."""

import dataclasses
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.choices import Fp8Format, GpuKind
from shardwright.conf.keys import ResumePolicy
from shardwright.conf.problems import RefusedError
from shardwright.conf.schema import Config, ParamOverride

from ..models import MODELS, model_of


def refusal(*overrides: str) -> str:
    """The one message with which these overrides are refused."""
    with pytest.raises(RefusedError) as caught:
        compose.compose(overrides)
    return str(caught.value)


def test_overrides_reach_the_typed_config() -> None:
    config = compose.compose(["model=llama3_8b", "parallel.tp=2", "optimizer.lr=3e-4", "precision.fp8=hybrid"])
    assert (config.model.num_layers, config.parallel.tp, config.optimizer.lr) == (32, 2, 3e-4)
    assert config.precision.fp8 is Fp8Format.hybrid
    assert config.data.vocab_size == config.model.vocab_size == 128256


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_prefix_makes_no_difference_to_a_known_key_or_group(prefix: str) -> None:
    config = compose.compose([f"{prefix}experiment=quickstart", f"{prefix}parallel.pp=2"])
    assert (config.run.name, config.parallel.pp, config.parallel.tp) == ("quickstart", 2, 2)


def test_a_section_can_be_set_as_a_whole_and_keeps_its_other_keys() -> None:
    config = compose.compose(["parallel={tp:2}"])
    assert (config.parallel.tp, config.parallel.pp) == (2, 1)


def test_misspelt_keys_and_bad_numbers_are_refused_together_with_a_suggestion() -> None:
    typos = [f"{prefix}schedule.lr_warmup_iter=3" for prefix in ("", "+", "++")]
    message = refusal(*typos, "optimizer.lr=1e")
    assert "4 problems" in message
    for typo in typos:
        assert f"- {typo}: there is no such key; did you mean schedule.lr_warmup_iters?" in message
    assert "optimizer.lr=1e: must be a finite number" in message


@pytest.mark.parametrize(
    ("override", "named", "remedy"),
    [
        ("+folder=x", "+folder=x: there is no such key", "the sections are run, model"),
        ("lr_warmup_iters=3", "lr_warmup_iters=3", "did you mean schedule.lr_warmup_iters?"),
        ("train.lr=1", "train.lr=1", "did you mean optimizer.lr?"),
        ("vocab_size=1", "vocab_size=1", "did you mean model.vocab_size or data.vocab_size?"),
        ("model=lama", "model=lama: is none of the choices of model: decoder, ", "did you mean llama?"),
        ("model=../run/default", "model=../run/default", "choices of model"),
        ("model@data=tiny", "model@data=tiny", "write model=tiny"),
        ("parallel={tp:1,tq:2}", "parallel.tq=2: there is no such key", "did you mean parallel.tp?"),
        ("~schedule.lr_warmup_iter", "~schedule.lr_warmup_iter", "did you mean schedule.lr_warmup_iters?"),
        ("+model._target_=os.system", "+model._target_=os.system", "names no code to call"),
        ("hydra.run.dir=x", "hydra.run.dir=x", "no effect"),
        ("schedule.train_iters=1.5", "schedule.train_iters=1.5: must be a whole number", "digits"),
        ("schedule.train_iters=many", "schedule.train_iters=many: must be a whole number", ""),
        ("schedule.train_iters=null", "schedule.train_iters=null: must be a whole number", ""),
        ("cluster.ranks=two", "cluster.ranks=two: must be a whole number or null", ""),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a finite number", "3e-4"),
        ("optimizer.lr=inf", "optimizer.lr=inf: must be a finite number", ""),
        ("optimizer.lr=true", "optimizer.lr=true: must be a finite number", ""),
        ("data.split=[1,nan]", "data.split=[1,nan]: must be a list of finite numbers", "[98,1,1]"),
        ("parallel.sp=2", "parallel.sp=2: must be true or false", ""),
        ("run.name=null", "run.name=null: must be a text", ""),
        ("data.files=a.txt", "data.files=a.txt: must be a list of texts or null", "write it in brackets"),
        ("run.name={a:1}", "run.name={'a': 1}: must be a text", ""),
        ("cluster.gpu=h20", "cluster.gpu=h20: is none of auto, none, h100, h200, b200, gb200", ""),
        ("precision.fp8=none", "precision.fp8=none: is none of e4m3, hybrid or null", ""),
        ("optimizer.lr=???", "optimizer.lr=???: has no value", "optimizer.lr=..."),
        ("~optimizer.lr", "optimizer.lr=???: has no value", ""),
        (
            "optimizer.overrides=3",
            "optimizer.overrides=3: must be a list of mappings",
            "[{match:'*.weight',lr_mult:0.5}]",
        ),
        (
            "optimizer.overrides={match:a}",
            "optimizer.overrides=[{match:'a'}]: must be a list of mappings",
            "write it like",
        ),
        ("optimizer.overrides=[3]", "optimizer.overrides[0]=3: must be a list of mappings", "write it like"),
        ("optimizer.overrides=[{lr_mult:2}]", "optimizer.overrides[0].match=???: has no value", "give one"),
        (
            "optimizer.overrides=[{match:a,lr_mul:2}]",
            "optimizer.overrides[0].lr_mul=2: there is no such key",
            "did you mean optimizer.overrides[0].lr_mult?",
        ),
        ("optimizer.overrides=[{match:a,x:2}]", "optimizer.overrides[0].x=2", "did you mean optimizer.overrides[0]."),
        (
            "optimizer.overrides=[{match:a,lr_mult:fast}]",
            "optimizer.overrides[0].lr_mult=fast: must be a finite number or null",
            "write it like 0.1",
        ),
        (
            "optimizer.overrides.0.match=a",
            "optimizer.overrides.0.match=a: there is no such key",
            "optimizer.overrides?",
        ),
        ("~model", "model=null: this section is missing", "model=decoder|"),
        ("run.name=${nowhere.name}", "run.name=${nowhere.name}: leads nowhere", "'nowhere.name' not found"),
        ("run.name=${run.name}", "run.name=${run.name}: leads nowhere", ""),
        ("cluster.setup=['cd ${DIR}']", "cluster.setup=['cd ${DIR}']: leads nowhere", r"is written \${NAME}"),
        ("cluster.setup=['cd ${DIR:-/}']", "cluster.setup=['cd ${DIR:-/}']: leads nowhere", r"is written \${NAME}"),
        ("optimizer.lr=1e-3,1e-4", "optimizer.lr=1e-3,1e-4: is a sweep", "add -m"),
        ("run.name=[", "run.name=[: cannot be read", "write key=value"),
        ("run.name", "run.name: has no value", "write run.name=..."),
    ],
)
def test_a_mistake_is_named_with_its_remedy(override: str, named: str, remedy: str) -> None:
    message = refusal(override)
    assert f"- {named}" in message
    assert remedy in message
    assert "\n    " not in message, "one line per problem"


def test_mistakes_of_every_kind_are_reported_together() -> None:
    message = refusal("model=lama", "x.y=1", "a=[", "cluster.gpu=h20", "run.name=${no.where}", "~optimizer.lr")
    for key in ("model=lama", "x.y=1", "a=[", "cluster.gpu=h20", "run.name=${no.where}", "optimizer.lr=???"):
        assert f"- {key}" in message


def test_a_mistake_in_a_key_that_others_repeat_is_told_once() -> None:
    message = refusal("data.seq_length=2k")
    assert "1 problem\n  - data.seq_length=2k: must be a whole number" in message


@pytest.mark.parametrize("text", ["runs/a", "a b", "a,b", "a=b", "it's", "0x1", "1e3", "[1", ""])
def test_an_override_is_quoted_where_hydra_would_read_something_else(text: str) -> None:
    assert compose.compose([compose.override("data.cache_dir", text)]).data.cache_dir == text
    assert compose.override("run.dir", "runs/a") == "run.dir=runs/a"


def test_a_list_of_texts_is_quoted_where_hydra_would_read_something_else() -> None:
    files = ["texts/*.jsonl", "a b.txt", "a,b", "[0-9]{1}.txt", "it's", "1"]
    shown = compose.shown(files)
    assert compose.compose([compose.override("data.files", shown)]).data.files == files
    assert compose.override("data.files", "[a.txt,b.txt]") == "data.files=[a.txt,b.txt]"


def test_a_list_of_mappings_is_typed_and_shown_as_an_override_that_gives_it_again() -> None:
    config = compose.compose([r"optimizer.overrides=[{match:'*.bias',lr_mult:2},{wd_mult:0,match:'it\'s'}]"])
    assert config.optimizer.overrides == [
        ParamOverride(match="*.bias", lr_mult=2.0),
        ParamOverride(match="it's", wd_mult=0.0),
    ]
    again = compose.override("optimizer.overrides", compose.shown(config.optimizer.overrides))
    assert again == r"optimizer.overrides=[{match:'*.bias',lr_mult:2.0},{match:'it\'s',wd_mult:0.0}]"
    assert compose.compose([again]) == config


def test_a_model_without_sizes_asks_for_exactly_them() -> None:
    with pytest.raises(RefusedError) as caught:
        compose.compose(["model=llama", "model.num_layers=2"])
    keys = {problem.key for problem in caught.value.problems}
    assert "model.hidden_size" in keys
    assert not keys & {"model.num_layers", "data.vocab_size"}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=quickstart"],
        ["precision=fp8_delayed", "checkpoint.load='a b: #c'", "run.name=0x1"],
        ["optimizer.overrides=[{match:'*.bias',lr_mult:0.5},{match:'a b: #c',wd_mult:0}]"],
    ],
)
def test_a_frozen_config_is_read_back_equal(overrides: list[str], tmp_path: Path) -> None:
    config = compose.compose(overrides)
    frozen = tmp_path / "config.yaml"
    frozen.write_text(compose.dump(config))
    assert frozen.read_text().startswith("schema_version: 1\n")
    assert compose.load(frozen) == config


def test_a_frozen_config_is_resolved() -> None:
    assert "${" not in compose.dump(compose.compose([]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("schema_version: 1", "schema_version: 2"), "schema_version 2"),
        (("schema_version: 1\n", ""), "is not a frozen configuration: no schema_version"),
        (("  lr: 0.001\n", "  lr: fast\n"), "optimizer.lr=fast"),
        (("  lr: 0.001\n", "  learning_rate: 0.001\n"), "optimizer.learning_rate=0.001"),
        (("run:\n", "run: !!python/object/apply:os.system [id]\nrum:\n"), "cannot be read"),
        (("run:\n", "run: [\n"), "cannot be read: expected ',' or '\\]', but got ':', line 4"),
    ],
)
def test_a_damaged_or_foreign_frozen_config_is_refused(change: tuple[str, str], named: str, tmp_path: Path) -> None:
    frozen = tmp_path / "config.yaml"
    frozen.write_text(compose.dump(compose.compose([])).replace(*change))
    with pytest.raises(RefusedError, match=named):
        compose.load(frozen)


def test_a_missing_frozen_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="cannot be read"):
        compose.load(tmp_path / "config.yaml")


def test_differences_name_every_changed_key_and_its_policy() -> None:
    saved = compose.compose([])
    present = compose.compose(["schedule.train_iters=7", "optimizer.lr=1", "model.num_layers=2", "cluster.gpu=none"])
    found = {difference.key: difference for difference in compose.differences(saved, present)}
    assert {key: difference.policy for key, difference in found.items()} == {
        "schedule.train_iters": ResumePolicy.free,
        "optimizer.lr": ResumePolicy.warn,
        "model.num_layers": ResumePolicy.refuse,
        "cluster.gpu": ResumePolicy.free,
    }
    assert (found["cluster.gpu"].saved, found["cluster.gpu"].present) == (GpuKind.auto, GpuKind.none)
    assert str(found["cluster.gpu"]) == "cluster.gpu: auto -> none"
    assert compose.differences(saved, saved) == []


def test_every_key_says_what_a_resume_does_with_it() -> None:
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            assert isinstance(field.metadata.get("resume"), ResumePolicy), f"{section.name}.{field.name}"


def test_every_choice_of_every_group_composes() -> None:
    for name in MODELS:  # bases of families lack sizes
        model_of(name)
    for group, choices in compose.groups().items():
        for choice in [] if group == "model" else choices:
            compose.compose([f"{group}={choice}"])


def test_int8_is_refused_with_the_reason_and_what_works() -> None:
    with pytest.raises(RefusedError, match=r"precision=int8: INT8 training is not to be had.*fp8_delayed"):
        compose.compose(["precision=int8"])
