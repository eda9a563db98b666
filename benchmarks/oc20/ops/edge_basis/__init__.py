"""Basis functions of an edge: of its distance, with two derivatives, and of its direction."""

from __future__ import annotations

from benchmarks.oc20.ops.edge_basis.reference import edge_basis_reference
from common.ops.operation import Operation
from common.ops.triton_support import triton_kernels

EDGE_BASIS = Operation(
    "edge_basis",
    edge_basis_reference,
    {"triton": triton_kernels("benchmarks.oc20.ops.edge_basis.triton:edge_basis")},
    kernel_names=(("basis functions", r"^edge_(functions|harmonics)_"),),
    cases="benchmarks.oc20.ops.edge_basis.cases",
)
"""Implementations of :func:`edge_basis_reference`, which has hundreds of small kernels with its derivatives."""
