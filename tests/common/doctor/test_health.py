"""The state of a GPU from a fake NVML and kernel log: errors, links, slowdowns, and values that it does not report."""

from types import SimpleNamespace

import pynvml
import pytest

from common.doctor.health import LoadWatch, count_xids, nvlinks, read_gpu, read_links, read_xids
from common.doctor.reading import Reading
from tests.common.observe.fake_nvml import FakeGpu, FakeNvml


def field(value, code=pynvml.NVML_SUCCESS):
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=value))]


def healthy(**answers):
    """An H200 without faults; ``answers`` replace some of its values."""
    return FakeGpu(
        "00000000:1B:00.0",
        "GPU-a",
        answers={
            "nvmlDeviceGetVbiosVersion": "96.00",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096, used=600_000_000),
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonGpuIdle,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetNvLinkState": lambda link: True,
            "nvmlDeviceGetFieldValues": field(26562),
            **answers,
        },
    )


def state(gpu):
    return read_gpu(FakeNvml(gpu), gpu)


def test_a_healthy_gpu():
    readings = state(healthy())
    expected = {
        "driver_version": "580.159.04",
        "power_limit_w": 700.0,
        "clocks_limited": "none",  # a low clock of an idle GPU is no limit
        "ecc_enabled": True,
        "ecc_uncorrected_volatile": 0,
        "remapping_pending": False,
        "nvlinks_active": 18,
        "memory_used_gb": 0.6,
    }
    assert {name: readings[name].value for name in expected} == expected
    assert readings["nvlink_gbs"].value == pytest.approx(18 * 26.562)
    assert [name for name, reading in readings.items() if reading.value is None] == []


def test_errors_are_counted_by_kind():
    def errors(kind, counter):
        return {(1, 0): 3, (1, 1): 7, (0, 0): 11}[kind, counter]

    readings = state(healthy(nvmlDeviceGetTotalEccErrors=errors, nvmlDeviceGetRemappedRows=(5, 2, 1, 0)))
    assert readings["ecc_uncorrected_volatile"].value == 3
    assert readings["ecc_uncorrected_aggregate"].value == 7
    assert readings["ecc_corrected_volatile"].value == 11
    assert readings["remapped_rows"].value == 2
    assert readings["remapping_pending"].value is True
    assert readings["remapping_failed"].value is False


def test_older_gpus_retire_pages_instead_of_remapping_rows():
    gpu = healthy(nvmlDeviceGetRetiredPagesPendingStatus=1)
    del gpu.answers["nvmlDeviceGetRemappedRows"]
    readings = state(gpu)
    assert readings["remapping_pending"].value is True
    assert readings["remapping_failed"].missing


def refused(code):
    def answer(*arguments):
        raise pynvml.NVMLError(code)

    return answer


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, Reading(missing="this GPU or driver does not report it")),
        (pynvml.NVML_ERROR_NO_PERMISSION, Reading(missing="not permitted")),
        (pynvml.NVML_ERROR_GPU_IS_LOST, Reading(failed="NVML: GPU is lost")),
    ],
)
def test_an_unsupported_query_is_missing_and_a_lost_gpu_is_a_failure(code, expected):
    assert state(healthy(nvmlDeviceGetEccMode=refused(code)))["ecc_enabled"] == expected


def test_clock_limits_before_the_load_are_named():
    reasons = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown | pynvml.nvmlClocksEventReasonHwSlowdown
    readings = state(healthy(nvmlDeviceGetCurrentClocksEventReasons=reasons))
    assert readings["clocks_limited"].value == "hardware slowdown, power brake"


def test_links_that_are_down_are_not_counted():
    gpu = healthy(nvmlDeviceGetNvLinkState=lambda link: link not in (3, 4))
    active, gigabytes = nvlinks(FakeNvml(gpu), gpu)
    assert (active, gigabytes) == (16, pytest.approx(16 * 26.562))


