"""Fields of a system description that a machine reports; unknown ones are empty."""

from types import SimpleNamespace

import pynvml
import pytest

from common.doctor import facts
from common.doctor.facts import collect_facts
from tests.common.observe.fake_nvml import FakeGpu, FakeNvml

FIELDS = {
    "host_processor_model_name", "host_processors_per_node", "host_processor_core_count", "host_processor_vcpu_count",
    "host_processor_frequency", "host_processor_caches", "host_processor_interconnect", "host_memory_capacity",
    "host_memory_configuration", "host_storage_type", "host_storage_capacity", "host_networking",
    "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect", "accelerator_frequency",
    "accelerator_memory_capacity", "accelerator_memory_configuration", "accelerator_interconnect", "operating_system",
    "framework", "other_software_stack",
}  # fmt: skip


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """Folders in place of /sys and /proc: four NVMe disks, a small loop device, InfiniBand, RoCE, Ethernet."""
    sysfs, proc = tmp_path / "sys", tmp_path / "proc"
    disks = [("nvme0n1", 1.92e12), ("nvme1n1", 3.84e12), ("nvme2n1", 3.84e12), ("sda", 4.8e11), ("loop0", 1e12)]
    for name, size in disks:
        write(sysfs / f"block/{name}/size", f"{int(size) // 512}\n")
        write(sysfs / f"block/{name}/queue/rotational", "0\n")
    for name, layer in (("mlx5_0", "InfiniBand"), ("mlx5_1", "InfiniBand"), ("mlx5_2", "Ethernet")):
        port = sysfs / f"class/infiniband/{name}/ports/1"
        for file, text in (("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", layer)):
            write(port / file, text + "\n")
    for name, speed, kind, physical in (
        ("eth0", "100000", "1", True),
        ("ib0", "400000", "32", True),
        ("lo", "", "1", False),
    ):
        write(sysfs / f"class/net/{name}/speed", speed)
        write(sysfs / f"class/net/{name}/type", kind)
        if physical:
            (sysfs / f"class/net/{name}/device").mkdir()
    write(proc / "meminfo", f"MemTotal: {2048 * 2**20} kB\n")
    write(proc / "cpuinfo", "model name\t: A Processor 9000\n")
    return sysfs, proc


def two_gpus():
    answers = {
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 * 2**30, used=0),
        "nvmlDeviceGetMemoryBusWidth": 6144,
        "nvmlDeviceGetNvLinkState": lambda link: link < 18,
        "nvmlDeviceGetFieldValues": lambda fields: [
            SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=26562)) for _ in fields
        ],
    }
    return FakeNvml(*[FakeGpu(f"00000000:0{i}:00.0", f"GPU-{i}", answers=answers) for i in range(2)])


def test_all_fields_are_there_and_are_texts():
    found = collect_facts(FakeNvml())
    assert set(found) == FIELDS
    stack = found.pop("other_software_stack")
    assert all(isinstance(value, str) for value in [*found.values(), *stack.values()])


def test_disks_memory_and_networks(machine):
    found = collect_facts(FakeNvml(), *machine)
    assert found["host_storage_type"] == "NVMe SSD, SSD"
    assert found["host_storage_capacity"] == "1x 1.9 TB, 2x 3.8 TB, 1x 480 GB"
    assert found["host_memory_capacity"] == "2048 GiB"
    assert found["host_processor_model_name"] == "A Processor 9000"
    assert found["host_networking"] == "2x InfiniBand 400 Gbit/s, 1x Ethernet 100 Gbit/s"


def test_accelerators(machine):
    found = collect_facts(two_gpus(), *machine)
    assert {name: value for name, value in found.items() if name.startswith("accelerator")} == {
        "accelerators_per_node": "2",
        "accelerator_model_name": "NVIDIA H200",
        "accelerator_host_interconnect": "PCIe Gen5 x16",
        "accelerator_frequency": "1980 MHz",
        "accelerator_memory_capacity": "140 GiB",
        "accelerator_memory_configuration": "6144-bit bus",
        "accelerator_interconnect": "18x NVLink, 478 GB/s each way",
    }


def test_a_gpu_that_reports_nothing_leaves_the_fields_empty(machine):
    found = collect_facts(FakeNvml(FakeGpu("00000000:01:00.0", "GPU-a")), *machine)
    assert found["accelerators_per_node"] == "1"
    assert found["accelerator_interconnect"] == found["accelerator_memory_capacity"] == ""


def test_a_machine_that_reports_nothing_leaves_the_fields_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no lscpu, no dmidecode
    found = collect_facts(FakeNvml(), tmp_path, tmp_path)
    empty = {name for name in FIELDS if name.startswith(("host_", "accelerator_"))}
    assert {name: found[name] for name in empty} == dict.fromkeys(empty, "")
    assert found["accelerators_per_node"] == "0"


DMIDECODE = """# dmidecode 3.4
Physical Memory Array
	Location: System Board
	Number Of Devices: 3

Memory Device
	Size: 64 GB
	Type: DDR5
	Speed: 4800 MT/s

Memory Device
	Size: No Module Installed
	Type: Unknown
	Speed: Unknown

Memory Device
	Size: 64 GB
	Type: DDR5
	Speed: 4800 MT/s
"""


def test_memory_modules_from_dmidecode():
    assert facts._memory_modules(DMIDECODE) == "2x 64 GB DDR5 4800 MT/s"
    assert facts._memory_modules("") == ""
