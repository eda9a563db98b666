"""Stages from raw days to the two files that a run reads; every stage can continue after an interruption.

Days are parsed one by one and numbered feature by feature. Then training samples are shuffled, and all samples are
written with all of their ids. The caller deletes the intermediate files with their folder.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.manifest import FileEntry, file_entry
from common.data.preparation import require_space
from common.data.row_output import RowOutput
from common.data.stages import Record, Stages
from common.errors import DataError
from common.recommendation.criteo.preparation import multi_hot, numbering, parquet_parts, published_set, shuffle
from common.recommendation.criteo.preparation.days import Day, Samples, parse_day, parsed
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.preparation.raw_days import MULTI_HOT, PARQUET, RawDays
from common.recommendation.criteo.sample_rows import CATEGORICAL, IDS, WORD

BLOCK_ROWS = 1 << 16
"""Rows whose ids are expanded at a time."""


@dataclass(frozen=True)
class CriteoFiles:
    """Result of the stages.

    Attributes:
        files: the files in the prepared folder.
        table_rows: for each table, a number above all of its ids.
        train_samples, eval_samples: numbers of samples in the files.
    """

    files: dict[str, FileEntry]
    table_rows: tuple[int, ...]
    train_samples: int
    eval_samples: int


@dataclass(frozen=True)
class Encoder:
    """Converts rows with one id per feature to rows of the prepared files.

    Attributes:
        folder: folder of the id tables (:func:`multi_hot.write_id_tables`).
        table_rows, hotness: rows and ids per sample of each table.
    """

    folder: Path
    table_rows: tuple[int, ...]
    hotness: tuple[int, ...]

    def write(self, rows: NDArray[np.int32], output: RowOutput, position: int, rounded: bool) -> None:
        """Convert rows and write them.

        Args:
            rows: (N, 40), label, numbers and one id per feature.
            position: number of the first row in ``output``.
            rounded: whether to round ids to float32 first.
        """
        expand = multi_hot.MultiHot(self.folder, self.table_rows, self.hotness)
        for first in range(0, len(rows), BLOCK_ROWS):
            block = rows[first : first + BLOCK_ROWS]
            ids = block[:, IDS:].astype(np.float32).astype(np.int32) if rounded else block[:, IDS:]
            output.write(position + first, np.concatenate([block[:, :IDS], expand(ids)], axis=1))


def write_bucket(
    pieces: Sequence[Path], first: int, last: int, encoder: Encoder, output: RowOutput, rounded: bool
) -> Record:
    """Write training rows ``first`` to ``last``; a task of a stage.

    Args:
        pieces: files of the bucket (:func:`shuffle.read_bucket`).
    """
    encoder.write(shuffle.read_bucket(pieces, first, last), output, first, rounded)
    return {"rows": last - first}


def write_evaluation(
    samples: Samples, before: int, first: int, last: int, encoder: Encoder, output: RowOutput
) -> Record:
    """Write evaluation rows ``first`` to ``last``, in the order of the samples; a task of a stage.

    Args:
        samples: all samples, training samples first.
        before: number of training samples.
    """
    encoder.write(samples.rows(before + first, before + last), output, first, False)
    return {"rows": last - first}


def checksum(path: Path, md5: bool) -> Record:
    """Return size and SHA-256 of a file, and its MD5 if requested."""
    return asdict(file_entry(path, md5))


class CriteoPipeline:
    """Preparation of Criteo's training and evaluation file from raw files, in stages that resume after an interruption.

    Args:
        raw: the raw folder, with the published days or the published multi-hot set.
        work_dir: folder for intermediate files and the records of the stages.
        memory: bytes per process for rows; in addition, the order of the training samples needs 8 bytes per sample.
    """

    def __init__(
        self, raw: RawDays, encoding: Encoding, data_dir: Path, work_dir: Path, workers: int, memory: int
    ) -> None:
        self.raw, self.encoding = raw, encoding
        self.data_dir, self.work_dir = data_dir, work_dir
        self.rows_at_once = max(1, memory // shuffle.BYTES_PER_ROW)
        self.stages = Stages(work_dir / "records", workers)

    def run(self) -> CriteoFiles:
        """Run all remaining stages, and return the files and counts.

        Raises:
            DataError: raw files are damaged, or the disk is too small.
        """
        with self.stages:
            table_rows, train, evaluation = self._published() if self.raw.form == MULTI_HOT else self._from_days()
            outputs = (train, evaluation)
            with_md5 = self.encoding.sample_format.checksums
            tasks = {output.path.name: (output.path, output.path.name in with_md5) for output in outputs}
            sums = self.stages.run("checksums", tasks, checksum)
            files = {name: FileEntry(**entry) for name, entry in sums.items()}
            return CriteoFiles(files, table_rows, train.rows, evaluation.rows)

    def _from_days(self) -> tuple[tuple[int, ...], RowOutput, RowOutput]:
        samples = Samples(self._parsed(), self.work_dir / "ids")
        encoding, run = self.encoding, self.stages.run
        numbered = run(
            "numbers",
            {f"{k}": (samples, k, encoding.first_id, encoding.numbered_modulo) for k in range(CATEGORICAL)},
            numbering.number_feature,
        )
        for day in samples.days:
            day.delete_raw()
        table_rows = encoding.rows_for(tuple(record["categories"] for record in numbered.values()))
        train, evaluation = self._outputs([day.rows for day in samples.days])
        self._begin((train, evaluation), ("buckets", "evaluation"), train.rows * (shuffle.WORDS + 1) * WORD)
        drawn = self.work_dir / "multi_hot"
        run("multi-hot", {"all": (drawn, table_rows, encoding.hotness)}, multi_hot.write_id_tables)
        encoder = Encoder(drawn, table_rows, encoding.hotness)
        self._shuffle(samples, encoder, train)
        parts = enumerate(self._parts(evaluation.rows))
        run(
            "evaluation",
            {f"{n}": (samples, train.rows, *part, encoder, evaluation) for n, part in parts},
            write_evaluation,
        )
        evaluation.finish()
        return table_rows, train, evaluation

    def _parsed(self) -> tuple[Day, ...]:
        if self.raw.form == PARQUET:
            self._count("parts", parquet_parts.day_rows)
        folders = [self.work_dir / "days" / f"{day}" for day in range(len(self.raw.files))]
        tasks = {f"{day}": (self.raw.files[day], folders[day], self.encoding) for day in range(len(folders))}
        days = parsed(folders, list(self.stages.run("days", tasks, parse_day).values()))
        for number, day in enumerate(days):
            self.raw.check_rows(number, day.rows)
        return days

    def _count(self, stage: str, day_rows: Callable[[Sequence[Path]], Record]) -> list[int]:
        """Return the numbers of samples of the days, which have not been read yet."""
        tasks = {f"{day}": (files,) for day, files in enumerate(self.raw.files)}
        counts = [int(record["rows"]) for record in self.stages.run(stage, tasks, day_rows).values()]
        for day, count in enumerate(counts):
            self.raw.check_rows(day, count)
        return counts

    def _shuffle(self, samples: Samples, encoder: Encoder, train: RowOutput) -> None:
        run, positions = self.stages.run, self.work_dir / "places"
        run("order", {"all": (positions, train.rows)}, shuffle.write_positions)
        parts = self._parts(train.rows)
        pieces = [self.work_dir / "pieces" / f"{number}" for number in range(len(parts))]
        cut = {f"{n}": (samples, positions, *part, pieces[n]) for n, part in enumerate(parts)}
        run("pieces", cut, shuffle.write_piece)
        filled = {f"{n}": (pieces, *part, encoder, train, self.encoding.rounded) for n, part in enumerate(parts)}
        run("buckets", filled, write_bucket)
        train.finish()

    def _published(self) -> tuple[tuple[int, ...], RowOutput, RowOutput]:
        if not self.encoding.sample_format.logarithms:
            raise DataError(
                f"{self.raw.folder} is multi-hot and has logarithms; this benchmark needs the days as text or parquet"
            )
        if self.encoding.reduced:
            raise DataError(f"{self.raw.folder} is multi-hot: smaller tables need the days as text or parquet")
        table_rows = tuple((self.raw.synthetic or {}).get("table_rows", self.encoding.table_rows))
        counts = self._count("counts", published_set.day_rows)
        train, evaluation = self._outputs(counts)
        self._begin((train, evaluation), ("training", "evaluation"), 0)
        begins = [*itertools.accumulate(counts, initial=0)]
        hotness = self.encoding.hotness
        for stage, output, days in (
            ("training", train, range(len(counts) - 1)),
            ("evaluation", evaluation, range(len(counts) - 1, len(counts))),
        ):
            tasks: dict[str, tuple[Any, ...]] = {}
            for day in days:
                before = begins[day] - begins[days.start]
                for first, last in self._parts(min(counts[day], output.rows - before)):
                    block = (self.raw.files[day], first, last, output, before + first, table_rows, hotness)
                    tasks[f"{day}-{first}"] = block
            self.stages.run(stage, tasks, published_set.convert_block)
            output.finish()
        return table_rows, train, evaluation

    def _outputs(self, rows: Sequence[int]) -> tuple[RowOutput, RowOutput]:
        words, chosen = IDS + sum(self.encoding.hotness), self.encoding.sample_format
        return (
            RowOutput(self.data_dir / chosen.train_file, "<i4", (sum(rows[:-1]), words), npy=False),
            RowOutput(self.data_dir / chosen.eval_file, "<i4", (-(-rows[-1] // 2), words), npy=False),
        )

    def _begin(self, outputs: Sequence[RowOutput], stages: Sequence[str], between: int) -> None:
        """Reserve space for output files without known rows, and delete old records about them."""
        missing = [
            (output, stage)
            for output, stage in zip(outputs, stages, strict=True)
            if not (output.begun and (self.stages.folder / stage).exists())
        ]
        if missing:
            require_space(self.data_dir, between + sum(output.size for output, _ in missing))
        for output, stage in missing:
            for stale in (stage, "checksums"):
                shutil.rmtree(self.stages.folder / stale, ignore_errors=True)
            output.begin()

    def _parts(self, rows: int) -> list[tuple[int, int]]:
        return [(first, min(first + self.rows_at_once, rows)) for first in range(0, rows, self.rows_at_once)]
