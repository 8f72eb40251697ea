"""What a rank checks by itself: InfiniBand in a tree like sysfs, GPUs as NVML tells of them, the disk, what hangs."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.pretrain import preflight_local as local
from shardwright.pretrain.machine import GpuHealth
from shardwright.pretrain.preflight_results import BAD, OK, SKIPPED, WARNING, Finding

WELL = GpuHealth(
    index=3,
    uuid="GPU-3",
    ecc_enabled=True,
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    pcie_generation=5,
    pcie_max_generation=5,
    pcie_width=16,
    pcie_max_width=16,
    throttle_reasons=0x4,
    sm_clock_mhz=1755,
    sm_max_clock_mhz=1980,
)
"""A GPU under load, at its power cap."""


def port(root: Path, hca: str, number: int = 1, *, state: str = "4: ACTIVE", physical: str = "5: LinkUp") -> Path:
    """One port as Linux shows it."""
    folder = root / hca / "ports" / str(number)
    (folder / "counters").mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "phys_state").write_text(f"{physical}\n")
    (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    for counter in local.ERROR_COUNTERS:
        (folder / "counters" / counter).write_text("0\n")
    return folder


def test_active_ports_are_counted_with_their_rate(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    expected = {"ib_active_ports": 2, "ib_gbit_per_second": 800.0}
    assert local.infiniband(tmp_path) == Finding(OK, "2 active, 800 Gbit/s", counts=expected)


def test_a_port_that_is_down_is_a_warning_and_a_node_without_any_active_one_is_bad(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", state="1: DOWN", physical="3: Disabled")
    assert local.infiniband(tmp_path).state == BAD
    port(tmp_path, "mlx5_1")
    found = local.infiniband(tmp_path)
    assert (found.state, found.detail) == (WARNING, "mlx5_0/1 is DOWN, Disabled")
    assert found.counts["ib_active_ports"] == 1


def test_errors_since_boot_are_told_and_errors_during_the_checks_are_bad(tmp_path: Path) -> None:
    counter = port(tmp_path, "mlx5_0") / "counters" / "symbol_error"
    counter.write_text("7\n")
    found = local.infiniband(tmp_path)
    assert (found.state, found.detail) == (WARNING, "mlx5_0/1 symbol_error 7 since boot")
    before = local.counters(tmp_path)
    assert local.grown(before, local.counters(tmp_path)) == Finding(OK)
    counter.write_text("9\n")
    assert local.grown(before, local.counters(tmp_path)) == Finding(BAD, "mlx5_0/1 symbol_error grew by 2")


def test_no_infiniband_is_skipped(tmp_path: Path) -> None:
    assert local.infiniband(tmp_path / "nowhere").state == SKIPPED
    assert local.counters(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({}, OK, "1755 of 1980 MHz"),
        ({"ecc_uncorrected": 2}, BAD, "GPU 3: 2 uncorrected ECC errors"),
        ({"remap_pending": True}, BAD, "remapped"),
        ({"remap_failed": True}, BAD, "could not be remapped"),
        ({"pcie_width": 8}, BAD, "PCIe x8 of x16"),
        ({"throttle_reasons": 0x40}, BAD, "too hot"),
        ({"throttle_reasons": 0x80}, BAD, "power brake"),
        ({"pcie_generation": 1}, WARNING, "PCIe generation 1 of 5"),
        ({"ecc_enabled": False}, WARNING, "ECC is off"),
        ({"ecc_uncorrected": None, "remap_pending": None, "pcie_width": None, "throttle_reasons": None}, OK, "MHz"),
    ],
)
def test_what_nvml_tells_of_a_gpu_is_judged(change: dict[str, Any], state: str, words: str) -> None:
    found = local.gpu_health([replace(WELL, **change)], [])
    assert found.state == state and words in found.detail


def test_fewer_gpus_than_expected_are_bad_and_none_where_nobody_expects_one_is_skipped() -> None:
    assert local.gpus([WELL], [], 8) == Finding(BAD, "1 of 8", counts={"gpus": 1})
    assert local.gpus([], ["NVML: Driver Not Loaded"], 8).detail == "0 of 8; NVML: Driver Not Loaded"
    assert local.gpus([], ["NVML: Driver Not Loaded"], None) == Finding(SKIPPED, "NVML: Driver Not Loaded")
    assert local.gpus([WELL], [], 1).state == OK


def test_an_xid_is_bad() -> None:
    assert local.xids([(2, 79)], watched=True) == Finding(BAD, "GPU 2: XID 79")
    assert (local.xids([], watched=True).state, local.xids([], watched=False).state) == (OK, SKIPPED)


def test_variables_that_tune_are_a_warning_and_no_fault() -> None:
    assert local.environment({"NCCL_PROTO": "LL"}) == Finding(WARNING, "NCCL_PROTO=LL")
    assert local.environment({"NCCL_SOCKET_IFNAME": "ib0"}).state == OK


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    found = local.disk(folder, num_bytes=3 * local.MIB + 1, least_free_bytes=0)
    assert found.state == OK and set(found.rates) == {"disk_write_gb_per_second", "disk_read_gb_per_second"}
    assert not folder.exists()
    assert local.disk(tmp_path, num_bytes=1, least_free_bytes=0).state == OK
    assert [path.name for path in tmp_path.iterdir()] == ["not"]


def test_a_full_or_unusable_disk_is_bad(tmp_path: Path) -> None:
    assert "GiB free" in local.disk(tmp_path, num_bytes=1, least_free_bytes=2**60).detail
    (tmp_path / "file").touch()
    found = local.disk(tmp_path / "file", num_bytes=1, least_free_bytes=0)
    assert found.state == BAD and "file" in found.detail


def test_a_check_that_hangs_is_given_up_and_one_that_fails_fails() -> None:
    with pytest.raises(local.HungError, match=r"0\.01 s"):
        local.bounded(0.01, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        local.bounded(5, lambda: 1 // 0)
    assert local.bounded(5, lambda: 3) == 3
