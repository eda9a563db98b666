"""DLRM's data: prepared click logs with one id of each table and counts, 160 bytes a sample."""

from __future__ import annotations

from common.recommendation.criteo.sample_rows import SampleFormat

FORMAT = SampleFormat(
    name="dlrm-criteo/1",
    logarithms=False,
    train_file="train_data.bin",
    eval_file="test_data.bin",
    command="mlperf-suite prepare benchmark=dlrm --raw-dir RAW --data-dir DATA",
)
