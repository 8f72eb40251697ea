"""The command line: names each command, and loads what it needs when it is called.

Every command takes Hydra overrides as they stand (`GROUP=CHOICE`, `section.key=value`). Exit codes: 0 done, 1
unforeseen, 2 refused with one message and no traceback; what a run itself ends with comes from `train`.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shardwright.conf import compose
from shardwright.conf.problems import Problem, RefusedError, refuse
from shardwright.conf.schema import Config

WIDTH = 96
"""Columns of help texts and of a plan that is not written to a terminal."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what `--help` says of it, its options, and the function behind it."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        name, rest = _command(arguments)
        command = COMMANDS[name]
        parser = _parser(f"shardwright {name}", description=command.summary)
        command.add_options(parser)
        return command.run(parser.parse_intermixed_args(rest))
    except RefusedError as error:
        print(_wrapped(str(error)) if sys.stderr.isatty() else error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `shardwright plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def train(options: argparse.Namespace) -> int:
    """Train here; with `-m` every point of a sweep, one after another."""
    if options.multirun:
        from shardwright.pretrain import sweep

        if options.cfg:
            return _print_config(*sweep.expand(options.overrides))
        return sweep.run(options.overrides, dry_run=options.dry_run)
    if options.cfg:
        return _print_config(options.overrides)
    from shardwright.pretrain import train

    return train.train(options.overrides, dry_run=options.dry_run)


def plan(options: argparse.Namespace) -> int:
    """Judge a configuration by all config rules and print what it amounts to."""
    from shardwright.pretrain import checks

    if options.cfg:
        return _print_config(options.overrides)
    try:
        config = compose.compose(options.overrides)
    except RefusedError as error:
        raise compose.complete(error, options.overrides, checks.config_problems) from None
    refuse(checks.config_problems(config))
    if options.plot:
        from shardwright.pretrain import plot

        plot.write(config, Path(options.plot))
    _print_plan(config, as_json=options.json)
    return 0


def submit(options: argparse.Namespace) -> int:
    """Put a run or a sweep into Slurm's queue; or say how it stands there, or cancel it."""
    from shardwright.pretrain import terminal
    from shardwright.slurm import submit, watch

    console = terminal.console(WIDTH)
    if options.overrides and options.overrides[0] in ("status", "cancel"):
        what, *folders = options.overrides
        if not folders:
            raise RefusedError([Problem(key=what, rule="needs the folder of a run or of a sweep")])
        for folder in (Path(name).absolute() for name in folders):
            if what == "status":
                console.print(watch.status(folder))
            else:
                print("\n".join(watch.cancel(folder, now=options.now)))
        return 0
    prepared = (submit.prepare_sweep if options.multirun else submit.prepare)(options.overrides)
    for warning in prepared.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.dry_run:
        _print_plan(prepared.configs[0], as_json=False)
        print(prepared.script, end="")
        return 0
    job, *followers = prepared.send()
    print(f"job {job} in {prepared.folder}")
    for follower in followers:
        print(f"job {follower} after it")
    for row in prepared.table:
        print(f"  {job}_{row['index']}  {' '.join(row['overrides'])}")
    return 0


def explain(options: argparse.Namespace) -> int:
    """Tell the story of a run from its folder."""
    from shardwright.pretrain import decision, explain

    if options.verdict is not None:
        return decision.decide(Path(options.run), options.verdict, told=options.told, after=options.after)
    return explain.run(Path(options.run), as_json=options.json)


def fp8(options: argparse.Namespace) -> int:
    """Show what a run's narrow format did to its layers."""
    from shardwright.pretrain import fp8_report

    html = Path(options.html) if options.html else None
    return fp8_report.run(Path(options.run), html=html, as_json=options.json, show=print)


def preflight(options: argparse.Namespace) -> int:
    """Say whether this machine, or every node of a job step, is fit to train; or what is installed."""
    if options.versions:
        from shardwright.pretrain import preflight_versions

        return preflight_versions.run(as_json=options.json)
    from shardwright.pretrain import preflight

    how = preflight.Options(
        folder=Path(options.folder),
        gpus=options.gpus,
        baseline=Path(options.baseline) if options.baseline else None,
        write_baseline=Path(options.write_baseline) if options.write_baseline else None,
        report=Path(options.report) if options.report else None,
        fraction=options.fraction,
        timeout_seconds=options.timeout,
        group_timeout_seconds=options.group_timeout,
        disk_bytes=options.disk_mib * 2**20,
        least_free_bytes=options.free_gib * 2**30,
        as_json=options.json,
    )
    return preflight.run(how)


def bench(options: argparse.Namespace) -> int:
    """Measure the speed of the training step, or of saving."""
    from shardwright.pretrain import bench

    how = bench.Options(
        against=options.against,
        rounds=options.rounds,
        warmup=options.warmup,
        steps=options.steps,
        trace=str(Path(options.trace).absolute()) if options.trace else None,
        as_json=options.json,
    )
    if options.what == "checkpoint":
        return bench.bench_saving(options.overrides, how)
    return bench.bench_step(options.overrides, how, multirun=options.multirun)


def checkpoint(options: argparse.Namespace) -> int:
    """Look at checkpoints without loading them, cut them anew, or exchange their weights with others."""
    from shardwright.pretrain import checkpoint_report as report

    path = Path(options.path)
    if options.what in ("export", "import", "reshard"):
        return _exchange(options, path)
    refuse(_too_many(options.rest))
    if options.what == "list":
        return report.show_list(path, as_json=options.json, show=print)
    show = report.show_one if options.what == "inspect" else report.show_verified
    return show(path, options.step, as_json=options.json, show=print)


def _exchange(options: argparse.Namespace, path: Path) -> int:
    from shardwright.pretrain import checkpoint_exchange, checkpoint_reshard
    from shardwright.pretrain.faults import DamagedError

    if not options.rest:
        raise RefusedError(
            [Problem(key="TARGET", rule="is missing", remedy=f"checkpoint {options.what} {path} TARGET")]
        )
    target, *overrides = options.rest
    if options.what == "import":
        print(f"{path} -> {checkpoint_exchange.import_(path, Path(target), overrides)}")
        return 0
    try:
        if options.what == "reshard":
            print(f"{path} -> {checkpoint_reshard.reshard(path, Path(target), options.step, overrides)}")
            return 0
        refuse(_too_many(overrides))
        print(f"{checkpoint_exchange.export(path, Path(target), options.step)} -> {target}")
    except DamagedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _too_many(words: Sequence[str]) -> list[Problem]:
    return [Problem(key="argument", value=word, rule="nothing takes it") for word in words]


def completion(options: argparse.Namespace) -> int:
    """Print the completion script of a shell, or answer its query."""
    from shardwright.pretrain import completion

    if options.query:
        print("\n".join(completion.complete(os.environ.get("COMP_LINE", ""), COMMANDS)))
    else:
        print(completion.script(options.shell))
    return 0


def _print_config(*points: Sequence[str]) -> int:
    """The configuration of each point, as YAML documents."""
    print("---\n".join(compose.dump(compose.compose(overrides)) for overrides in points), end="")
    return 0


def _wrapped(text: str) -> str:
    """Long lines broken for a terminal, the rest of an item indented below it."""
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _print_plan(config: Config, *, as_json: bool) -> None:
    from shardwright.pretrain import plan, plan_table, terminal

    planned = plan.make_plan(config)
    if as_json:
        print(json.dumps(plan.as_json(planned), indent=2))
    else:
        plan_table.show(planned, terminal.console(WIDTH))


# ---- the parsers -----------------------------------------------------------------------------------------------------


def _command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name and its own arguments; prints and leaves where there is none."""
    summaries = "\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items())
    parser = _parser("shardwright", description="Pretrains language models on megatron-core.")
    parser.usage = "shardwright COMMAND [OVERRIDES]"
    parser.epilog = f"commands:\n{summaries}\n\n`shardwright COMMAND --help` says more."
    parser.add_argument("--version", action="version", version=f"shardwright {_version()}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(arguments)
        parser.print_help()
        raise SystemExit(0 if not arguments else 2)
    name = arguments[0]
    if name not in COMMANDS:
        remedy = compose.did_you_mean(name, list(COMMANDS)) or f"the commands are {', '.join(COMMANDS)}"
        raise RefusedError([Problem(key="command", value=name, rule="there is no such command", remedy=remedy)])
    return name, arguments[1:]


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, width=WIDTH, max_help_position=22)

    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False)


def _train_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("-m", "--multirun", action="store_true", help="run every point of a sweep, one after another")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, touch nothing")
    parser.epilog = _overrides_help(
        {
            "two ranks on two CPU cores": "shardwright train experiment=quickstart",
            "the same run, continued for longer": "shardwright train experiment=quickstart schedule.train_iters=300",
            "three learning rates": "shardwright train -m experiment=quickstart optimizer.lr=3e-4,1e-3,3e-3",
            "on eight GPUs": "shardwright train model=llama3_1b precision=bf16 cluster=dgx_h100 "
            "data.seq_length=4096 data.micro_batch_size=2 data.global_batch_size=64",
        }
    )


def _submit_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "shardwright submit [OVERRIDES] [-m] [--dry-run]\n       shardwright submit status|cancel FOLDER..."
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="GROUP=CHOICE or section.key=value")
    parser.add_argument("-m", "--multirun", action="store_true", help="every point of a sweep, as one job array")
    parser.add_argument("--dry-run", action="store_true", help="print plan and job script, touch nothing")
    parser.add_argument("--now", action="store_true", help="cancel: without the time to save")
    parser.epilog = _overrides_help(
        {
            "four nodes of 8 H100": "shardwright submit model=llama3_8b cluster=dgx_h100 cluster.nodes=4 "
            "parallel.tp=4 parallel.sp=true precision=fp8_delayed data.seq_length=8192 "
            "data.micro_batch_size=1 data.global_batch_size=128",
            "three learning rates, two at a time": "shardwright submit -m experiment=quickstart "
            "optimizer.lr=3e-4,1e-3,3e-3 cluster.array_limit=2",
            "how they stand": "shardwright submit status runs/quickstart_sweep",
        }
    )


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--verdict", metavar="CODE", help=argparse.SUPPRESS)
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--after", metavar="JOB", help=argparse.SUPPRESS)


def _fp8_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--html", metavar="FILE.html", help="draw heat maps, layers against steps")
    parser.add_argument("--json", action="store_true", help="print the worst operands as JSON")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, with every rank's place")
    parser.add_argument("--plot", metavar="FILE.html", help="draw learning rate, weight decay and batch size")
    parser.epilog = _overrides_help(
        {
            "16 nodes of 8 H200": "shardwright plan model=llama3_8b cluster=dgx_h200 cluster.nodes=16 "
            "parallel.tp=4 parallel.sp=true precision=fp8_delayed data.seq_length=8192 "
            "data.micro_batch_size=1 data.global_batch_size=256",
        }
    )


def _preflight_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", metavar="DIR", help="disk to test, as the run's folder (.)")
    parser.add_argument("--gpus", type=_at_least(0), metavar="N", help="GPUs that every node must show")
    parser.add_argument("--baseline", metavar="FILE", help="what a fit node of this site reaches")
    parser.add_argument("--write-baseline", metavar="FILE", help="write what was reached, if all are fit")
    parser.add_argument(
        "--fraction", type=_share, default=0.8, metavar="F", help="of baseline and median, at least (0.8)"
    )
    parser.add_argument("--timeout", type=_at_least(1), default=120, metavar="S", help="for a node to answer (120 s)")
    parser.add_argument(
        "--group-timeout", type=_at_least(1), default=60, metavar="S", help="for a test of ranks (60 s)"
    )
    parser.add_argument("--disk-mib", type=_at_least(1), default=64, metavar="N", help="MiB to write and read (64)")
    parser.add_argument("--free-gib", type=_at_least(0), default=1, metavar="N", help="GiB that must be free (1)")
    parser.add_argument("--report", metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--versions", action="store_true", help="say what is installed and what it means, and leave")
    parser.epilog = """\
examples:
  # this machine
  shardwright preflight --folder runs
  # every node of an allocation, a task per GPU; one that does not answer is named
  srun --kill-on-bad-exit=0 --wait=0 shardwright preflight --report preflight.json
  # what a node that is well reaches, to be judged against
  srun shardwright preflight --write-baseline baseline.json

exit codes: 0 fit, 2 refused, 5 not fit: a bad node, a missing one, a package that every run needs"""


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=["step", "checkpoint"], help="the training step, or saving, on random tokens and own ranks"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="GROUP=CHOICE or section.key=value")
    parser.add_argument(
        "--against", choices=["bare"], help="compare with a bare megatron-core loop: ours, it, it, ours"
    )
    parser.add_argument("--rounds", type=_at_least(1), default=1, metavar="N", help="with --against: N times that (1)")
    parser.add_argument("-m", "--multirun", action="store_true", help="measure every point of a sweep")
    parser.add_argument("--warmup", type=_at_least(0), default=5, metavar="N", help="steps before, not timed (5)")
    parser.add_argument("--steps", type=_at_least(1), default=20, metavar="N", help="timed steps (20)")
    parser.add_argument("--trace", metavar="FILE.json.gz", help="trace one more step with torch's profiler")
    parser.add_argument("--json", action="store_true", help="print everything that was measured as JSON")
    parser.epilog = _overrides_help(
        {
            "two ranks on two CPU cores": "shardwright bench step experiment=bench_quickstart --against bare",
            "one H200": "shardwright bench step experiment=bench_8b_16l precision=fp8_delayed --against bare",
            "what FP8 gains": "shardwright bench step -m experiment=bench_8b_16l precision=bf16,fp8_delayed",
        }
    )


def _checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["list", "inspect", "verify", "reshard", "export", "import"],
        help="verify digests every byte, reshard cuts into files for another layout",
    )
    parser.add_argument("path", metavar="PATH", help="a run's folder, its checkpoints' folder, or one checkpoint")
    parser.add_argument("rest", nargs="*", metavar="TARGET", help="reshard, export, import: new folder, and OVERRIDES")
    parser.add_argument("--step", type=int, metavar="N", help="inspect, verify, reshard or export this step alone")
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.epilog = """\
in files for another layout, whose rules are judged here (every layout loads it as it is, too):
  shardwright checkpoint reshard RUN NEW_FOLDER parallel.tp=4 cluster.ranks=16

to and from Hugging Face's safetensors, and from Megatron-LM with checkpoint.trusted=true:
  shardwright checkpoint export RUN NEW_FOLDER
  shardwright checkpoint import THEIR_FOLDER NEW_FOLDER model=llama3_1b precision=bf16
  shardwright train checkpoint.load=NEW_FOLDER model=llama3_1b ...

exit codes: 0 all that was looked at is well, 2 there is no checkpoint, 4 it is damaged"""


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return float(text)


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="GROUP=CHOICE or section.key=value")
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and leave")


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="prints the script that this shell evaluates")
    parser.add_argument("--query", action="store_true", help=argparse.SUPPRESS)
    parser.epilog = 'add to ~/.bashrc or ~/.zshrc:  eval "$(shardwright completion bash)"   (zsh for zsh)\n'
    parser.epilog += "in fish:                       shardwright completion fish | source"


def _overrides_help(examples: Mapping[str, str]) -> str:
    """Groups with their choices, and examples."""
    lines = ["config groups and their choices (GROUP=CHOICE):"]
    for group, choices in compose.groups().items():
        lines += textwrap.wrap(", ".join(choices), WIDTH, initial_indent=f"  {group:<13}", subsequent_indent=" " * 15)
    lines += [
        "",
        "every key of a section can be set too (section.key=value); `--cfg job` lists them all",
        "",
        "examples:",
    ]
    for what, command in examples.items():
        lines += [f"  # {what}", *textwrap.wrap(command, WIDTH - 4, initial_indent="  ", subsequent_indent="      ")]
    return "\n".join(lines)


def _version() -> str:
    try:
        return metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        return "(a source tree, not installed)"


COMMANDS = {
    "train": Command("Train here: starts its own ranks, or is a rank of torchrun or srun.", _train_options, train),
    "plan": Command("Print layout, sizes and FLOPs of a configuration, on any machine.", _plan_options, plan),
    "submit": Command("Put a run or a sweep into Slurm's queue, and return.", _submit_options, submit),
    "explain": Command(
        "Tell the story of a run: attempts, steps lost, what the time went into.", _explain_options, explain
    ),
    "fp8": Command("Show what FP8 did to each layer: the worst operands, heat maps over steps.", _fp8_options, fp8),
    "preflight": Command(
        "Say whether this machine, or every node of a job step, is fit to train.", _preflight_options, preflight
    ),
    "bench": Command("Measure the speed of the training step, also against bare megatron-core.", _bench_options, bench),
    "checkpoint": Command("List, verify, reshard, export, import checkpoints.", _checkpoint_options, checkpoint),
    "completion": Command("Print the completion script of a shell.", _completion_options, completion),
}
"""All commands, in the order of `--help`."""
