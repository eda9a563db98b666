"""Test ``bench.only=peer``, which compares the step with other software."""

from __future__ import annotations

import importlib
import json
import re
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import WORKLOADS
from common import cli
from common.config.schema import BenchConfig
from common.contract.workload import Peer
from common.data.batches import Batch
from common.errors import ConfigError
from common.run import bench
from common.run.peer_bench import WARM_UP, PeerTiming, time_peers

CPU = torch.device("cpu")


def timed(*peers: Peer, steps: int = 3) -> list[PeerTiming]:
    run: Any = SimpleNamespace(micro_batch=8)
    return list(time_peers(peers, run, Batch({}, 8), CPU, steps))


def test_a_peer_is_timed_after_its_warm_up():
    ran = []
    (found,) = timed(Peer("other", lambda run, example, device: lambda: ran.append(run.micro_batch)))
    assert ran == [8] * (WARM_UP + 3)
    assert found.step_ms is not None
    assert found.step_ms >= 0
    assert re.fullmatch(r"[\d.]+ ms, [\d.,]+ samples/s; ours is [\d.]+ times as fast", found.text(1.0))


@pytest.mark.slow_cases("error1")
@pytest.mark.parametrize("error", [ImportError("no module named 'other'\nmore"), RuntimeError("out of memory")])
def test_a_peer_that_cannot_run_is_reported_and_the_next_one_runs(error):
    def start(*given: object) -> Any:
        raise error

    first, second = timed(Peer("broken", start), Peer("other", lambda *given: int))
    assert first.step_ms is None
    assert first.text(1.0) == f"not measured: {str(error).splitlines()[0]}"
    assert second.step_ms is not None


@pytest.mark.parametrize(("only", "start"), [("peer", bench._peers), ("ops", bench._bench_operations)])
def test_one_gpu_is_measured(only, start):
    run = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigError, match=f"bench.only={only}: measures one GPU"):
        start(cli.workload_class("stable_diffusion"), run, BenchConfig(only=only))


@pytest.mark.parametrize("name", [name for name in sorted(WORKLOADS) if cli.workload_class(name).peers])
def test_names_of_peers_are_unique(name):
    peers = importlib.import_module(cli.workload_class(name).peers).PEERS
    assert len({peer.name for peer in peers}) == len(peers) > 0


def test_the_step_is_measured_before_its_peers(tmp_path, monkeypatch, capsys):
    peers = SimpleNamespace(PEERS=(Peer("other software", lambda run, example, device: example.tensors.copy),))
    monkeypatch.setattr(cli.workload_class("bert"), "peers", "peers_of_a_test")
    monkeypatch.setitem(importlib.sys.modules, "peers_of_a_test", peers)  # type: ignore[attr-defined]
    report = tmp_path / "report.json"
    few = ["bench.steps=1", "bench.warmup_steps=0", f"bench.report={report}"]
    assert cli.run(["bench", "benchmark=bert", "scale=test", "device=cpu", "bench.only=peer", *few]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^step +[\d.]+ ms.*^peer: other software +[\d.]+ ms, ", printed, re.MULTILINE | re.DOTALL)
    (peer,) = json.loads(report.read_text())["peers"]
    assert peer["name"] == "other software"


def test_a_workload_without_peers_is_an_error(capsys):
    assert cli.run(["bench", "benchmark=bert", "scale=test", "device=cpu", "bench.only=peer"]) == ConfigError.exit_code
    assert "is compared with no other software" in capsys.readouterr().err


def test_the_memory_of_a_peer_is_free_when_the_next_one_starts():
    """Also if the peer fails after it was built, for example because memory is exhausted."""
    kept = []

    def failing(*given: object) -> Any:
        model = torch.nn.Linear(2, 2)
        kept.append(weakref.ref(model))

        def step() -> None:
            raise RuntimeError(f"out of memory: {model}")

        return step

    def alive(*given: object) -> Any:
        assert [reference() for reference in kept] == [None]
        return int

    first, second = timed(Peer("large", failing), Peer("other", alive))
    assert first.step_ms is None
    assert second.step_ms is not None
