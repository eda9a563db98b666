"""What the benchmark of DLRM's operations measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.dlrm.ops import dot_interaction
from benchmarks.dlrm.ops.dot_interaction.bench_cases import SAMPLES, entries, sweeps
from common.ops.bench import cases
from common.run.kernels import kind_of
from tests.references import run_references


def test_every_pass_of_every_implementation_runs_at_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernels, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, dot_interaction.DOT_INTERACTION)
    for entry in entries():
        passes = entry.build(SAMPLES, torch.bfloat16)
        for each in passes:
            each.run()
        assert sum(each.flops for each in passes) == SAMPLES * 6 * 44_928
        assert [each.bytes / SAMPLES for each in passes] == [6912 + 960, 2 * 6912 + 960]
    assert [entry.name for entry in entries() if entry.calls] == ["dot_interaction triton"]


def test_every_tile_can_be_swept() -> None:
    triton = pytest.importorskip("benchmarks.dlrm.ops.dot_interaction.triton")
    assert {sweep.key for sweep in sweeps().values()} == set(triton.TILES)
    for sweep in sweeps().values():
        assert [tuple(triton.Tile(*choice)) for choice in sweep.choices] == list(sweep.choices)


def test_every_kernel_has_a_kind() -> None:
    source = Path(dot_interaction.__file__).with_name("kernels.py").read_text()
    kernels = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    assert kernels
    assert {kind_of(kernel, dot_interaction.DOT_INTERACTION.kernel_names) for kernel in kernels} == {"dot interaction"}
