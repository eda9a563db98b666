"""Download, generate, prepare and verify DLRM-DCNv2's data: Criteo's click logs, shuffled and made multi-hot.

Categories are numbered from 2 on through all days and taken modulo of their table's rows; training samples are those of
days 0 to 22 in the order of the published set, evaluation samples the first half of day 23. The steps and their details
are those of mlcommons/training, recommendation_v2/torchrec_dlrm, so that the files are those that others read.
"""

from __future__ import annotations

from benchmarks.dlrm_dcnv2.data import FORMAT
from common.data.sources import read_sources
from common.mlperf.fixed import benchmark_settings
from common.recommendation.criteo.commands import click_log_commands
from common.recommendation.criteo.preparation.encoding import Encoding

PUBLISHED_MD5 = {
    file.name: (file.checksum or "").removeprefix("md5:") for file in read_sources("dlrm_dcnv2")["prepared"].files
}
"""Of MLCommons' ``dlrmv2-preprocessed-criteo-click-logs``, whose files are those that ``prepare`` writes."""


def encoding() -> Encoding:
    """What the benchmark makes of raw click logs."""
    facts = benchmark_settings("dlrm_dcnv2")["facts"]
    return Encoding(
        FORMAT,
        tuple(facts["hotness"]),
        tuple(facts["table_rows"]),
        largest=max(facts["table_rows"]),
        first_id=2,
        numbered_modulo=None,
        rounded=True,
    )


COMMANDS = click_log_commands("dlrm_dcnv2", FORMAT, encoding, PUBLISHED_MD5)
