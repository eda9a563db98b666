"""``mlperf-suite download | generate | prepare | verify`` for click logs, shared by the benchmarks that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil

from common.data.commands import DataCommands
from common.data.manifest import Manifest
from common.data.options import Option
from common.recommendation.criteo import adopt, synthetic
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import PARQUET
from common.recommendation.criteo.prepare import prepare, published_logs, verify
from common.recommendation.criteo.prepared import FORM, TABLE_ROWS
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.synthetic import SyntheticClicks


def click_log_commands(
    benchmark: str,
    sample_format: SampleFormat,
    encoding: Callable[[], Encoding],
) -> DataCommands:
    """Return the data commands of a benchmark."""

    def generated(raw_dir: Path, options: SyntheticClicks, workers: int) -> str:
        return synthetic.generate(raw_dir, encoding().table_rows, options, workers)

    def prepared(
        raw_dir: Path,
        data_dir: Path,
        workers: int,
        table_cap: Annotated[
            int | None, Option("largest number of rows of a table (default: that of the benchmark)", least=1)
        ] = None,
        memory_gb: Annotated[float, Option("memory for rows, in all processes", least=1e-9)] = _usual_memory_gb(),
    ) -> Manifest:
        chosen = encoding() if table_cap is None else encoding().capped(table_cap)
        return prepare(raw_dir, data_dir, chosen, workers, int(memory_gb * 1e9))

    def adopted(folder: Path, data_dir: Path, workers: int) -> Manifest:
        return adopt.adopt(folder, data_dir, encoding(), workers)

    def verified(data_dir: Path, workers: int) -> Manifest:
        return verify(data_dir, sample_format, workers)

    return DataCommands(
        benchmark,
        raw="Criteo's click logs, or the published multi-hot set",
        prepared="prepared samples",
        real="Criteo's click logs",
        generate=generated,
        prepare=prepared,
        verify=verified,
        remarks=_remarks,
        adopt=adopted if sample_format.checksums else None,
        published=published_logs(sample_format),
    )


def _remarks(made: Manifest, **options: Any) -> Iterator[str]:
    yield f"table rows: {made.source[TABLE_ROWS]}"
    if made.source.get(FORM) == PARQUET:
        yield (
            "The days were read from parquet files. Whether their rows are in the order of the original text is not "
            "known; categories are numbered in it, and the order of training and the evaluated samples follow from it."
        )


def _usual_memory_gb() -> int:
    return int(min(64, max(1, psutil.virtual_memory().total / 4e9)))
