"""Test clock, profiler and doctor on GPUs."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from common.distributed.rank_info import RankInfo
from common.doctor import collectives, health
from common.doctor.compute import Durations, measure_gpu
from common.observe.nvml import GpuMeter, device_uuid, open_nvml, pci_bus_ids
from common.ops.device_clock import milliseconds, stamp
from common.run.kernel_profile import breakdown, recorded
from tests.conftest import ROOT

pytestmark = pytest.mark.gpu

# Stamps of the device's clock against CUDA's events


CYCLES = 20_000_000  # about 10 ms


def moments() -> torch.Tensor:
    return torch.zeros((2, 1), dtype=torch.int64, device="cuda")


def test_the_time_between_two_stamps_is_that_between_two_events() -> None:
    taken = moments()
    stamp(taken[0])
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    stamp(taken[0])
    torch.cuda._sleep(CYCLES)
    stamp(taken[1])
    end.record()
    end.synchronize()
    assert milliseconds(taken[0], taken[1]).item() == pytest.approx(begin.elapsed_time(end), rel=0.05)


def test_every_replay_of_a_graph_stamps_anew() -> None:
    taken = moments()
    stamp(taken[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stamp(taken[0])
        torch.cuda._sleep(CYCLES)
        stamp(taken[1])
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append(taken.flatten().tolist())
    assert all(0 < after - before < 1e9 for before, after in seen)
    assert seen[0][1] < seen[1][0]
    assert seen[1][1] < seen[2][0]


# The profiler


def test_kernels_before_the_recorded_ones_do_not_count() -> None:
    x = torch.randn(256, 256, device="cuda")
    kernels, result = recorded(lambda: x @ x, lambda: [x.sin() for _ in range(3)])
    assert len(result) == 3
    assert len(kernels) == 3
    assert len({kernel.name for kernel in kernels}) == 1
    assert all(kernel.end > kernel.start for kernel in kernels)
    found = breakdown(kernels, 3)
    assert list(found.kinds) == ["other"]
    assert next(iter(found.kernels.values()))[1] == 1


# The doctor


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def watched(device):
    """Return measurements of a short load, and the readings of the GPU during it."""
    nvml = open_nvml()
    watch = health.LoadWatch(nvml, nvml.nvmlDeviceGetHandleByUUID(device_uuid(device)))
    figures = measure_gpu(device, Durations(1.0, 0.2), watch)
    return figures, watch.readings()


def test_every_rate_is_measured(watched):
    assert {name for name, reading in watched[0].items() if reading.failed} == set()
    rates = {name: reading.value for name, reading in watched[0].items() if name != "matrix_repeats" and reading.value}
    assert min(rates.values()) > 0
    assert watched[0]["matrix_repeats"].value is True


def test_a_matrix_product_is_not_faster_than_twice_the_fastest_chip(watched):
    # A measurement that forgot to wait for the device would be.
    assert watched[0]["matrix_bf16_tflops"].value < 5000


def test_the_load_is_seen(watched, device):
    figures = watched[1]
    nvml = open_nvml()
    highest = nvml.nvmlDeviceGetMaxClockInfo(nvml.nvmlDeviceGetHandleByUUID(device_uuid(device)), 1)
    assert 0 < figures["load_sm_clock_mhz"].value <= highest
    assert figures["load_power_w"].value > 0


def test_the_gpus_state_is_read_without_a_failure(device):
    nvml = open_nvml()
    readings = health.read_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(device_uuid(device)))
    assert {name: reading.failed for name, reading in readings.items() if reading.failed} == {}
    total = torch.cuda.get_device_properties(device).total_memory / 1e9
    assert readings["memory_gb"].value == pytest.approx(total, rel=0.05)


ASK_CUDA = """
import torch
for index in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(index)
    print(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
"""


@pytest.mark.parametrize("visible", [None, "0", pytest.param("1,0", marks=two_gpus)])
def test_bus_ids_are_those_that_cuda_gives(visible):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    answer = subprocess.run(
        [sys.executable, "-c", ASK_CUDA], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert pci_bus_ids(environment) == answer.stdout.split()


def test_the_meter_reads_the_device(device):
    meter = GpuMeter(device_uuid(device), interval_seconds=1e6)
    figures = meter.sample()
    meter.close()
    assert figures["power_w"] > 10
    assert figures["sm_clock_mhz"] > 0
    assert meter.energy_joules() >= 0


def doctor(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "common.cli", "doctor", *arguments], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_the_command_tells_each_gpu(tmp_path):
    found = tmp_path / "doctor.json"
    done = doctor("--quick", "--json", str(found))
    assert done.returncode in (0, 11), done.stderr
    report = json.loads(found.read_text())
    assert len(report["ranks"]) == torch.cuda.device_count()
    assert {rank["gpu"] for rank in report["ranks"]} == {torch.cuda.get_device_name(0)}
    assert all(rank["measurements"]["matrix_bf16_tflops"] > 0 for rank in report["ranks"])


def test_a_gpu_under_its_limit_is_named(tmp_path):
    limits = tmp_path / "impossible.yaml"
    limits.write_text("limits: {gpu: {matrix_bf16_tflops: {min: 1.0e+9}}}")
    done = doctor("--quick", "--only", "compute", "--system", str(limits))
    assert done.returncode == 11, done.stderr
    assert "GPU 0: matrix product in bf16" in done.stdout


def join(rank, port, messages, leaves):
    """Run one of two ranks. The second never calls the collective, and is ended."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rank_info = RankInfo(rank, 2, rank, 2, 0, "torchrun")
    plan = collectives.CollectiveOptions(rank_info, [[0, 1]], torch.device("cuda", rank), 0.1, False, 5.0)
    if rank == 0:
        messages.put(collectives.run(plan).failed)
    leaves.wait(120)
    os._exit(0)


@pytest.mark.multigpu
@two_gpus
def test_a_collective_that_hangs_is_reported_with_its_stage():
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    messages, leaves = context.Queue(), context.Event()
    ranks = [context.Process(target=join, args=(rank, store.port, messages, leaves)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert messages.get(timeout=120) == "no answer for 5 s in: collectives inside the node"
        leaves.set()
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            with contextlib.suppress(ValueError):
                process.kill()
                process.join()
