"""The machine is looked at through NVML and package metadata; whatever is missing or denied is None and a note."""

from collections.abc import Callable
from importlib import metadata, util
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from shardwright.pretrain import machine, requirements
from shardwright.pretrain.machine import Gpu

UUIDS = ("GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """An NVML with three GPUs; called with a query's name, that query is denied."""

    def query(answer: Callable[..., Any], name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if name in denied:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
            return answer(*arguments)

        ask.__name__ = name
        return ask

    denied: set[str] = set()
    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetUUID": lambda handle: UUIDS[int(handle[-1])],
        "nvmlDeviceGetName": lambda handle: f"NVIDIA GPU {handle[-1]}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, int(handle[-1])),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=1024),
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1000 * int(handle[-1]) + kind,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 40 + int(handle[-1]),
        "nvmlDeviceGetPowerUsage": lambda handle: 690_000,
        "nvmlDeviceGetCpuAffinityWithinScope": lambda handle, num_words, scope: [0b1100 << int(handle[-1]), 1],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, query(answer, name))
    return lambda name: denied.add(name)


def visible(selection: str | None) -> list[str | None]:
    found = machine.detect({} if selection is None else {"CUDA_VISIBLE_DEVICES": selection})
    return [gpu.name and gpu.name[-1] for gpu in found.gpus]


def test_gpus_are_described(nvml: Callable[..., None]) -> None:
    found = machine.detect({})
    assert found.gpus[1] == Gpu(name="NVIDIA GPU 1", compute_capability=(9, 1), memory_bytes=1024)
    assert (len(found.gpus), found.driver, found.notes) == (3, "580.1", ())


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("GPU-cccc3333", ["2"]),
        ("GPU-c, 1", ["2", "1"]),
        ("GPU-aa", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    nvml: Callable[..., None], selection: str | None, expected: list[str]
) -> None:
    assert visible(selection) == expected


def test_without_nvml_there_are_no_gpus_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    found = machine.detect({})
    assert found.gpus == ()
    assert found.notes == ("NVML: NVML Shared Library Not Found",)


def test_a_denied_query_costs_its_own_field_alone_and_one_note(nvml: Callable[..., None]) -> None:
    nvml("nvmlDeviceGetMemoryInfo")
    found = machine.detect({})
    assert [gpu.memory_bytes for gpu in found.gpus] == [None] * 3
    assert [gpu.compute_capability for gpu in found.gpus] == [(9, 0), (9, 1), (9, 2)]
    (note,) = found.notes
    assert "DeviceGetMemoryInfo" in note and "Permission" in note


def test_a_requirement_is_met_by_version_and_refused_with_the_way_to_install_it() -> None:
    assert requirements.problem("torch", "2.11.0+cu130") is None
    assert requirements.problem("torch", "unknown") is None
    assert "pip install torch" in str(requirements.problem("torch", None))
    assert "torch=2.4.1: torch 2.11 or newer is needed" in str(requirements.problem("torch", "2.4.1"))


def test_a_package_is_looked_up_by_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda distribution: "9.9")
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert requirements.version("transformer_engine") is None
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    assert requirements.version("transformer_engine") == "9.9"


def test_the_state_of_a_rank_s_gpu_is_read(nvml: Callable[..., None]) -> None:
    nvml("nvmlDeviceGetTemperature")
    assert machine.gpu_state(1, {"CUDA_VISIBLE_DEVICES": "0,2"}) == {
        "sm_clock_mhz": 2000 + pynvml.NVML_CLOCK_SM,
        "memory_clock_mhz": 2000 + pynvml.NVML_CLOCK_MEM,
        "temperature_celsius": None,
        "power_watts": 690.0,
    }
    assert set(machine.gpu_state(7, {}).values()) == {None}, "NVML shows no such GPU"


def test_cores_near_a_gpu_are_those_of_the_local_rank_s(nvml: Callable[..., None]) -> None:
    assert machine.cores_near_gpu(0, {}) == {2, 3, 64}
    assert machine.cores_near_gpu(0, {"CUDA_VISIBLE_DEVICES": "2"}) == {4, 5, 64}
    nvml("nvmlDeviceGetCpuAffinityWithinScope")
    assert machine.cores_near_gpu(0, {}) == set()


def test_the_health_of_every_visible_gpu_is_read(nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetRemappedRows": (2, 1, 1, 0),
        "nvmlDeviceGetCurrPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
        "nvmlDeviceGetMaxClockInfo": 1980,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *arguments, answer=answer: answer)

    def denied(*arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    denied.__name__ = "nvmlDeviceGetTotalEccErrors"
    monkeypatch.setattr(pynvml, denied.__name__, denied)
    found, notes = machine.gpu_health({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(0, UUIDS[2]), (1, UUIDS[0])]
    gpu = found[0]
    assert (gpu.ecc_uncorrected, gpu.remap_pending, gpu.remap_failed) == (None, True, False)
    assert (gpu.pcie_generation, gpu.pcie_max_generation, gpu.pcie_width, gpu.pcie_max_width) == (4, 5, 8, 16)
    assert (gpu.sm_clock_mhz, gpu.sm_max_clock_mhz) == (2000 + pynvml.NVML_CLOCK_SM, 1980)
    assert len([note for note in notes if "TotalEccErrors" in note]) == 1


def test_xids_that_come_while_somebody_listens_are_told(
    nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [SimpleNamespace(device="handle 2", eventData=79), SimpleNamespace(device="handle 1", eventData=31)]

    def wait(events: str, milliseconds: int) -> SimpleNamespace:
        if not waiting:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return waiting.pop(0)

    freed: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", lambda: "events")
    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", lambda handle, kind, events: None)
    monkeypatch.setattr(pynvml, "nvmlEventSetWait", wait)
    monkeypatch.setattr(pynvml, "nvmlEventSetFree", freed.append)
    with machine.watch_xids({"CUDA_VISIBLE_DEVICES": "0,2"}) as came:
        assert came() == [(1, 79)], "the other GPU is none of ours"
        assert came() == []
    assert freed == ["events"]


def test_without_nvidia_ml_py_there_are_no_gpus_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "pynvml", None)
    assert machine.detect({}).notes == ("NVML: the package nvidia-ml-py is not installed",)
    assert machine.gpu_health({}) == ([], ["NVML: the package nvidia-ml-py is not installed"])
    with machine.watch_xids({}) as came:
        assert came() == []
    assert set(machine.gpu_state(0, {}).values()) == {None}
