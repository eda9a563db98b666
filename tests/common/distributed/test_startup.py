"""Places from launchers' environments, node lists, devices, and a real process group."""

import os

import pytest
import torch
import torch.distributed as dist

from common.distributed import startup
from common.distributed.rank_info import RankInfo
from common.distributed.startup import expand_nodelist, find_rank_info, initialise, pick_device, shutdown
from common.errors import ConfigError, DeviceError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "3,2,1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_ADDR", ""), ("MASTER_PORT", ""), ("MASTER_PORT", "abc"), ("MASTER_PORT", "70000"), ("MASTER_PORT", "-1")],
)
def test_a_wrong_address_of_rank_0_is_named(name, value, monkeypatch):
    for variable, text in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", name: value}.items():
        monkeypatch.setenv(variable, text)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(ConfigError, match=f"{name}.*{value or 'empty'}"):
        initialise(RankInfo(0, 2, 0, 2, 0, "torchrun"), torch.device("cpu"), 1.0)


def test_no_launcher_is_a_single_rank():
    assert find_rank_info({"HOME": "/root"}) == RankInfo(0, 1, 0, 1, 0, "single")


def test_torchrun_variables():
    assert find_rank_info(TORCHRUN) == RankInfo(5, 8, 1, 4, 1, "torchrun")


def test_torchrun_wins_over_the_slurm_step_that_started_it():
    assert find_rank_info({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_slurm_step_with_uneven_nodes():
    assert find_rank_info(SLURM) == RankInfo(5, 6, 0, 1, 2, "slurm")


def test_slurm_repeats_in_tasks_per_node():
    environment = {**SLURM, "SLURM_STEP_NUM_TASKS": "17", "SLURM_STEP_TASKS_PER_NODE": "8(x2),1", "SLURM_PROCID": "16"}
    assert find_rank_info(environment).local_world_size == 1
    assert (
        find_rank_info({**environment, "SLURM_PROCID": "15", "SLURM_LOCALID": "7", "SLURM_NODEID": "1"}).local_rank == 7
    )


def test_slurm_without_tasks_per_node_has_equally_many_on_each_node():
    environment = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert find_rank_info({**environment, "SLURM_NNODES": "3"}) == RankInfo(5, 6, 0, 2, 2, "slurm")


def test_slurm_without_a_node_list_is_an_error():
    with pytest.raises(ConfigError, match="neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set"):
        startup._slurm_rendezvous({"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"})


def test_slurm_batch_script_is_not_a_step():
    batch = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
    assert find_rank_info(batch).launcher == "single"


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_slurm_interactive_and_batch_steps_do_not_count(step):
    assert find_rank_info({**SLURM, "SLURM_STEP_ID": step}).launcher == "single"


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "8"}, "RANK, LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "16 ranks on one machine"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE='eight'"),
        ({**SLURM, "SLURM_PROCID": "6"}, "SLURM_PROCID=6"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "cannot read"),
        ({**SLURM, "SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_contradictions_are_named(environment, named):
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        find_rank_info(environment)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1,3-4]-ib,login", ["gpu1-ib", "gpu3-ib", "gpu4-ib", "login"]),
        ("rack[1-2]node[08-09]", ["rack1node08", "rack1node09", "rack2node08", "rack2node09"]),
        ("", []),
    ],
)
def test_nodelist_expansion(nodelist, hosts):
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["gpu[1-2", "gpu1-2]", "gpu[2-1]", "gpu[a-b]"])
def test_a_broken_nodelist_is_an_error(nodelist):
    with pytest.raises(ConfigError, match="node list"):
        expand_nodelist(nodelist)


def test_slurm_steps_of_one_job_get_different_ports_on_the_first_host():
    first = startup._slurm_rendezvous(SLURM)
    second = startup._slurm_rendezvous({**SLURM, "SLURM_STEP_ID": "1"})
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "gpu07"
    assert first["MASTER_PORT"] != second["MASTER_PORT"]
    assert startup._slurm_rendezvous(SLURM) == first


def test_ports_of_slurm_steps_are_none_that_linux_gives_to_other_programs():
    jobs = [{**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(job % 5)} for job in range(0, 2_000_000, 97)]
    ports = [int(startup._slurm_rendezvous(job)["MASTER_PORT"]) for job in jobs]
    assert 20_000 <= min(ports) < 20_100
    assert 32_668 < max(ports) < 32_768


def test_device_names_are_checked():
    with pytest.raises(ConfigError, match="device=tpu"):
        pick_device("tpu", 0)


