"""Pictures per second of RetinaNet's evaluation on a GPU: ``python -m benchmarks.retinanet.evaluate_bench``.

Pictures are noise on the device, 4,096 of them, and the heads random: what is timed is forward passes, boxes,
suppression and gathering, captured as in a run. Arguments are overrides, such as ``precision=bf16`` or
``reader.eval_batch=64``.
"""

from __future__ import annotations

import sys

from benchmarks.retinanet.workload import RetinaNetDetection
from common.detection import evaluation_bench

if __name__ == "__main__":
    evaluation_bench.main("retinanet", RetinaNetDetection, sys.argv[1:])
