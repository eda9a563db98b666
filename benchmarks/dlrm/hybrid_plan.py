"""Plan an embedding placement of DLRM that keeps frequent rows on every rank.

Run ``python -m benchmarks.dlrm.hybrid_plan --help``. Configuration overrides follow the options, for example
``scale=8xH200 data_dir=/data/criteo embeddings.plan=row_wise``.
"""

from __future__ import annotations

import sys

from benchmarks.dlrm.workload import Dlrm
from common.recommendation import hybrid_planning

if __name__ == "__main__":
    hybrid_planning.main("dlrm", Dlrm, sys.argv[1:])
