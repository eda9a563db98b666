"""Explanations of a SIGKILL, from folders that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.distributed.memory_kills import MemoryKills


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A machine with both versions of cgroups, none of which has counted a kill."""
    put(tmp_path / "proc/self/cgroup", "4:memory:/job/step\n1:cpu:/elsewhere\n0::/slice/unit\n")
    put(tmp_path / "proc/vmstat", "nr_free_pages 5\noom_kill 7\npgfault 3\n")
    put(tmp_path / "cgroup/slice/unit/memory.events", "low 0\nmax 2\noom 0\noom_kill 0\noom_group_kill 0\n")
    put(tmp_path / "cgroup/slice/memory.events", "oom_kill 0\n")
    put(tmp_path / "cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    return tmp_path


def explained(kernel: Path, changed: dict[str, str]) -> str:
    """Return the explanation after files have changed."""
    kills = MemoryKills(kernel / "proc", kernel / "cgroup")
    for name, text in changed.items():
        put(kernel / name, text)
    return kills.explain()


@pytest.mark.parametrize(
    ("counter", "limits", "limit"),
    [
        ("cgroup/slice/unit/memory.events", {"memory.max": "2500000000\n"}, "; {folder} may use 2.5 GB"),
        ("cgroup/slice/memory.events", {"memory.max": "max\n"}, ""),
        ("cgroup/memory/job/memory.oom_control", {"memory.limit_in_bytes": "900000000\n"}, "; {folder} may use 0.9 GB"),
        ("cgroup/memory/job/memory.oom_control", {"memory.limit_in_bytes": "9223372036854771712\n"}, ""),
    ],
)
def test_the_innermost_cgroup_that_counts_another_kill_is_named(kernel, counter, limits, limit):
    folder = (kernel / counter).parent
    for name, text in limits.items():
        put(folder / name, text)
    said = explained(kernel, {counter: "oom_kill 4\n", "proc/vmstat": "oom_kill 8\n"})
    end = limit.format(folder=folder)
    assert said == f"the kernel killed a process because memory was full: oom_kill in {kernel / counter}{end}"


def test_the_limit_may_be_that_of_a_cgroup_above(kernel):
    put(kernel / "cgroup/slice/unit/memory.max", "max\n")
    put(kernel / "cgroup/slice/memory.max", "4000000000\n")
    said = explained(kernel, {"cgroup/slice/unit/memory.events": "oom_kill 1\n"})
    assert said.endswith(f"; {kernel / 'cgroup/slice'} may use 4.0 GB")


def test_neither_kills_in_other_cgroups_nor_earlier_ones_explain_anything(kernel):
    counter = kernel / "cgroup/memory/job/memory.oom_control"
    expected = f"not by the kernel for want of memory: {counter} counts no such kill"
    assert explained(kernel, {"proc/vmstat": "oom_kill 8\n"}) == explained(kernel, {}) == expected


def test_where_no_cgroup_counts_the_machine_does(tmp_path):
    put(tmp_path / "proc/vmstat", "oom_kill 7\n")
    vmstat = tmp_path / "proc/vmstat"
    assert explained(tmp_path, {}) == f"not by the kernel for want of memory: {vmstat} counts no such kill"
    said = explained(tmp_path, {"proc/vmstat": "oom_kill 8\n"})
    assert said == f"the kernel killed a process of this machine because memory was full: oom_kill in {vmstat}"


def test_a_container_finds_its_own_cgroup_at_the_mount_point(tmp_path):
    put(tmp_path / "proc/self/cgroup", "0::/docker/4f2a\n")
    put(tmp_path / "cgroup/memory.events", "oom_kill 0\n")
    said = explained(tmp_path, {"cgroup/memory.events": "oom_kill 1\n"})
    assert said.endswith(f"oom_kill in {tmp_path / 'cgroup/memory.events'}")


def test_without_counters_the_kernels_messages_are_named(tmp_path):
    assert explained(tmp_path, {}) == "the kernel may have run out of memory (see dmesg)"
