"""What the benchmark of DLRM-DCNv2's operations measures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.dlrm_dcnv2.ops import cross_network
from benchmarks.dlrm_dcnv2.ops.cross_network.bench_cases import SAMPLES, entries, sweeps
from common.ops.bench import cases
from common.run.kernels import kind_of
from tests.references import run_references


def test_every_pass_of_every_implementation_runs_at_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the reference stands in for the kernels, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(monkeypatch, cross_network.CROSS_NETWORK)
    for entry in entries():
        passes = entry.build(SAMPLES, torch.bfloat16)
        for each in passes:
            each.run()
        assert sum(each.flops for each in passes) == SAMPLES * 6 * 10_616_832
        assert passes[1].bytes > passes[0].bytes > 15 * SAMPLES * 3456 * 2
    assert [entry.name for entry in entries() if entry.calls] == ["cross_network triton"]


def test_every_tile_can_be_swept() -> None:
    triton = pytest.importorskip("benchmarks.dlrm_dcnv2.ops.cross_network.triton")
    assert {id(sweep.table) for sweep in sweeps().values()} == {id(triton.TILES), id(triton.PRODUCT_TILES)}
    for sweep in sweeps().values():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices)


def test_every_kernel_has_a_kind() -> None:
    source = Path(cross_network.__file__).with_name("kernels.py").read_text()
    kernels = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    assert kernels
    assert {kind_of(kernel, cross_network.CROSS_NETWORK.kernel_names) for kernel in kernels} == {"cross network"}
