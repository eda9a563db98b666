"""Format of DLRM-DCNv2's prepared click logs: multi-hot ids, and logarithms of counts; 912 bytes per sample."""

from __future__ import annotations

from common.data.sources import read_sources
from common.recommendation.criteo.sample_rows import SampleFormat

FORMAT = SampleFormat(
    name="dlrm-dcnv2-criteo/1",
    logarithms=True,
    train_file="train_data.bin",
    eval_file="val_data.bin",
    command="mlperf-suite prepare benchmark=dlrm_dcnv2 --raw-dir RAW --data-dir DATA",
    checksums={
        file.name: (file.checksum or "").removeprefix("md5:") for file in read_sources("dlrm_dcnv2")["prepared"].files
    },
)
