"""Job scripts: what stands in them, that bash reads them, and that no text of a configuration becomes code."""

import json
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.conf import compose
from shardwright.conf.problems import RefusedError
from shardwright.pretrain import checks_cluster, cli
from shardwright.pretrain.folder import RunFolder
from shardwright.slurm import submit

PRESETS = ("dgx_h100", "dgx_h200", "dgx_b200", "gb200_nvl72", "slurm")
CONTAINERS = (
    (),
    ("cluster.container=pyxis", "cluster.image='nvcr.io#nvidia/pytorch:26.01'", "cluster.mounts=[/data:/data]"),
    ("cluster.container=apptainer", "cluster.image=/images/ours.sif", "cluster.modules=[apptainer]"),
)
SMALL_BATCH = ("data.micro_batch_size=1", "data.global_batch_size=32")
OPTIONS = {
    "run.name": "--job-name",
    "cluster.comment": "--comment",
    "cluster.partition": "--partition",
    "cluster.account": "--account",
    "cluster.constraint": "--constraint",
    "cluster.mail": "--mail-user",
}
"""Key that holds a text -> sbatch's option for it."""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Slurm's programs, which write down how they were called; the real ones: tests/slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, prints in (("sbatch", "42"), ("squeue", ""), ("scancel", "")):
        (folder / name).write_text(
            f"#!{sys.executable}\n"
            "import json, os, sys\n"
            "old = os.umask(0)\n"
            "open(__file__ + '.calls', 'a').write(json.dumps([old, *sys.argv[1:]]) + '\\n')\n"
            f"print({prints!r}, end='')\n"
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def calls(programs: Path, name: str) -> list[list[object]]:
    path = programs / f"{name}.calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def bash_says_of(script: str) -> str:
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


def options_of(script: str) -> dict[str, str]:
    """What sbatch reads: the options before the first line that is no comment, quotes removed as a shell does."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = shlex.split(line.removeprefix("#SBATCH "))[0].partition("=")
            found[name] = value
    return found


@pytest.mark.parametrize("container", CONTAINERS, ids=["bare", "pyxis", "apptainer"])
@pytest.mark.parametrize("preset", PRESETS)
def test_bash_reads_the_script_of_every_preset(preset: str, container: tuple[str, ...]) -> None:
    prepared = submit.prepare([f"cluster={preset}", "cluster.nodes=4", "precision=bf16", *SMALL_BATCH, *container])
    assert bash_says_of(prepared.script) == ""
    options = options_of(prepared.script)
    ranks = prepared.configs[0].world_size // 4
    assert options["--nodes"] == "4"
    assert options["--ntasks-per-node"] == str(ranks)
    assert options["--gres"] == f"gpu:{ranks}"
    assert f"--ntasks={4 * ranks}" in prepared.script, "one task per rank"
    assert "--kill-on-bad-exit=1" in prepared.script


@pytest.mark.parametrize("launcher", ["torchrun", "ft_launcher"])
def test_torchrun_is_one_task_of_each_node_with_the_cores_of_all_its_ranks(launcher: str) -> None:
    two = ["cluster=dgx_h100", "cluster.nodes=2", "precision=bf16", *SMALL_BATCH, f"cluster.launcher={launcher}"]
    script = submit.prepare(two).script
    options = options_of(script)
    assert (options["--ntasks-per-node"], options["--cpus-per-task"], options["--gres"]) == ("1", str(8 * 14), "gpu:8")
    assert f"shardwright.pretrain.node --launcher={launcher} --nodes=2 --ranks=8" in script
    assert ("--kill-on-bad-exit=1" in script) == (launcher == "torchrun"), "else one lost node would end all"


def test_spare_nodes_are_asked_for_beside_those_that_train() -> None:
    more = ["cluster.launcher=ft_launcher", "cluster.spare_nodes=2", "cluster.in_job_restarts=5"]
    script = submit.prepare(["cluster=dgx_h100", "cluster.nodes=4", "precision=bf16", *SMALL_BATCH, *more]).script
    options = options_of(script)
    assert options["--nodes"] == "6" and "--no-kill" in options
    assert "--nodes=4 --ranks=8 --restarts=5" in script


@pytest.mark.parametrize("form", [(), ("cluster.requeue=false", "cluster.chain=3"), ("cluster.exclude=n7",)])
@pytest.mark.parametrize("preset", PRESETS)
def test_shellcheck_finds_nothing_in_the_script_of_any_preset(
    preset: str, form: tuple[str, ...], tmp_path: Path
) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; `make slurm-deps` installs it")
    path = tmp_path / "job.sbatch"
    path.write_text(submit.prepare([f"cluster={preset}", "precision=bf16", *SMALL_BATCH, *form]).script)
    said = subprocess.run([shellcheck, "--severity=warning", path], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


def test_a_chain_is_several_jobs_each_after_the_one_before(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = ["cluster.requeue=false", "cluster.chain=3", f"run.dir={tmp_path / 'run'}", *SMALL_BATCH]
    assert cli.main(["submit", *chain]) == 0
    assert capsys.readouterr().out.count("job 42") == 3
    first, *followers = calls(programs, "sbatch")
    script = str(tmp_path / "run" / "job.sbatch")
    assert first[-1] == script and not [word for word in first if str(word).startswith("--dependency")]
    for call in followers:
        assert {"--dependency=afterany:42", "--kill-on-invalid-dep=yes"} <= set(call) and call[-2:] == [script, "42"]
    assert "--no-requeue" in options_of((tmp_path / "run" / "job.sbatch").read_text())


def test_nodes_that_failed_before_are_left_out_of_what_is_submitted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    submit.prepare([f"run.dir={run}", *SMALL_BATCH]).send()
    RunFolder(run).exclude(["n3"])
    RunFolder(run).exclude(["n9", "n3"])
    assert options_of(submit.prepare([f"run.dir={run}"]).script)["--exclude"] == "n3,n9"
    more = submit.prepare([f"run.dir={run}", "cluster.exclude='n[1-3]'"]).script
    assert options_of(more)["--exclude"] == "n[1-3],n9"


def test_sbatch_is_told_to_signal_the_script_before_the_limit() -> None:
    prepared = submit.prepare(["cluster=slurm", "cluster.signal_seconds=240", *SMALL_BATCH])
    assert options_of(prepared.script)["--signal"] == "B:USR1@240"


@pytest.mark.parametrize(
    "text", ["x$(touch c)", "`touch c`", "a'; touch c; '", 'b"; touch c #', "c\\", "--wrap=touch c"]
)
def test_a_text_of_the_configuration_stays_one_word(text: str) -> None:
    script = submit.prepare([*(compose.override(key, text) for key in OPTIONS), "run.dir=run", *SMALL_BATCH]).script
    assert bash_says_of(script) == ""
    assert {option: options_of(script)[option] for option in OPTIONS.values()} == dict.fromkeys(OPTIONS.values(), text)


def test_a_folder_by_any_name_is_where_the_job_trains(tmp_path: Path) -> None:
    folder = tmp_path / "a 'b' $(touch c) %j"
    prepared = submit.prepare([compose.override("run.dir", str(folder)), *SMALL_BATCH])
    body = prepared.script[prepared.script.index("\nrun=") : prepared.script.index("\nexec")]
    told = subprocess.run(
        ["bash", "-c", body + '\nprintf "%s\\n" "$run" "${overrides[@]}"'], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == [str(folder), compose.override("run.dir", str(folder))]
    assert options_of(prepared.script)["--output"] == f"{folder}/slurm-%j.log".replace(" %j/", " %%j/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


@pytest.mark.parametrize("key", ["run.name", "cluster.comment", "cluster.partition"])
def test_a_text_of_several_lines_is_refused(key: str) -> None:
    with pytest.raises(RefusedError, match="control character"):
        submit.prepare([f'{key}="a\n#SBATCH --uid=0"', *SMALL_BATCH])


def test_a_working_folder_of_several_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a\ntouch c"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(RefusedError, match="control character"):
        submit.prepare([f"run.dir={tmp_path / 'run'}", *SMALL_BATCH])


def test_submitting_freezes_the_run_and_hands_slurm_names_of_variables_alone(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    folder = tmp_path / "run"
    overrides = [f"run.dir={folder}", "cluster.export=[WANDB_API_KEY]", *SMALL_BATCH]
    assert cli.main(["submit", *overrides]) == 0
    assert "job 42" in capsys.readouterr().out
    (call,) = calls(programs, "sbatch")
    assert call[0] == 0o077
    assert call[1:] == ["--parsable", f"--export={options_of((folder / 'job.sbatch').read_text())['--export']}",
                        str(folder / "job.sbatch")]  # fmt: skip
    assert compose.load(folder / "config.yaml").run.dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    written = "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    assert "WANDB_API_KEY" in written and "hunter2" not in written


def test_a_dry_run_prints_plan_and_script_and_touches_nothing(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", "run.dir=run", *SMALL_BATCH, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in out and "weights per rank" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"] and not calls(programs, "sbatch")


def test_a_sweep_is_one_array_with_a_folder_per_point_and_leaves_out_what_is_done(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["run.dir=s", "optimizer.lr=1e-3,2e-3,4e-3,8e-3", *SMALL_BATCH, "cluster.array_limit=2"]
    assert cli.main(["submit", "-m", *sweep]) == 0
    folder = tmp_path / "s_sweep"
    assert bash_says_of((folder / "job.sbatch").read_text()) == ""
    points = json.loads((folder / "sweep.json").read_text())
    assert [point["overrides"] for point in points] == [
        [f"optimizer.lr={lr}"] for lr in ("0.001", "0.002", "0.004", "0.008")
    ]
    rates = [compose.load(Path(point["folder"]) / "config.yaml").optimizer.lr for point in points]
    assert rates == [1e-3, 2e-3, 4e-3, 8e-3]
    assert options_of((folder / "job.sbatch").read_text())["--array"] == "0-3%2"
    (Path(points[1]["folder"]) / "status.json").write_text('{"state": "done"}')
    again = submit.prepare_sweep(sweep)
    assert options_of(again.script)["--array"] == "0,2-3%2"
    capsys.readouterr()
    assert cli.main(["submit", "status", str(folder)]) == 0
    assert "done" in capsys.readouterr().out


def test_a_run_that_lives_goes_on_with_what_is_typed_now(tmp_path: Path) -> None:
    submit.prepare(["run.dir=run", *SMALL_BATCH]).send()
    plain = submit.prepare(["run.dir=run"])
    assert plain.points[0].overrides == [f"run.dir={tmp_path / 'run'}"]
    longer = submit.prepare(["run.dir=run", "cluster.time=8:00:00"])
    assert longer.points[0].overrides == ["cluster.time=8:00:00", f"run.dir={tmp_path / 'run'}"]
    assert (longer.configs[0].data.global_batch_size, options_of(longer.script)["--time"]) == (32, "8:00:00")
    with pytest.raises(RefusedError, match=r"run\.seed"):
        submit.prepare(["run.dir=run", "run.seed=7"])


def test_a_sweep_over_machines_is_refused() -> None:
    with pytest.raises(RefusedError, match="one job array asks for one kind of machine"):
        submit.prepare_sweep(["run.dir=s", "cluster.nodes=1,2", *SMALL_BATCH])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:10", 1810), ("4:00:00", 14400), ("2-00", 172800), ("1-02:03:04", 93784), ("soon", None)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int | None) -> None:
    assert checks_cluster.seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("cluster.time=5", "cluster.time=5: leaves the run no time"),
        ("cluster.time=soon", "cluster.time=soon: must be a time"),
        ("cluster.memory=lots", "cluster.memory=lots"),
        ("cluster.container=pyxis", "cluster.image=null"),
        ("cluster.image=a.sif", "cluster.image=a.sif"),
        ("cluster.export=['A=b']", "without values"),
        ("cluster.export=[ALL]", "cluster.export=ALL"),
        ("cluster.partition=''", "cluster.partition"),
        ("cluster.mounts=['data:data']", "absolute paths"),
        ("cluster.switches=few", "cluster.switches=few"),
        ("cluster.chain=2", "cluster.requeue=false"),
        ("cluster.spare_nodes=1", "cluster.launcher=ft_launcher"),
        ("cluster.in_job_restarts=1", "cluster.launcher=ft_launcher"),
    ],
)
def test_what_slurm_would_refuse_later_is_refused_now(override: str, told: str) -> None:
    with pytest.raises(RefusedError) as caught:
        submit.prepare([override, *SMALL_BATCH])
    assert told in str(caught.value)


def test_tensor_parallelism_over_nodes_is_refused_but_within_a_rack_of_trays() -> None:
    eight = ["cluster.nodes=2", "parallel.tp=8", "model=llama3_8b", "precision=bf16", *SMALL_BATCH]
    assert submit.prepare(["cluster=gb200_nvl72", *eight]).configs[0].world_size == 8
    with pytest.raises(RefusedError, match="has groups across nodes of 4 ranks"):
        submit.prepare(["cluster=dgx_h100", "cluster.gpus_per_node=4", *eight])


def test_variables_that_tune_or_debug_are_warned_about_and_not_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    setup = "cluster.setup=['export NCCL_ALGO=Ring NCCL_SOCKET_IFNAME=ib0']"
    words = ("submit", "--dry-run", "cluster=slurm", *SMALL_BATCH, "cluster.export=[NCCL_DEBUG,WANDB_API_KEY]", setup)
    assert cli.main(words) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [warning.split(": ")[1:3] for warning in warnings] == [
        ["cluster.export", "NCCL_DEBUG=INFO"],
        ["cluster.setup", "NCCL_ALGO=Ring"],
    ]
