"""`doctor` on one machine, on several nodes over Gloo, with broken limits, and with a rank that does not answer."""

import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.distributed.rank_info import RankInfo
from common.doctor import command
from common.doctor.examine import Report
from common.doctor.judge import Rank, Results, Together, findings_of, units_of, why_alone, with_own_names
from common.errors import UNFIT, ConfigError
from tests.conftest import ROOT, SECONDS, suite
from tests.forked import Forked

DOCTOR = ["-m", "common.cli", "doctor"]
IMPOSSIBLE = "limits: {node: {memory_bandwidth_gbs: {min: 1.0e+9}}}"
LOOSE = "limits: {node: {memory_bandwidth_gbs: {min: 0.001}}}"
ANY_PAIR = "limits: {node: {pair_all_reduce_gbs: {spread: 100}}}"  # processes of one busy machine differ at random

SILENT = ["-m", "tests.common.doctor.silent_rank"]
"""A rank that sends its identity and then nothing more."""


def nodes(*commands):
    """Run one process for each of ``commands`` as a node, named n1, n2, …; return exit codes and outputs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200))
    count = len(commands)
    processes = []
    for rank, arguments in enumerate(commands):
        ranks = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in ranks.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "SLURMD_NODENAME": f"n{rank + 1}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(Forked([sys.executable, *arguments], ROOT, environment))
    try:
        ended = [
            process.communicate(timeout=SECONDS)
            for process, command in zip(processes, commands, strict=True)
            if command is not SILENT
        ]
        return [process.returncode for process in processes], ended
    finally:
        for process in processes:
            process.kill()
            process.wait()


def limits(folder, text):
    path = folder / "limits.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = folder / "doctor.json"
    done = suite("doctor", "--quick", "--system", limits(folder, LOOSE), "--storage", str(folder), "--json", str(found))
    return done, json.loads(found.read_text())


def test_a_machine_without_a_gpu_is_checked_for_what_is_there(alone):
    done, content = alone
    assert done.code == 0, done.errors
    assert content["ok"] is True
    assert "no GPU here" in done.output
    assert done.output.splitlines()[-1].startswith("FIT: ")


def test_the_file_has_the_facts_and_figures_of_each_node(alone):
    _, content = alone
    assert set(content) == {"time", "suite", "system", "nodes", "ranks", "job", "checks", "findings", "ok"}
    ((_, node),) = content["nodes"].items()
    assert node["facts"]["accelerators_per_node"] == "0"
    assert node["measurements"]["cores_allowed"] == len(os.sched_getaffinity(0))
    assert node["measurements"]["memory_bandwidth_gbs"] > 0
    assert [rank["rank"] for rank in content["ranks"]] == [0]


def test_checks_that_could_not_run_are_counted_as_not_made(alone):
    _, content = alone
    readings = [value for node in content["nodes"].values() for value in node["measurements"].values()]
    missing = sum(isinstance(value, dict) and "missing" in value for value in readings)
    assert content["checks"] == {"made": len(readings) - missing, "not_made": missing, "failed": 0}
    assert missing > 0


def test_a_system_file_needs_a_gpu(tmp_path):
    path = tmp_path / "site.yaml"
    done = suite(
        "doctor", "--quick", "--only", "host", "--system", limits(tmp_path, LOOSE), "--write-system", str(path)
    )
    assert done.code == ConfigError.exit_code
    assert done.errors.endswith("--write-system: there is no GPU, and a system is described by its GPUs\n")
    assert not path.exists()


def test_nothing_is_left_in_the_folder_of_the_storage_check(alone, tmp_path):
    done = suite("doctor", "--quick", "--only", "storage", "--storage", str(tmp_path))
    assert list(tmp_path.iterdir()) == [], done.output


def test_two_nodes_are_measured_alone_and_together(tmp_path):
    found = tmp_path / "doctor.json"
    arguments = [
        *DOCTOR, "--quick", "--only", "host", "clock", "collectives",
        "--system", limits(tmp_path, LOOSE), "--json", str(found),
    ]  # fmt: skip
    codes, outputs = nodes(arguments, arguments)
    assert codes == [0, 0], outputs
    content = json.loads(found.read_text())
    assert list(content["nodes"]) == ["n1", "n2"]
    assert abs(content["nodes"]["n2"]["measurements"]["clock_offset_ms"]) < 1000  # one machine, one clock
    assert content["job"]["all_reduce_64mb_gbs"] > 0
    assert outputs[1][0] == ""  # rank 0 alone prints


def test_neighbouring_nodes_are_measured_in_pairs(tmp_path):
    found = tmp_path / "doctor.json"
    arguments = [
        *DOCTOR, "--quick", "--only", "collectives", "--timeout", "200",
        "--system", limits(tmp_path, ANY_PAIR), "--json", str(found),
    ]  # fmt: skip
    codes, outputs = nodes(arguments, arguments, arguments)
    assert codes == [0, 0, 0], outputs
    content = json.loads(found.read_text())
    assert min(node["measurements"]["pair_all_reduce_gbs"] for node in content["nodes"].values()) > 0


def test_a_node_that_breaks_a_limit_is_named_and_all_ranks_exit_with_its_code(tmp_path):
    arguments = [*DOCTOR, "--quick", "--only", "host", "--system", limits(tmp_path, IMPOSSIBLE)]
    codes, outputs = nodes(arguments, arguments)
    assert codes == [UNFIT, UNFIT], outputs
    for name in ("n1", "n2"):
        assert f"{name}: host memory bandwidth of a copy" in outputs[0][0]
    assert outputs[0][0].splitlines()[-1].startswith("UNFIT: 2 findings")


def test_a_rank_that_does_not_answer_is_named_with_its_node(tmp_path):
    arguments = [*DOCTOR, "--quick", "--only", "host", "collectives", "--timeout", "15"]
    codes, outputs = nodes([*arguments, "--system", limits(tmp_path, LOOSE)], SILENT)
    assert codes[0] == UNFIT, outputs
    assert "n2 (rank 1) did not answer with its own checks, within 15 s of the others" in outputs[0][0]
    assert "collectives and clock offsets: a rank does not answer" in outputs[0][0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--timeout", "0"], "--timeout 0: expected seconds"),
        (["--system", "b200"], "--system b200: unknown"),
        (["--json", "/dev/null/doctor.json"], "/dev/null is no folder"),
        (["--json", "."], "is a folder"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_measured(arguments, named):
    with pytest.raises(ConfigError, match=named):
        command.main(arguments)


def test_an_unknown_check_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "disk"])
    assert ended.value.code == 2
    assert "invalid choice: 'disk'" in capsys.readouterr().err


def test_machines_of_one_name_get_different_names():
    ranks = [Rank(0, 0, 0, "node", "cpu"), Rank(1, 1, 0, "node", "cpu"), Rank(2, 0, 1, "node", "cpu"), None]
    assert [rank and rank.name for rank in with_own_names(ranks)] == ["node/0", "node/0", "node/1", None]
    assert [rank and rank.name for rank in with_own_names(ranks[:2])] == ["node", "node"]


def results(*ranks, failed=("", "")):
    """Results of the ranks of one node: their reports, and the failures of joint measurements."""
    identities = [Rank(number, number, 0, "n1", rank.pop("device", "cuda")) for number, rank in enumerate(ranks)]
    together = [Together(failed=text) for text in failed]
    return Results(identities, [Report(**rank) for rank in ranks], together, [], "", 5.0)


def test_a_gpu_that_cannot_be_used_makes_its_node_unfit():
    found = results({}, {"device": "cpu", "unusable": "driver 470 is too old"})
    assert why_alone(found.ranks, found.reports) == "some ranks have no GPU that can be used"
    findings = findings_of(found, units_of(found), {}, frozenset())
    assert [(finding.text, finding.unfit) for finding in findings] == [("n1: GPUs in use: driver 470 is too old", True)]


def test_a_collective_in_which_all_ranks_hang_is_one_finding():
    hang = "no answer for 5 s in: collectives over all ranks"
    found = results({}, {}, failed=(hang, hang))
    findings = findings_of(found, units_of(found), {}, frozenset())
    assert [finding.text for finding in findings] == [f"all ranks: {hang}"]


def test_a_rank_that_hangs_in_another_stage_is_named():
    found = results({}, {}, failed=("no answer in: all ranks", "no answer in: inside the node"))
    texts = [finding.text for finding in findings_of(found, units_of(found), {}, frozenset())]
    assert "n1 GPU 1 (rank 1): no answer in: inside the node" in texts


def test_a_rank_with_a_gpu_joins_over_gloo_with_the_threads_of_a_gpus_rank(monkeypatch):
    joined = []
    monkeypatch.setattr(command, "pick_device", lambda requested, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(command, "initialise", lambda *given, **named: joined.append((given[1], named)))
    monkeypatch.setattr(command, "variables", lambda network, environment: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no binding
    system = SimpleNamespace(environment={}, network=None)
    device, unusable = command._prepare_rank(RankInfo(1, 2, 1, 2, 0, "torchrun"), system, 10.0)
    assert (device, unusable) == (torch.device("cuda", 1), "")
    assert joined == [(torch.device("cuda", 1), {"backend": "gloo"})]


def test_a_symmetric_exchange_gives_the_offset_itself():
    # Sent at 10, received at 10.5 by the local clock while the other shows 13.7, answered at 11.
    assert command.offset_from_exchanges([(10.0, 13.7, 11.0)]) == pytest.approx(3.2)


def test_a_clock_that_is_behind_is_negative():
    assert command.offset_from_exchanges([(10.0, 7.5, 11.0)]) == pytest.approx(-3.0)


def test_only_the_exchange_with_the_shortest_round_trip_counts():
    delayed_there = (20.0, 29.0 + 3.2, 29.5)
    assert command.offset_from_exchanges([delayed_there, (10.0, 13.7, 11.0), delayed_there]) == pytest.approx(3.2)
