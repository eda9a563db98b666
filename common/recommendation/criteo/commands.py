"""``mlperf-suite download | generate | prepare | verify`` for click logs, shared by the benchmarks that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from common.data.commands import DataCommands, cores, option
from common.data.manifest import Manifest
from common.errors import ConfigError
from common.recommendation.criteo import adopt, stand_in
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import PARQUET
from common.recommendation.criteo.prepare import prepare, published_logs, verify
from common.recommendation.criteo.prepared import FORM, TABLE_ROWS
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.stand_in import Generated, Request


def click_log_commands(
    benchmark: str,
    sample_format: SampleFormat,
    encoding: Callable[[], Encoding],
) -> DataCommands:
    """Return the data commands of a benchmark.

    Args:
        benchmark: name of the benchmark.
        sample_format: format of the prepared data.
        encoding: returns the benchmark's encoding, which depends on its dataset constants; called only when needed.
    """
    defaults = Request()
    return DataCommands(
        benchmark,
        raw="Criteo's click logs, or the published multi-hot set",
        prepared="prepared samples",
        real="Criteo's click logs",
        generate=functools.partial(_generate, encoding),
        prepare=functools.partial(_prepare, encoding),
        verify=functools.partial(_verify, sample_format),
        remarks=_remarks,
        adopt=functools.partial(_adopt, encoding) if sample_format.checksums else None,
        published=published_logs(sample_format),
        workers={"generate": cores, "prepare": cores, "verify": cores},
        options={
            "prepare": (
                option("--table-cap", type=int, help="most rows of a table (default: the benchmark's)"),
                option("--memory-gb", type=float, default=_usual_memory_gb(), help="for rows, of all processes"),
            ),
            "generate": (
                option("--train", type=int, default=defaults.train, help="samples of all days but the last"),
                option("--eval", dest="evaluation", type=int, default=defaults.evaluation, help="evaluated samples"),
                option("--cap", type=int, default=defaults.cap, help="most categories of a feature"),
                option(
                    "--auc", dest="bayes_auc", type=float, default=defaults.bayes_auc, help="of the best classifier"
                ),
                option("--click-rate", type=float, default=defaults.click_rate),
                option("--seed", type=int, default=defaults.seed),
            ),
        },
    )


def _generate(encoding: Callable[[], Encoding], raw_dir: Path, workers: int, **asked: Any) -> Generated:
    return stand_in.generate(raw_dir, encoding().table_rows, Request(**asked), workers)


def _prepare(
    encoding: Callable[[], Encoding],
    raw_dir: Path,
    data_dir: Path,
    workers: int,
    table_cap: int | None,
    memory_gb: float,
) -> Manifest:
    if not memory_gb > 0:
        raise ConfigError(f"--memory-gb={memory_gb:g}: more than nothing")
    chosen = encoding()
    if table_cap is not None:
        if table_cap < 1:
            raise ConfigError(f"--table-cap={table_cap}: at least 1")
        chosen = chosen.capped(table_cap)
    return prepare(raw_dir, data_dir, chosen, workers, int(memory_gb * 1e9))


def _adopt(encoding: Callable[[], Encoding], folder: Path, data_dir: Path, workers: int) -> Manifest:
    return adopt.adopt(folder, data_dir, encoding(), workers)


def _verify(sample_format: SampleFormat, data_dir: Path, workers: int) -> Manifest:
    return verify(data_dir, sample_format, workers)


def _remarks(made: Manifest, **options: Any) -> Iterator[str]:
    yield f"table rows: {made.source[TABLE_ROWS]}"
    if made.source.get(FORM) == PARQUET:
        yield (
            "The days were read from parquet files. Whether their rows are in the order of the original text is not "
            "known; categories are numbered in it, and the order of training and the evaluated samples follow from it."
        )


def _usual_memory_gb() -> int:
    return int(min(64, max(1, psutil.virtual_memory().total / 4e9)))
