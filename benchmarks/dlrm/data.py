"""Format of DLRM's prepared click logs: one id per table, and counts; 160 bytes per sample."""

from __future__ import annotations

from common.recommendation.criteo.sample_rows import SampleFormat

FORMAT = SampleFormat(
    name="dlrm-criteo/1",
    logarithms=False,
    train_file="train_data.bin",
    eval_file="test_data.bin",
    command="mlperf-suite prepare benchmark=dlrm --raw-dir RAW --data-dir DATA",
)
