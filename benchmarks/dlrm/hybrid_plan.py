"""A plan of DLRM with frequent rows on every rank: ``python -m benchmarks.dlrm.hybrid_plan --help``.

Beside the options come overrides, such as ``scale=8xH200 data_dir=/data/criteo embeddings.plan=row_wise``.
"""

from __future__ import annotations

import sys

from benchmarks.dlrm.workload import Dlrm
from common.recommendation import hybrid_planning

if __name__ == "__main__":
    hybrid_planning.main("dlrm", Dlrm, sys.argv[1:])
