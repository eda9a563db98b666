"""What the benchmark of Stable Diffusion's operations measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.stable_diffusion.ops import noising, velocity_loss
from benchmarks.stable_diffusion.ops.bench import entries, sweeps
from common.ops.bench import cases
from common.run.kernels import kind_of
from tests.references import run_references


def test_every_pass_of_every_implementation_runs_at_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernels, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, noising.NOISING, velocity_loss.VELOCITY_LOSS)
    elements = 32 * 4 * 64 * 64
    moved = {"noising": [elements * (8 + 2 + 4)], "velocity_loss": [elements * (2 + 4), elements * (2 + 2 + 4)]}
    for entry in entries():
        passes = entry.build(32, torch.float16)
        for each in passes:
            each.run()
        assert [each.bytes for each in passes] == moved[entry.name.split()[0]]
    assert [entry.name for entry in entries() if entry.calls] == ["noising triton", "velocity_loss triton"]


def test_every_tile_can_be_swept() -> None:
    noising_triton = pytest.importorskip("benchmarks.stable_diffusion.ops.noising.triton")
    loss_triton = pytest.importorskip("benchmarks.stable_diffusion.ops.velocity_loss.triton")
    assert {id(sweep.table) for sweep in sweeps().values()} == {id(noising_triton.TILES), id(loss_triton.TILES)}
    for sweep in sweeps().values():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices)


def test_every_kernel_has_a_kind() -> None:
    for package, operation in ((noising, noising.NOISING), (velocity_loss, velocity_loss.VELOCITY_LOSS)):
        source = Path(package.__file__).with_name("kernels.py").read_text()
        kernels = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
        assert kernels
        assert {kind_of(kernel, operation.kernel_names) for kernel in kernels} == {"noise and loss"}