def test_a_gpu_with_fewer_links_than_18():
    def links(link):
        if link >= 12:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return True

    gpu = healthy(nvmlDeviceGetNvLinkState=links)
    assert nvlinks(FakeNvml(gpu), gpu)[0] == 12


def test_a_gpu_without_links_says_so():
    gpu = healthy(nvmlDeviceGetNvLinkState=refused(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert state(gpu)["nvlinks_active"] == Reading(missing="no NVLink here (Not Supported)")


def test_an_unknown_link_speed_is_missing():
    readings = state(healthy(nvmlDeviceGetFieldValues=field(0, pynvml.NVML_ERROR_NOT_SUPPORTED)))
    assert readings["nvlinks_active"].value == 18
    assert readings["nvlink_gbs"].missing


def test_the_pcie_link():
    answers = {
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }
    gpu = healthy(**answers)
    readings = {name: reading.value for name, reading in read_links(FakeNvml(gpu), gpu).items()}
    assert readings == {"pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 8, "pcie_width_max": 16}


KERNEL_LOG = """
[  12.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04
[ 100.5] NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 101.5] NVRM: Xid (PCI:0000:1B:00): 31, pid=4711, name=python3, Ch 00000008, MMU Fault
[ 102.5] NVRM: Xid (PCI:0000:1b:00): 31, pid=4712, name=python3, Ch 00000008, MMU Fault
[ 103.5] NVRM: Xid (PCI:0000:43:00): 48, pid=4711, name=python3, DBE (double bit error)
"""


def test_xids_of_one_gpu_in_the_kernels_log():
    assert count_xids("0000:1b:00.0", KERNEL_LOG) == {79: 1, 31: 2}
    assert count_xids("0000:43:00.0", KERNEL_LOG) == {48: 1}
    assert count_xids("0000:c3:00.0", KERNEL_LOG) == {}


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"journalctl": "cat log", "dmesg": "exit 1"}, (1, 2)),
        ({"journalctl": "true", "dmesg": "cat log"}, (1, 2)),  # without permission, journalctl prints nothing
        ({"dmesg": "cat log"}, (1, 2)),
        ({"journalctl": "cat log; exit 1", "dmesg": "exit 1"}, "the kernel's log may not be read"),
        ({}, "there is neither dmesg nor journalctl"),
    ],
    ids=["journal", "empty journal", "dmesg", "refused", "no program"],
)
def test_xids_are_read_from_the_first_readable_kernel_log(programs, expected, tmp_path, monkeypatch):
    (tmp_path / "log").write_text(KERNEL_LOG)
    for name, script in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\ncd {tmp_path}\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    found = read_xids("0000:1b:00.0")

    if isinstance(expected, str):
        assert {reading.missing for reading in found.values()} == {expected}
    else:
        assert (found["xid_hardware"].value, found["xid_application"].value) == expected


def watch(samples, **answers):
    """Readings after ``samples``, which are pairs of power in W and slowdown reasons."""
    gpu = healthy(**answers)
    watched = LoadWatch(FakeNvml(gpu), gpu)
    for power, reasons in samples:
        gpu.power_mw = power * 1000
        gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"] = reasons
        watched.sample()
    return watched.readings()


CAP, BRAKE = pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown


def test_the_load_is_averaged_without_its_beginning():
    readings = watch([(100, 0), (600, CAP), (700, CAP), (800, CAP | BRAKE)])
    assert readings["load_power_w"].value == 700.0
    assert readings["power_cap_percent"].value == 100.0
    assert readings["hw_slowdown_percent"].value == pytest.approx(100 / 3)
    assert readings["thermal_slowdown_percent"].value == 0.0
    assert readings["load_sm_clock_mhz"].value == 1830.0


def test_a_load_without_samples_is_missing():
    assert watch([])["load_power_w"] == Reading(missing="no sample")


def test_slowdowns_that_the_gpu_does_not_report_are_missing():
    gpu = healthy()
    del gpu.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    watched = LoadWatch(FakeNvml(gpu), gpu)
    watched.sample()
    assert watched.readings()["hw_slowdown_percent"] == Reading(missing="Not Supported")
