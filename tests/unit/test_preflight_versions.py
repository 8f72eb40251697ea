"""What `preflight --versions` says: each part, the version that is known to work, and what a difference means."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest

from shardwright.pretrain import cli, machine, preflight_versions, requirements
from shardwright.pretrain.machine import Gpu, Machine

ROOT = Path(__file__).resolve().parents[2]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def state_of(rows: list[preflight_versions.Row], name: str) -> str:
    (row,) = (row for row in rows if row.name == name)
    return row.state


@pytest.mark.parametrize("feature", [name for name, needs in requirements.REQUIREMENTS.items() if needs.known])
def test_the_known_version_of_a_package_is_the_pinned_one(feature: str) -> None:
    requirement = requirements.REQUIREMENTS[feature]
    pinned = {name.lower().replace("_", "-"): version for name, version in PINNED.items()}
    assert requirement.known == pinned[requirement.distributions[0]]


def test_the_known_nccl_is_the_pinned_one() -> None:
    assert PINNED["nvidia-nccl-cu13"] == preflight_versions._KNOWN_NCCL


def test_what_is_installed_is_listed_as_json_and_suffices_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "detect", lambda: Machine(notes=("NVML: not there",)))
    assert cli.main(["preflight", "--versions", "--json"]) == 0
    rows = [preflight_versions.Row(**row) for row in json.loads(capsys.readouterr().out)]
    assert state_of(rows, "torch") == "known"
    assert state_of(rows, "driver") == "missing"
    for name in ("python", "NCCL", "transformer-engine-torch", "NVIDIA's apex", "Slurm", "Pyxis", "Apptainer"):
        assert state_of(rows, name)


def test_on_gpus_a_missing_transformer_engine_makes_the_machine_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(name="H200", compute_capability=(9, 0), memory_bytes=2**37)
    monkeypatch.setattr(machine, "detect", lambda: Machine(gpus=(gpu,), driver="570.86.15"))
    monkeypatch.setattr(requirements, "version", lambda feature: None)
    rows = preflight_versions.rows()
    assert state_of(rows, "transformer-engine-torch") == "unfit"
    assert state_of(rows, "driver") == "unfit", "CUDA 13 needs a newer one"
    assert state_of(rows, "flash-attn") == "missing"
    assert preflight_versions.run(as_json=True) == 5


@pytest.mark.parametrize(
    ("installed", "state"),
    [("2.11.0", "known"), ("2.11.0+cu130", "known"), ("2.11.0a0+1f2.nv26.02", "other"), ("2.10.0", "other")],
)
def test_another_version_than_the_known_one_is_told(
    monkeypatch: pytest.MonkeyPatch, installed: str, state: str
) -> None:
    monkeypatch.setattr(requirements, "version", lambda feature: installed)
    found = preflight_versions._package("transformer_engine_torch", on_gpus=False)
    assert found.state in ("known", "other")
    assert preflight_versions._compared("torch", installed, "2.11.0", "differs").state == state


def test_a_snapshot_in_nvidia_s_images_counts_as_the_version_to_come() -> None:
    assert requirements.problem("torch", "2.11.0a0+1f2.nv26.02") is None
    assert requirements.problem("torch", "2.10.0a0+b4e4ee81d3.nv25.12") is not None


def test_the_apex_of_the_index_is_told_from_nvidia_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.10.dev0")
    monkeypatch.setattr(requirements, "version", lambda feature: None)
    (row,) = preflight_versions._foreign_apex()
    assert row.installed == "0.9.10.dev0" and "not NVIDIA's" in row.means
    monkeypatch.setattr(requirements, "version", lambda feature: "0.1")
    assert list(preflight_versions._foreign_apex()) == []


def test_the_torch_part_of_transformer_engine_is_there_when_its_compiled_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)  # other tests may hide it
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements.version("transformer_engine_torch") is None
    (tmp_path / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert requirements.version("transformer_engine_torch") == "unknown"


def test_cuda_is_read_from_torch_without_importing_it() -> None:
    assert preflight_versions.cuda_of_torch() in ("13.0", None)


def test_containers_have_the_cuda_that_the_pinned_torch_was_built_with() -> None:
    folder = ROOT / "slurm" / "containers"
    for name in ("Dockerfile", "shardwright.def"):
        text = (folder / name).read_text()
        assert f"nvcr.io/nvidia/cuda:{PINNED['cuda-toolkit']}-cudnn-devel-" in text
        assert "containers/install.sh /opt/shardwright" in text
