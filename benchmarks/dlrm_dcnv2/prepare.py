"""Download, generate, prepare and verify DLRM-DCNv2's data: Criteo's click logs, shuffled and made multi-hot.

Categories are numbered from 2 over all days, then taken modulo the rows of their table. Training uses the samples of
days 0 to 22 in the order of the published set, evaluation the first half of day 23. The steps follow
mlcommons/training, recommendation_v2/torchrec_dlrm, in all details, so the files are identical to those of other
submitters.
"""

from __future__ import annotations

from benchmarks.dlrm_dcnv2.data import FORMAT
from common.mlperf.fixed import benchmark_settings
from common.recommendation.criteo.commands import click_log_commands
from common.recommendation.criteo.preparation.encoding import Encoding


def encoding() -> Encoding:
    """Return the rules that convert raw click logs to the prepared format."""
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


COMMANDS = click_log_commands("dlrm_dcnv2", FORMAT, encoding)
