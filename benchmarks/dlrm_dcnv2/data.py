"""DLRM-DCNv2's data: prepared click logs with multi-hot ids and logarithms, 912 bytes a sample."""

from __future__ import annotations

from common.recommendation.criteo.sample_rows import SampleFormat

FORMAT = SampleFormat(
    name="dlrm-dcnv2-criteo/1",
    logarithms=True,
    train_file="train_data.bin",
    eval_file="val_data.bin",
    command="mlperf-suite prepare benchmark=dlrm_dcnv2 --raw-dir RAW --data-dir DATA",
    checksums={
        "train_data.bin": "4d48daf07cc244f6fa933b832d7fe5a3",
        "val_data.bin": "c7ca591ad3fd2b09b75d99fa4fc210e2",
    },
)
"""MD5s: NVIDIA's submissions of DLRM-DCNv2; that of val_data.bin also in MLCommons' store."""
