"""What the benchmark of Stable Diffusion's operations measures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.stable_diffusion.ops import noising, velocity_loss
from benchmarks.stable_diffusion.ops.bench import entries, sweeps
from common.ops.bench import cases
from common.ops.implementation import always
from common.run.kernels import kind_of

OPERATIONS = (noising, velocity_loss)


def test_every_pass_of_every_implementation_runs_at_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the plain implementation stands in for the kernels, which have no such version."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    for operation in OPERATIONS:
        implementations = operation.IMPLEMENTATIONS
        stand_in = replace(implementations["triton"], function=implementations["torch"].function, unsupported=always)
        monkeypatch.setitem(implementations, "triton", stand_in)
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
    for operation in OPERATIONS:
        source = Path(operation.__file__).with_name("kernels.py").read_text()
        kernels = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
        assert kernels
        assert {kind_of(kernel, operation.KERNEL_NAMES) for kernel in kernels} == {"noise and loss"}
