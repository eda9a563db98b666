"""The tables of DLRM-DCNv2 as the rules list them: rows and hotness of the 26 features."""

from __future__ import annotations

from common.recommendation.tables import Table, Tables

ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
CRITEO = Tables(tuple(Table(f"t{n}", rows, hot) for n, (rows, hot) in enumerate(zip(ROWS, HOTNESS, strict=True))), 128)
ROW_BYTES = 128 * 8
"""fp32 weights and Adagrad's state."""