def test_cpu_is_the_cpu():
    assert pick_device("cpu", 3) == torch.device("cpu")


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(startup, "_gpu_present", lambda: False)
    assert pick_device("auto", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("cuda", "present", "message"),
    [
        ("13.2", False, "this machine has no NVIDIA GPU: use device=cpu"),
        (None, True, "is a build without CUDA.*install a CUDA build of PyTorch"),
    ],
    ids=["no GPU", "no CUDA"],
)
def test_cuda_without_a_gpu_or_its_build_is_an_error(cuda, present, message, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(startup, "_gpu_present", lambda: present)
    with pytest.raises(DeviceError, match=message):
        pick_device("cuda", 0)


@pytest.mark.parametrize(("script", "printed"), [("echo GPU 0: H200", "GPU 0: H200\n"), ("echo GPU 0; exit 9", "")])
def test_nvidia_smi_that_fails_knows_no_gpu(script, printed, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert startup._nvidia_smi("-L") == ""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert startup._nvidia_smi("-L") == printed


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_an_unusable_gpu_is_an_error_with_driver_and_remedy(monkeypatch, requested):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(startup, "_gpu_present", lambda: True)
    monkeypatch.setattr(startup, "_driver_version", lambda: "470.82.01")
    with pytest.raises(DeviceError, match=r"driver 470\.82\.01.*CUDA 13\.2.*device=cpu runs beside it"):
        pick_device(requested, 0)


def test_hidden_gpus_leave_auto_on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(startup, "_gpu_present", lambda: True)
    assert pick_device("auto", 0) == torch.device("cpu")
    with pytest.raises(DeviceError, match="hides every GPU"):
        pick_device("cuda", 0)


@pytest.fixture
def one_visible_gpu(monkeypatch):
    """PyTorch sees a single GPU, on which everything runs; no launcher's variables are set."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *SLURM, "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    return monkeypatch


SLURM_SECOND_OF_THREE = {**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("gpus_of_the_step", [{}, {"SLURM_GPUS_ON_NODE": "3"}])
def test_a_slurm_task_with_a_gpu_of_its_own_takes_it(one_visible_gpu, gpus_of_the_step):
    for name, value in {**SLURM_SECOND_OF_THREE, **gpus_of_the_step}.items():
        one_visible_gpu.setenv(name, value)
    assert pick_device("cuda", 1) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    "environment",
    [{**SLURM_SECOND_OF_THREE, "SLURM_GPUS_ON_NODE": "1"}, TORCHRUN, {**SLURM_SECOND_OF_THREE, **TORCHRUN}],
)
def test_ranks_that_share_one_gpu_are_refused(one_visible_gpu, environment):
    for name, value in environment.items():
        one_visible_gpu.setenv(name, value)
    with pytest.raises(DeviceError, match=r"local rank 1 has no GPU: PyTorch sees 1 .*at most 1 ranks"):
        pick_device("cuda", 1)


def test_slurm_tasks_that_see_all_gpus_take_one_each(one_visible_gpu):
    one_visible_gpu.setattr(torch.cuda, "device_count", lambda: 3)
    for name, value in SLURM_SECOND_OF_THREE.items():
        one_visible_gpu.setenv(name, value)
    assert pick_device("cuda", 1) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "value", "threads"),
    [("cpu", "3", 3), ("cpu", "5,2", 5), ("cpu", "", 4), ("cpu", "0", 4), ("cpu", "many", 4), ("cuda", "3", 2)],
)
def test_a_rank_on_the_cpu_has_the_threads_that_the_user_sets(monkeypatch, device, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    alone = find_rank_info({})
    assert startup._threads(alone, sharers=2, device=torch.device(device)) == threads


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(1, 1, 1), (2, 2, 1), (32, 1, 8), (112, 8, 7), (224, 8, 8)])
@pytest.mark.parametrize("slurm", [False, True])
def test_operations_on_the_cpu_leave_cores_to_reader_and_launches_of_a_gpu(monkeypatch, cores, ranks, threads, slurm):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    variables = SLURM_SECOND_OF_THREE | {"SLURM_CPUS_PER_TASK": str(cores // ranks)} if slurm else {}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert startup._threads(find_rank_info(variables), ranks, torch.device("cuda")) == threads


def test_one_rank_needs_no_process_group():
    threads = torch.get_num_threads()
    try:
        initialise(find_rank_info({}), torch.device("cpu"), 10)
        assert not dist.is_initialized()
        shutdown()
    finally:
        torch.set_num_threads(threads)
