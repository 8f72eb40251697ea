"""The process around a rank: its variables and cores are set before torch starts, whoever started it."""

import ast
import os
import subprocess
import sys

import pytest

from shardwright.conf.compose import compose
from shardwright.conf.spans import spans
from shardwright.pretrain import machine, process


def test_a_gpu_s_rank_gets_one_queue_and_a_cpu_s_rank_one_thread() -> None:
    assert process.variables(compose([]), "cuda") == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert process.variables(compose([]), "cpu") == {"OMP_NUM_THREADS": "1"}


def test_a_deterministic_rank_gets_the_libraries_switches_too() -> None:
    config = compose(["execution=deterministic"])
    assert process.variables(config, "cuda").items() >= process.DETERMINISTIC.items()


def test_transformer_engine_is_told_what_nvfp4_goes_without() -> None:
    config = compose(["precision=nvfp4", "precision.fp4_stochastic_rounding=false"])
    assert process.variables(config, "cuda").items() >= {"NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1"}.items()
    assert "NVTE_NVFP4_DISABLE_RHT" not in process.variables(config, "cuda")


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    process.prepare(compose([]), "cpu", 0)
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("near", "expected"), [({0}, {0}), ({9999}, None), (set(), None)])
def test_a_rank_keeps_to_the_cores_near_its_gpu_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, near: set[int], expected: set[int] | None
) -> None:
    given: list[set[int]] = []
    monkeypatch.setattr(machine, "cores_near_gpu", lambda local_rank: near)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: given.append(cores))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    process.prepare(compose([]), "cuda", 0)
    process.prepare(compose(["execution.bind_to_gpu=false"]), "cuda", 0)
    assert given == ([] if expected is None else [expected])


def test_the_variables_and_cores_of_a_process_are_told() -> None:
    script = "from shardwright.pretrain import process; print(process.facts('cuda'), process.facts('cpu'), sep=chr(10))"
    environ = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_DEBUG": "WARN", "EDITOR": "vi"}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    facts, on_the_cpu = map(ast.literal_eval, told.stdout.splitlines())
    assert facts["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert facts["NCCL_DEBUG"] == "WARN"
    assert "EDITOR" not in facts
    assert on_the_cpu.keys() <= {"OMP_NUM_THREADS", "cores"}
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
