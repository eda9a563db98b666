"""Visible GPUs, readings of a GPU, and its power mode."""

import threading
from types import SimpleNamespace

import pynvml
import pytest

from common.errors import ConfigError, DeviceError
from common.observe.nvml import GpuMeter, pci_bus_ids, set_power_mode
from tests.common.observe.fake_nvml import FakeGpu, FakeNvml

FIRST, SECOND, THIRD = "0000:1b:00.0", "0000:43:00.0", "0001:c3:00.0"


@pytest.fixture
def machine():
    # NVML's numbers need not follow the bus ids.
    return FakeNvml(
        FakeGpu("00000000:43:00.0", "GPU-b0000000"),
        FakeGpu("00000000:1B:00.0", "GPU-a0000000"),
        FakeGpu("00000001:C3:00.0", "GPU-c0000000"),
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [FIRST, SECOND, THIRD]),
        ("0,1,2", [FIRST, SECOND, THIRD]),
        ("2, 0", [THIRD, FIRST]),
        ("1", [SECOND]),
        ("GPU-c0000000,GPU-a", [THIRD, FIRST]),
        ("MIG-of-GPU-b0000000", [SECOND]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,7,0", [SECOND]),
        ("1,-1,0", [SECOND]),
        ("GPU-", []),  # the beginning of several
        ("0,0", []),
    ],
)
def test_visible_devices_in_cudas_order(machine, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert pci_bus_ids(environment, machine) == expected


def test_a_domain_of_more_than_four_digits_is_kept_as_sysfs_writes_it():
    assert pci_bus_ids({}, FakeNvml(FakeGpu("00010000:81:00.0", "GPU-a"))) == ["10000:81:00.0"]


@pytest.fixture
def unlike():
    return FakeNvml(
        FakeGpu("00000000:1B:00.0", "GPU-a0", name="NVIDIA T4"), FakeGpu("00000000:43:00.0", "GPU-b0", name="NVIDIA L4")
    )


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}])
def test_numbers_of_unlike_gpus_are_not_guessed(unlike, environment):
    with pytest.raises(DeviceError, match=r"NVIDIA L4, NVIDIA T4.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        pci_bus_ids(environment, unlike)


def test_unlike_gpus_are_known_by_uuid_or_by_bus_order(unlike):
    assert pci_bus_ids({"CUDA_VISIBLE_DEVICES": "GPU-b0"}, unlike) == [SECOND]
    assert pci_bus_ids({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, unlike) == [FIRST, SECOND]


def test_a_gpu_that_does_not_answer_is_an_error():
    lost = FakeNvml(FakeGpu("00000000:1B:00.0", "GPU-a0", refused={"nvmlDeviceGetPciInfo"}))
    with pytest.raises(DeviceError, match="does not answer NVML"):
        pci_bus_ids({}, lost)


FIGURES = {
    "power_w": 412.5,
    "sm_clock_mhz": 1830.0,
    "memory_clock_mhz": 3201.0,
    "temperature_c": 61.0,
    "utilization_percent": 97.0,
}


def test_the_meter_gives_each_reading_once(machine):
    meter = GpuMeter("GPU-a0000000", machine, interval_seconds=1e6)
    assert meter.sample() == FIGURES
    assert meter.sample() == {}
    meter.close()


def test_the_meter_reads_again_by_itself(machine):
    read_again = threading.Event()
    gpu = machine.gpus[1]

    class Watched(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802, the last figure of a reading
            if handle.sm_clock == 1200:
                read_again.set()
            return super().nvmlDeviceGetUtilizationRates(handle)

    meter = GpuMeter("GPU-a0000000", Watched(*machine.gpus), interval_seconds=0.001)
    gpu.sm_clock = 1200
    assert read_again.wait(200)
    meter.close()
    assert meter.sample()["sm_clock_mhz"] == 1200.0


def test_a_figure_that_the_gpu_does_not_report_is_left_out():
    silent = FakeNvml(FakeGpu("00000000:1B:00.0", "GPU-a", refused={"nvmlDeviceGetPowerUsage"}))
    meter = GpuMeter("GPU-a", silent, interval_seconds=1e6)
    assert meter.sample() == {name: value for name, value in FIGURES.items() if name != "power_w"}
    meter.close()


@pytest.mark.parametrize("uuid", [None, "GPU-unknown"])
def test_without_a_gpu_there_are_no_figures(machine, uuid):
    meter = GpuMeter(uuid, machine)
    assert meter.sample() == {}
    assert meter.energy_joules() is None
    meter.close()


def test_means_are_over_the_readings_since_the_last_call(machine):
    read_twice, gpu, clocks = threading.Event(), machine.gpus[1], [1000, 1400]

    class Changing(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802, the last figure of a reading
            rates = super().nvmlDeviceGetUtilizationRates(handle)
            if clocks:
                handle.sm_clock = clocks.pop(0)
            else:
                handle.refused = {"nvmlDeviceGetClockInfo"}
                read_twice.set()
            return rates

    meter = GpuMeter("GPU-a0000000", Changing(*machine.gpus), interval_seconds=0.001)
    assert read_twice.wait(200)
    meter.close()
    means = meter.means()
    assert (means["sm_clock_mhz"], means["power_w"]) == (1200.0, FIGURES["power_w"])  # without the one at its start
    assert gpu.sm_clock == 1400
    assert meter.means() == {}


def test_energy_counts_from_the_meters_start(machine):
    meter = GpuMeter("GPU-a0000000", machine, interval_seconds=1e6)
    machine.gpus[1].energy_mj += 7_250
    assert meter.energy_joules() == 7.25
    meter.close()


def test_energy_that_is_not_counted_is_unknown():
    silent = FakeNvml(FakeGpu("00000000:1B:00.0", "GPU-a", refused={"nvmlDeviceGetTotalEnergyConsumption"}))
    meter = GpuMeter("GPU-a", silent, interval_seconds=1e6)
    assert meter.energy_joules() is None
    meter.close()


@pytest.mark.parametrize(
    ("returned", "sent"), [(pynvml.NVML_SUCCESS, 3 * 1024.0), (pynvml.NVML_ERROR_NOT_SUPPORTED, None)]
)
def test_bytes_sent_over_all_nvlinks_are_counted_in_kib(returned, sent):
    def fields(asked):
        assert asked == [(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0xFFFFFFFF)]
        return [SimpleNamespace(nvmlReturn=returned, value=SimpleNamespace(ullVal=3))]

    gpu = FakeGpu("00000000:1B:00.0", "GPU-a", answers={"nvmlDeviceGetFieldValues": fields})
    meter = GpuMeter("GPU-a", FakeNvml(gpu), interval_seconds=1e6)
    assert meter.sent_bytes() == sent
    meter.close()


def test_links_that_are_not_there_have_sent_nothing_known():
    meter = GpuMeter("GPU-a", FakeNvml(FakeGpu("00000000:1B:00.0", "GPU-a")), interval_seconds=1e6)
    assert meter.sent_bytes() is None
    meter.close()
    assert GpuMeter(None).sent_bytes() is None


# The slider is in a file. A file `refusal` refuses to set it, as a driver does; with `ignores` setting has no effect.
NVIDIA_SMI = """#!/bin/sh
[ "$1 $2 $3" = "boost-slider -i GPU-a" ] || exit 2
if [ "$4" = --list ]; then
    echo "|  GPU   slider   max   current |"
    echo "|    0   vboost     4         $(cat {slider}) |"
elif [ -e {refusal} ]; then
    cat {refusal}; exit 4
else
    echo "Successfully set vboost slider with value $5 for GPU 0"
    [ -e {ignores} ] || echo $5 > {slider}
fi
"""


@pytest.fixture
def slider(tmp_path, monkeypatch):
    """The file with the slider of a fake program, which is ``nvidia-smi`` in the same folder."""
    path = tmp_path / "slider"
    path.write_text("2\n")
    program = tmp_path / "nvidia-smi"
    names = {name: tmp_path / name for name in ("slider", "refusal", "ignores")}
    text = NVIDIA_SMI
    for name, where in names.items():
        text = text.replace(f"{{{name}}}", str(where))
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def test_the_power_mode_is_set_and_put_back(slider):
    restore = set_power_mode(1, "GPU-a")
    assert slider.read_text() == "1\n"
    restore()
    assert slider.read_text() == "2\n"


def test_a_power_mode_that_is_not_permitted_is_an_error_with_the_text_of_nvidia_smi(slider):
    slider.with_name("refusal").write_text("Insufficient Permissions\n")
    with pytest.raises(DeviceError, match=r"cannot be set: nvidia-smi: Insufficient Permissions\. Root"):
        set_power_mode(1, "GPU-a")
    assert slider.read_text() == "2\n"


def test_a_power_mode_without_effect_is_an_error(slider):
    slider.with_name("ignores").touch()
    with pytest.raises(DeviceError, match="vboost=1 was not taken by GPU GPU-a"):
        set_power_mode(1, "GPU-a")


def test_a_gpu_without_the_slider_is_an_error(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Boost sliders are not supported'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DeviceError, match="has no vboost: nvidia-smi: Boost sliders are not supported"):
        set_power_mode(1, "GPU-a")


@pytest.mark.parametrize(("level", "named"), [(-1, "start at 0"), (5, "highest level of GPU GPU-a is 4")])
def test_a_level_outside_the_slider_is_an_error(slider, level, named):
    with pytest.raises(ConfigError, match=named):
        set_power_mode(level, "GPU-a")
    assert slider.read_text() == "2\n"


def test_missing_nvidia_smi_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="not on the PATH"):
        set_power_mode(1, "GPU-a")
