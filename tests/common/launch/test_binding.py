"""Where a rank belongs, on machines described by the kernel's own files."""

import os
from pathlib import Path

import pytest

from common.config.system import BindingConfig
from common.distributed.rank_info import RankInfo
from common.launch import binding
from common.launch.binding import RankBinding, Topology, left_over, locate, parse_list, read_topology

PAIRS = {cpu: cpu % 8 for cpu in range(16)}
"""8 physical cores; CPU c + 8 is the hyperthread of CPU c."""

TWO_NODES = Topology(
    allowed_cpus=frozenset(range(16)),
    allowed_nodes=frozenset({0, 1}),
    gpu_cpus=(parse_list("0-3,8-11"), parse_list("0-3,8-11"), parse_list("4-7,12-15"), parse_list("4-7,12-15")),
    gpu_nodes=(0, 0, 1, 1),
    siblings=PAIRS,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", set()), ("5", {5}), ("0-3,8,10-11", {0, 1, 2, 3, 8, 10, 11}), ("0-1\n", {0, 1})],
)
def test_a_kernel_list_is_read(text, numbers):
    assert parse_list(text) == numbers


def test_a_rank_gets_the_node_of_its_gpu_and_shares_it_with_its_neighbour():
    assert locate(TWO_NODES, 2, "node", "node", range(4)) == RankBinding(parse_list("4-7,12-15"), frozenset({1}), 2)


def test_an_exclusive_share_is_whole_cores_with_their_hyperthreads():
    shares = [locate(TWO_NODES, gpu, "exclusive", "node", range(4)) for gpu in range(4)]
    assert [share.cpus for share in shares] == [
        parse_list("0-1,8-9"), parse_list("2-3,10-11"), parse_list("4-5,12-13"), parse_list("6-7,14-15"),
    ]  # fmt: skip
    assert {share.sharers for share in shares} == {1}


def test_exclusive_shares_leave_cores_that_are_next_to_no_gpu():
    near_node_0 = Topology(
        TWO_NODES.allowed_cpus, TWO_NODES.allowed_nodes, TWO_NODES.gpu_cpus[:2], TWO_NODES.gpu_nodes[:2], PAIRS
    )
    assert left_over(near_node_0, range(2)) == parse_list("4-7,12-15")
    assert left_over(TWO_NODES, range(4)) == frozenset()
    assert left_over(TWO_NODES, range(2)) == parse_list("4-7,12-15")  # two of the four GPUs have a rank


@pytest.mark.parametrize(("cpu", "spare"), [("exclusive", "4-7,12-15"), ("node", ""), ("none", "")])
def test_only_exclusive_ranks_leave_cores_to_a_process_beside_them(cpu, spare, monkeypatch):
    monkeypatch.setattr(binding, "pci_bus_ids", lambda: ["0000:00:00.0", "0000:01:00.0"])
    monkeypatch.setattr(binding, "read_topology", lambda ids: TWO_NODES)
    one_machine = RankInfo(0, 2, 0, 2, 0, "torchrun")
    assert binding.spare_cpus(one_machine, BindingConfig(cpu=cpu)) == parse_list(spare)
    # The scheduler shows each rank its own GPU only: nobody knows what the others have.
    assert binding.spare_cpus(RankInfo(0, 4, 0, 4, 0, "slurm"), BindingConfig(cpu=cpu)) == frozenset()


@pytest.mark.parametrize(
    ("cpu", "visible", "reported"), [("exclusive", 1, True), ("exclusive", 2, False), ("node", 1, False)]
)
def test_a_rank_without_exclusive_cores_reports_it(cpu, visible, reported, monkeypatch, capsys):
    monkeypatch.setattr(binding, "pci_bus_ids", lambda: ["0000:00:00.0", "0000:01:00.0"][:visible])
    monkeypatch.setattr(binding, "read_topology", lambda ids: TWO_NODES)
    monkeypatch.setattr(binding, "apply", lambda bound: [])
    binding.bind_rank(RankInfo(0, 2, 0, 2, 0, "slurm"), BindingConfig(cpu=cpu))
    assert ("a rank sees 1, so that ranks share" in capsys.readouterr().err) == reported


def test_a_cpuset_is_respected():
    halved = Topology(parse_list("0-1,4-5"), frozenset({0}), TWO_NODES.gpu_cpus, TWO_NODES.gpu_nodes, PAIRS)
    assert locate(halved, 3, "node", "node", range(4)) == RankBinding(frozenset({4, 5}), frozenset(), 2)


def test_a_gpu_whose_cores_are_not_allowed_leaves_all_allowed_ones():
    elsewhere = Topology(parse_list("0-3"), frozenset({0}), TWO_NODES.gpu_cpus, TWO_NODES.gpu_nodes, PAIRS)
    assert locate(elsewhere, 2, "node", "none", range(4)).cpus == parse_list("0-3")


def test_gpus_in_another_order_than_their_nodes_are_bound_by_their_own_node():
    crossed = Topology(
        TWO_NODES.allowed_cpus, TWO_NODES.allowed_nodes, TWO_NODES.gpu_cpus[::-1], TWO_NODES.gpu_nodes[::-1], PAIRS
    )
    assert locate(crossed, 0, "node", "node", range(4)).memory_nodes == {1}


def test_more_ranks_than_cores_share_them():
    small = Topology(parse_list("0,8"), frozenset({0}), (parse_list("0,8"),) * 4, (0,) * 4, PAIRS)
    assert locate(small, 3, "exclusive", "none", range(4)) == RankBinding(frozenset({0, 8}), frozenset(), 4)


def test_more_numa_nodes_than_gpus_is_no_problem():
    one = Topology(frozenset(range(16)), frozenset(range(4)), (parse_list("8-11"),), (2,), PAIRS)
    assert locate(one, 0, "node", "node", [0]) == RankBinding(parse_list("8-11"), frozenset({2}), 1)


def test_none_leaves_everything():
    assert locate(TWO_NODES, 1, "none", "none", range(4)) == RankBinding(frozenset(range(16)), frozenset(), 4)


def test_the_kernel_files_of_a_machine_are_read(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:ab:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("4-7\n")
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nMems_allowed_list:\t0-1\n")
    unknown = "0000:ff:00.0"
    topology = read_topology(["0000:ab:00.0", unknown], tmp_path, status)
    assert topology.gpu_nodes == (1, None)
    assert topology.gpu_cpus == (frozenset({4, 5, 6, 7}), frozenset())
    assert topology.allowed_nodes == {0, 1}
    assert topology.allowed_cpus == os.sched_getaffinity(0)


def test_applying_binds_this_process_and_its_memory():
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    pid = os.fork()
    if pid == 0:  # the policy cannot be taken back: a process of its own
        problems = binding.apply(RankBinding(one, frozenset({0}), 1))
        policies = {line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
        bound = os.sched_getaffinity(0) == one and (bool(problems) or "bind:0" in policies)
        os._exit(0 if bound else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.sched_getaffinity(0) == before
