"""Plan an embedding placement of DLRM-DCNv2 that keeps frequent rows on every rank.

Run ``python -m benchmarks.dlrm_dcnv2.hybrid_plan --help``. Configuration overrides follow the options, for example
``scale=8xH200 data_dir=/data/criteo embeddings.plan=row_wise``.
"""

from __future__ import annotations

import sys

from benchmarks.dlrm_dcnv2.workload import DlrmDcnv2
from common.recommendation import hybrid_planning

if __name__ == "__main__":
    hybrid_planning.main("dlrm_dcnv2", DlrmDcnv2, sys.argv[1:])
