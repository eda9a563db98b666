"""System files of ``doctor --write-system``."""

import pytest

from common.config.system import Link
from common.doctor.findings import MeasuredUnit
from common.doctor.limits import load_system
from common.doctor.reading import Reading
from common.doctor.system_file import DEFAULTS, NODE_HOP_US, hardware_section, write_system
from common.errors import ConfigError, SuiteError
from common.planning.collectives import RankGroup, all_reduce


def gpu(number, bf16=660.0):
    readings = {
        "matrix_bf16_tflops": bf16, "matrix_fp16_tflops": 640.0, "memory_gb": 150.1, "memory_copy_gbs": 4250.0,
        "power_limit_w": 700,
    }  # fmt: skip
    found = {name: Reading(value) for name, value in readings.items()}
    found["matrix_fp8_tflops"] = Reading(missing="this GPU has no fp8")
    return MeasuredUnit("gpu", f"n1 GPU {number}", found, "NVIDIA H200")


def node(name, small=20.0, large=320.0):
    readings = {"node_all_reduce_32kb_us": Reading(small), "node_all_reduce_1gb_gbs": Reading(large)}
    return MeasuredUnit("node", name, readings)


def test_a_node_has_medians_of_its_gpus_and_the_link_between_them():
    section = hardware_section([node("n1"), gpu(0, 650.0), gpu(1, 660.0), gpu(2, 600.0)])
    assert section["gpus_per_node"] == 3
    assert section["tflops"] == {"bf16": 650.0, "fp16": 640.0}
    assert (section["memory_gb"], section["memory_gbs"], section["gpu_watts"]) == (150.1, 4250.0, 700)
    assert section["node_link"] == {"latency_us": NODE_HOP_US, "gbs": 320.0}
    assert section["collective_us"] == pytest.approx(20.0 - 4 * NODE_HOP_US)
    assert "network_link" not in section


def test_cores_are_physical_ones():
    cores = {"cores_allowed": Reading(224), "physical_cores_allowed": Reading(112)}
    section = hardware_section([MeasuredUnit("node", "n1", cores), gpu(0)])
    assert section["cores_per_node"] == 112


def test_the_slowest_node_counts_and_the_job_gives_the_network():
    units = [node("n1"), node("n2", 30.0, 300.0), *(gpu(number) for number in range(4))]
    job = {"all_reduce_32kb_us": Reading(44.0), "all_reduce_1gb_gbs": Reading(90.0)}
    section = hardware_section([*units, MeasuredUnit("job", "all ranks", job)])
    assert section["gpus_per_node"] == 2
    assert section["node_link"]["gbs"] == 300.0
    assert section["network_link"] == {"latency_us": 7.0, "gbs": 45.0}


def test_the_file_is_a_system_from_which_collectives_take_the_measured_time(tmp_path):
    path = tmp_path / "site.yaml"
    job = {"all_reduce_32kb_us": Reading(44.0), "all_reduce_1gb_gbs": Reading(90.0)}
    units = [node("n1"), node("n2"), *(gpu(number) for number in range(4)), MeasuredUnit("job", "all ranks", job)]
    write_system(path, units)
    system, _ = load_system(str(path))
    hardware = system.hardware
    assert (system.name, hardware.gpu, hardware.overlap_slowdown) == (
        "site",
        "NVIDIA H200",
        DEFAULTS["overlap_slowdown"],
    )
    assert hardware.network_link == Link(12.0, 45.0)
    assert all_reduce(1, RankGroup(2, 2), hardware) == pytest.approx(20e-6, rel=1e-3)
    assert all_reduce(1, RankGroup(4, 2), hardware) == pytest.approx(44e-6, rel=1e-3)
    assert all_reduce(2**40, RankGroup(4, 2), hardware) == pytest.approx(2**40 * 1.5 / 90e9, rel=1e-3)


def test_a_machine_without_gpus_and_a_missing_measurement_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"^--write-system: there is no GPU"):
        hardware_section([node("n1")])
    bare = MeasuredUnit("gpu", "n1 GPU 0", {"memory_gb": Reading(150.1)}, "NVIDIA H200")
    with pytest.raises(ConfigError, match=r"^--write-system: memory_copy_gbs was not measured: run the checks"):
        hardware_section([node("n1"), bare])
    with pytest.raises(SuiteError, match="cannot be written: Is a directory"):
        write_system(tmp_path, [node("n1"), gpu(0)])
