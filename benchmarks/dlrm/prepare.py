"""Download, generate, prepare and verify DLRM's data: Criteo's click logs, shuffled, with one id per table.

Raw categories are taken modulo 40,000,000 (facebookresearch/dlrm, ``--max-ind-range=40000000``), and the results are
numbered from 0 over all days, so a table has one row per number. Training uses the samples of days 0 to 22,
evaluation the first half of day 23.
"""

from __future__ import annotations

from benchmarks.dlrm.data import FORMAT
from common.mlperf.fixed import benchmark_settings
from common.recommendation.criteo.commands import click_log_commands
from common.recommendation.criteo.preparation.encoding import Encoding

CATEGORY_RANGE = 40_000_000


def encoding() -> Encoding:
    """Return the rules that convert raw click logs to the prepared format."""
    table_rows = tuple(benchmark_settings("dlrm")["facts"]["table_rows"])
    hotness = (1,) * len(table_rows)
    return Encoding(
        FORMAT, hotness, table_rows, largest=CATEGORY_RANGE, first_id=0, numbered_modulo=CATEGORY_RANGE, rounded=False
    )


COMMANDS = click_log_commands("dlrm", FORMAT, encoding)
