"""Pictures per second of SSD300's evaluation on a GPU: ``python -m benchmarks.ssd300.evaluate_bench``.

Pictures are noise on the device, 4,096 of them, and the heads random: what is timed is forward passes, boxes,
suppression and gathering, captured as in a run. Arguments are overrides, such as ``precision=bf16`` or
``reader.eval_batch=64``.
"""

from __future__ import annotations

import sys

from benchmarks.ssd300.workload import Ssd300Detection
from common.detection import evaluation_bench

if __name__ == "__main__":
    evaluation_bench.main("ssd300", Ssd300Detection, sys.argv[1:])
