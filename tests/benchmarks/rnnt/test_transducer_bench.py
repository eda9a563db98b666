"""What the benchmark of the joint network and its loss measures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.rnnt.ops import joint, transducer_loss
from benchmarks.rnnt.ops.bench_rows import BenchRows, bench_rows
from benchmarks.rnnt.ops.joint import bench_cases as joint_cases
from benchmarks.rnnt.ops.transducer_loss import bench_cases as loss_cases
from benchmarks.rnnt.packed_rows import packed_rows
from common.ops.bench import cases
from tests.benchmarks.rnnt.transducer_oracle import case
from tests.references import run_references

OPERATIONS = (joint_cases, loss_cases)


def small_rows(utterances: int, device: torch.device) -> BenchRows:
    given = bench_rows(1, device)
    facts = replace(given.facts, joint_width=8, classes=16)
    made = case([5, 3], [3, 2], classes=16)
    return BenchRows(made.rows, made.tokens_BU, 29, facts)


@pytest.fixture
def small_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows, and the references in the place of all others."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    for module in OPERATIONS:
        monkeypatch.setattr(module, "bench_rows", small_rows)
    run_references(monkeypatch, joint.JOINT, transducer_loss.TRANSDUCER_LOSS)


def test_every_operation_is_measured() -> None:
    names = [entry.name for operation in OPERATIONS for entry in operation.entries()]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == {"joint", "transducer_loss", "joint_and_loss", "loss_of_logits"}


def test_every_tile_can_be_swept() -> None:
    pytest.importorskip("triton")
    from benchmarks.rnnt.ops.joint import triton as of_joint
    from benchmarks.rnnt.ops.transducer_loss import triton as of_loss

    for cases_of, operation in zip(OPERATIONS, (of_joint, of_loss), strict=True):
        sweeps = cases_of.sweeps().values()
        assert {sweep.key for sweep in sweeps if sweep.table is operation.TILES} == set(operation.TILES)


@pytest.mark.usefixtures("small_on_the_cpu")
def test_every_pass_runs() -> None:
    for entry in (entry for operation in OPERATIONS for entry in operation.entries()):
        if not entry.name.endswith("torchaudio"):
            for own in entry.build(2, torch.float32):
                own.run()
                assert own.bytes > 0 or own.name == "choose"


def test_a_micro_batch_has_librispeechs_rows_and_room_for_more() -> None:
    given = bench_rows(192, torch.device("cpu"))
    assert given.used == int(given.rows.offsets[-1])
    assert given.used == pytest.approx(2.45e6, rel=0.06)
    assert given.used < given.rows.capacity < 1.35 * given.used


def test_slices_for_torchaudio_hold_every_utterance_and_stay_below_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_cases, "MOST_LOGITS", 5 * 4 * 16 * 2)
    lengths = torch.tensor([5, 5, 4, 2, 2]), torch.tensor([3, 2, 3, 1, 0])
    given = small_rows(2, torch.device("cpu"))
    tokens_BU = torch.zeros((5, 3), dtype=torch.int32)
    parts = list(loss_cases.slices(given._replace(rows=packed_rows(*lengths, 5, 3), tokens_BU=tokens_BU)))
    assert [tuple(part[0].shape) for part in parts] == [(2, 5, 4, 16), (2, 4, 4, 16), (1, 2, 1, 16)]
    assert torch.cat([part[2] for part in parts]).tolist() == lengths[0].tolist()
    assert torch.cat([part[3] for part in parts]).tolist() == lengths[1].tolist()
    assert max(math.prod(part[0].shape) for part in parts) <= loss_cases.MOST_LOGITS
