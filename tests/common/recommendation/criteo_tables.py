"""Tables of DLRM-DCNv2, with the rows and hotness of the 26 features that the rules fix."""

from __future__ import annotations

from common.mlperf.fixed import benchmark_settings
from common.recommendation.config import criteo_tables

FACTS = benchmark_settings("dlrm_dcnv2")["facts"]
ROWS, HOTNESS = tuple(FACTS["table_rows"]), tuple(FACTS["hotness"])
CRITEO = criteo_tables(ROWS, HOTNESS, 128)
ROW_BYTES = 128 * 8
"""fp32 weights and Adagrad's state."""
