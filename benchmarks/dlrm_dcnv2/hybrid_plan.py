"""A plan of DLRM-DCNv2 with frequent rows on every rank: ``python -m benchmarks.dlrm_dcnv2.hybrid_plan --help``.

Beside the options come overrides, such as ``scale=8xH200 data_dir=/data/criteo embeddings.plan=row_wise``.
"""

from __future__ import annotations

import sys

from benchmarks.dlrm_dcnv2.workload import DlrmDcnv2
from common.recommendation import hybrid_planning

if __name__ == "__main__":
    hybrid_planning.main("dlrm_dcnv2", DlrmDcnv2, sys.argv[1:])
