"""Readings of a machine from folders in place of /sys and /proc."""

import math
import os
import resource

import pytest

from common.distributed.environment import node_name
from common.doctor import host
from common.doctor.reading import Reading


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def sysfs(tmp_path):
    """Two InfiniBand adapters of which one port is down, two NUMA nodes, two governors, and 2 cores of 2 CPUs."""
    root = tmp_path / "sys"
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec (4X)")):
        write(root / f"class/infiniband/{name}/ports/1/state", state + "\n")
        write(root / f"class/infiniband/{name}/ports/1/rate", rate + "\n")
    for node in range(2):
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        write(root / f"devices/system/cpu/cpu{node}/cpufreq/scaling_governor", ("performance", "powersave")[node])
    for cpu in range(4):
        write(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    write(root / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    return root


@pytest.fixture
def proc(tmp_path):
    root = tmp_path / "proc"
    write(root / "meminfo", "MemTotal:       2000000 kB\nMemAvailable:   1000000 kB\nHugePages_Total:      16\n")
    write(root / "cpuinfo", "processor\t: 0\nmodel name\t: A Processor 9000\n")
    return root


def test_the_machine_is_read(sysfs, proc):
    readings = host.read_node({0, 1, 3}, sysfs, proc)
    expected = {
        "cpu_model": "A Processor 9000",
        "cores_allowed": 3,
        "physical_cores_allowed": 2,
        "numa_nodes": 2,
        "cpu_governor": "performance, powersave",
        "memory_gb": 2.048,
        "memory_free_gb": 1.024,
        "hugepages": 16,
        "transparent_hugepages": "madvise",
        "infiniband_active": 1,
        "infiniband_gbits": 400.0,
        "infiniband_ports": "mlx5_0:1 400 Gbit/s, mlx5_1:1 10 Gbit/s",
    }
    assert {name: readings[name].value for name in expected} == expected


def test_missing_files_are_missing_readings(tmp_path):
    readings = host.read_node({0}, tmp_path, tmp_path)
    assert readings["infiniband_active"] == Reading(missing="no InfiniBand here")
    assert readings["cpu_governor"].missing
    assert readings["transparent_hugepages"].missing
    assert readings["memory_gb"].missing
    assert [name for name, reading in readings.items() if reading.failed] == []


def test_limits_of_the_user_are_the_systems(sysfs, proc):
    readings = host.read_node({0}, sysfs, proc)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert readings["open_files"].value == (math.inf if soft == resource.RLIM_INFINITY else soft)
    assert readings["kernel_version"].value == os.uname().release


def test_slurms_name_of_a_node_comes_first():
    assert node_name({"SLURMD_NODENAME": "n2"}) == "n2"
    assert node_name({}) == os.uname().nodename


def test_host_memory_bandwidth_is_plausible():
    assert 0 < host.host_memory_bandwidth(0.01) < 10_000


@pytest.mark.parametrize(
    ("reading", "entry"),
    [
        (Reading(1.5), 1.5),
        (Reading(False), False),
        (Reading("madvise"), "madvise"),
        (Reading(math.inf), "unlimited"),
        (Reading(missing="not permitted"), {"missing": "not permitted"}),
        (Reading(failed="Input/output error"), {"failed": "Input/output error"}),
    ],
)
def test_a_reading_survives_json(reading, entry):
    assert reading.to_json() == entry
    assert Reading.from_json(entry) == reading
