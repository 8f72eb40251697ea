"""The command line as a user meets it: what it prints, where, and with which exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.pretrain import checks, cli

ON_CPU = ("experiment=quickstart", "parallel.tp=1", "parallel.sp=false", "cluster.ranks=1")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> str:
    """What a command prints to stdout, or to stderr where it is refused."""
    assert cli.main(arguments) == exit_code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return err if exit_code == 2 else out


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_program_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        text = help_of(capsys, *arguments)
        for command in cli.COMMANDS:
            assert re.search(rf"^  {command} +[A-Z]", text, re.MULTILINE)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(capsys, "--version").startswith("shardwright ")


def test_help_lists_every_group_with_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "train", "--help")
    for group, choices in compose.groups().items():
        assert re.search(rf"^  {group}\s+{r',\s+'.join(choices)}$", text, re.MULTILINE)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_is_readable_at_100_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, help_of(capsys, command, "--help").splitlines())) <= 100


@pytest.mark.parametrize("command", ["train", "plan", "bench"])
def test_every_example_of_the_help_breaks_no_rule(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\n {6,}", " ", help_of(capsys, command, "--help"))
    examples = re.findall(rf"^  shardwright {command} (.*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        overrides = [re.sub(r",.*", "", word) for word in shlex.split(example) if "=" in word]
        assert checks.config_problems(compose.compose(overrides)) == []


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean train?" in printed(capsys, "trian", exit_code=2)


def test_the_composed_config_is_printed_and_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("train", "plan"):
        frozen = tmp_path / command
        frozen.write_text(printed(capsys, command, "optimizer.lr=2e-3", "--cfg", "job"))
        assert compose.load(frozen) == compose.compose(["optimizer.lr=2e-3"])


def test_a_plan_shows_layout_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "model=llama3_8b", "data.seq_length=8192", "parallel.tp=2", "cluster.ranks=4")
    for words in ("8,030,261,248", "51.47 GFLOP", "TP 2, PP 1, DP 2"):
        assert words in text


def test_a_plan_of_any_world_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "cluster.nodes=1000", "cluster.gpus_per_node=8", "data.global_batch_size=32000")
    assert "7992-7999" in text and "…" in text
    assert len(text.splitlines()) < 50


def test_a_plan_as_json_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "plan", "--json", "experiment=quickstart"))
    assert found["layout"]["tp"] == 2
    assert [place["tp"] for place in found["layout"]["rank_map"]] == [0, 1]


def test_a_broken_rule_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan"], ["train", "--dry-run"]):
        message = printed(capsys, *command, "schedule.lr_warmup_iter=3", "+optimizer.rate=1", exit_code=2)
        assert message.startswith("refused: 2 problems\n")
        assert "parallel.tp=3" in printed(capsys, *command, "parallel.tp=3", exit_code=2)


def test_options_and_overrides_may_stand_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, "train", "--dry-run", *ON_CPU)
    assert printed(capsys, "train", ON_CPU[0], "--dry-run", *ON_CPU[1:]) == first


def test_a_dry_run_shows_the_plan_and_touches_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "1,049,728" in printed(capsys, "train", "--dry-run", *ON_CPU)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_judges_the_machine_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overrides = ("cluster.gpu=h200", "cluster.nodes=2", "data.global_batch_size=16")
    message = printed(capsys, "train", "--dry-run", *overrides, exit_code=2)
    assert "cluster.gpu=h200: this machine shows no GPU" in message
    assert "torchrun or srun" in message
    printed(capsys, "plan", *overrides)


def test_a_benchmark_is_judged_before_any_rank(capsys: pytest.CaptureFixture[str]) -> None:
    message = printed(capsys, "bench", "step", "experiment=bench_quickstart", "parallel.tp=3", exit_code=2)
    assert message.startswith("refused:") and "parallel.tp=3" in message


def test_a_benchmark_inside_of_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun" in printed(capsys, "bench", "step", "experiment=bench_quickstart", exit_code=2)


def test_a_benchmark_of_no_step_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "step", "--steps=0"])
    assert caught.value.code == 2


def test_ctrl_c_leaves_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(overrides: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compose, "compose", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_planning_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from shardwright.pretrain import cli; cli.main(['plan', '--json']); "
        "from shardwright.pretrain import machine, sweep, completion; machine.detect(); "
        "sys.exit(1 if {'torch', 'megatron.core', 'transformer_engine'} & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_refusal_of_the_installed_program_has_no_traceback() -> None:
    command = [sys.executable, "-m", "shardwright.pretrain", "plan", "model=lama"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 2 and "did you mean llama?" in result.stderr


# ---- completion ------------------------------------------------------------------------------------------------------


def completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    return printed(capsys, "completion", "bash", "--query").split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "shardwright ",
            ["train", "plan", "submit", "explain", "fp8", "preflight", "bench", "checkpoint", "completion"],
        ),
        ("shardwright tr", ["train"]),
        ("shardwright train model=", [f"model={choice}" for choice in compose.groups()["model"]]),
        ("shardwright plan --json +model=llama3_8", ["+model=llama3_8b"]),
        ("shardwright train parallel.t", ["parallel.tp="]),
        ("shardwright train parallel.", [f"{key}=" for key in sorted(compose.schema_keys()) if "parallel." in key]),
        ("shardwright train experiment=quickstart parallel.tp=", ["parallel.tp=2"]),
        ("shardwright train --d", ["--dry-run"]),
        ("shardwright completion z", ["zsh"]),
        ("shardwright bench ", ["step"]),
        ("shardwright bench step --against bare experiment=bench_8", ["experiment=bench_8b_16l"]),
        ("shardwright bench step --w", ["--warmup"]),
        ("shardwright train model=lama parallel.t", []),
    ],
)
def test_completion_offers_what_may_follow(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(capsys, monkeypatch, line) == expected


def test_completion_offers_every_group_and_nothing_of_hydra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = completed(capsys, monkeypatch, "shardwright train ")
    assert {f"{group}=" for group in compose.groups()} <= set(offered)
    assert not [word for word in offered if word.startswith("hydra")]


def test_bash_completes_through_the_script(tmp_path: Path) -> None:
    program = tmp_path / "shardwright"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwright.pretrain "$@"\n')
    program.chmod(0o755)
    ask = (
        'eval "$(shardwright completion bash)"; COMP_LINE="shardwright train model=mixtral"; COMP_POINT=${#COMP_LINE}; '
        "COMP_WORDS=($COMP_LINE); COMP_CWORD=2; compopt() { :; }; _shardwright; echo ${COMPREPLY[@]}"
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", ask], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["model=mixtral", "model=mixtral_8x22b", "model=mixtral_8x7b"]
