"""Read shards of :mod:`benchmarks.bert.prepare` and convert them to the tensors of :mod:`benchmarks.bert.collate`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.bert.collate import BatchCapacities, collate, evaluation_shape, training_shape
from benchmarks.bert.config import Facts, ReaderConfig
from benchmarks.bert.preparation.pipeline import EVALUATION_FILE, PACKED, UNPACKED
from benchmarks.bert.prepare import FORMAT, PREPARE_COMMAND
from benchmarks.bert.shards import RowLimits, SequenceShard, ShardFile, files_of, read_rows
from common.data import manifest
from common.data.batches import Block, HostBatch
from common.data.manifest import Manifest
from common.data.order import EvalShard, MicroBatches
from common.data.shard_streams import ShardOrder, ShardStreams, Turn
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError

FOLDERS = {"packed": PACKED, "unpacked": UNPACKED}
"""Folder of the training shards of each format, below the data folder."""
CYCLE = 21
"""Packs per cycle of the balanced order. In the real set, 10 have one sequence, 1 has two and 10 have three."""


@dataclass(frozen=True)
class BertDataSettings:
    """Dataset constants and reader options."""

    facts: Facts
    reader: ReaderConfig

    @property
    def samples_per_row(self) -> int:
        """Nominal samples per row."""
        return self.facts.sequences_per_pack if self.reader.format == "packed" else 1

    def training_limits(self) -> RowLimits:
        """Return the limits for a row of the training shards."""
        facts = self.facts
        if self.reader.format == "unpacked":
            return self.evaluation_limits()
        sequences, masked = facts.max_sequences_per_pack, facts.max_masked_per_row
        return RowLimits(True, facts.max_sequence_length, sequences, masked, facts.vocabulary, facts.segment_types)

    def evaluation_limits(self) -> RowLimits:
        """Return the limits for a row with a single sequence."""
        facts = self.facts
        masked = facts.max_masked_per_sequence
        return RowLimits(False, facts.max_sequence_length, 1, masked, facts.vocabulary, facts.segment_types)


class BertSource:
    """Training micro-batches of one replica; a :class:`common.data.batches.DataSource`.

    Host memory contains at most two shards (38 MB each in the real set) for each accumulation step.

    Args:
        micro_batches: this replica's part of every global batch, in nominal samples.
        seed: seed of the data order and of dropout.
        pin_memory: put the tensors in pinned memory.
    """

    def __init__(
        self,
        files: list[Path],
        found: Manifest,
        settings: BertDataSettings,
        micro_batches: MicroBatches,
        seed: int,
        pin_memory: bool,
    ) -> None:
        self.train_samples = found.counts["train_samples"]
        self.eval_samples = found.counts["eval_samples"]
        self.synthetic = found.synthetic
        self._files = files
        self._reader = settings.reader
        self._limits = settings.training_limits()
        self._micro_batches = micro_batches
        self._seed = seed
        self._pin_memory = pin_memory
        self._rows = micro_batches.micro_batch // settings.samples_per_row
        self._shape = training_shape(settings.facts, settings.reader, self._rows)
        packed = settings.reader.format == "packed"
        rows = found.counts["train_packs"] if packed else self.train_samples
        kinds = range(1, settings.facts.max_sequences_per_pack + 1)
        self._cycle: tuple[int, ...] = ()
        if packed:
            self._cycle = cycle_of([found.counts.get(f"packs_of_{kind}", 0) for kind in kinds])
        self._order = ShardOrder(rows, len(files), micro_batches.streams, seed, larger_first=packed)
        streams = [micro_batches.stream(step) for step in range(micro_batches.accumulation)]
        self._streams: ShardStreams[SequenceShard] = ShardStreams(self._order, streams, self._open_shard)

    def batches(self, block: Block, start: int = 0) -> Iterator[HostBatch]:
        """Yield the micro-batches of ``block`` from position ``start``.

        Raises:
            DataError: a shard is missing or damaged, or contradicts the manifest or the dataset constants.
        """
        mine = self._micro_batches
        first, nominal = mine.first(block), mine.micro_batch * mine.replicas
        step, accumulation_step = mine.step_of(first + start)
        done = [step + (stream < accumulation_step) for stream in range(mine.accumulation)]
        if start < mine.count(block):
            self._streams.start([count * self._rows for count in done])
        for position in range(start, mine.count(block)):
            tensors, key = self._micro_batch(first + position)
            if mine.step_of(first + position + 1)[1] == 0:
                self._streams.read_ahead()
            yield HostBatch(tensors, nominal, position, key)

    def close(self) -> None:
        """Stop the prefetch thread and close the shards."""
        self._streams.close()

    def _micro_batch(self, number: int) -> tuple[dict[str, Tensor], Hashable]:
        step, accumulation_step = self._micro_batches.step_of(number)
        stream = self._micro_batches.stream(accumulation_step)
        rows = self._streams.take(stream, step * self._rows, self._rows)
        pieces = [piece.shard.take(piece.start, piece.stop) for piece in rows]
        shape = self._shape
        key: Hashable = ()
        if self._reader.graph_per_count:
            count = sum(len(piece) for piece in pieces)
            shape, key = shape.for_count(count), ("sequences", count)
        dropout_seed = self._micro_batches.random_seed(self._seed, number)
        return collate(pieces, shape, dropout_seed, self._pin_memory), key

    def _open_shard(self, turn: Turn) -> ShardFile:
        def order(sequences_of_row: NDArray[np.integer]) -> NDArray[np.int64]:
            generator = self._order.row_generator(turn)
            if self._reader.order == "balanced":
                return balanced(sequences_of_row, self._cycle, generator)
            return shuffled(len(sequences_of_row), generator)

        return ShardFile(self._files[turn.shard], turn.rows, self._limits, order)


@dataclass(frozen=True)
class EvaluationData:
    """This rank's part of the evaluation set.

    Attributes:
        eval_samples: number of sequences in the whole set.
        batches: tensors of this rank's batches, in host memory; ranks may have different numbers of batches.
    """

    eval_samples: int
    batches: list[dict[str, Tensor]]


def open_train(
    root: Path, settings: BertDataSettings, layout: Layout, micro_batch: int, accumulation: int = 1
) -> BertSource:
    """Open the training data under ``root`` for this rank; allowed only after ``run_start``.

    Args:
        micro_batch: nominal samples in a micro-batch of one replica.
        accumulation: micro-batches per step and replica.

    Raises:
        DataError: the manifest is missing or damaged, or does not fit the settings.
        ConfigError: the micro-batch is not a whole number of rows.
    """
    found = read_manifest(root, settings)
    if micro_batch % settings.samples_per_row:
        raise ConfigError(
            f"micro_batch={micro_batch}: with reader.format={settings.reader.format} it is a multiple of "
            f"{settings.samples_per_row}, which is what a row counts as"
        )
    folder = FOLDERS[settings.reader.format]
    files = [root / name for name in files_of(list(found.files), folder)]
    expected = found.counts["shards"] if settings.reader.format == "packed" else max(1, len(files))
    if len(files) != expected:
        raise DataError(
            f"{root / manifest.NAME} names {len(files)} files {folder}/part_* where it counts {expected} shards; "
            f"run '{PREPARE_COMMAND}'"
        )
    micro_batches = MicroBatches(micro_batch, accumulation, layout.size("dp"), layout.index("dp"))
    return BertSource(files, found, settings, micro_batches, layout.seed, layout.device.type == "cuda")


def open_evaluation(root: Path, settings: BertDataSettings, layout: Layout) -> EvaluationData:
    """Read this rank's contiguous part of the evaluation set under ``root``; allowed only after ``run_start``.

    Raises:
        DataError: the manifest or the file is missing or damaged, or does not fit the settings.
    """
    found = read_manifest(root, settings)
    whole = found.counts["eval_samples"]
    mine = EvalShard(whole, 1, layout.size("dp"), layout.index("dp"))
    if mine.start == mine.end:
        return EvaluationData(whole, [])
    every = read_rows(root / EVALUATION_FILE, whole, (mine.start, mine.end), settings.evaluation_limits())
    shape = evaluation_shape(settings.facts, settings.reader.eval_rows)
    batches = [
        collate([every.take(np.arange(first, end))], shape, 0, layout.device.type == "cuda")
        for first, end in filled(every.lengths, every.masked_lengths, shape)
    ]
    return EvaluationData(whole, batches)


def filled(
    lengths: NDArray[np.integer], masked_lengths: NDArray[np.integer], shape: BatchCapacities
) -> list[tuple[int, int]]:
    """Split sequences, in their order, into the fewest batches that fit ``shape``; return (start, end) of each."""
    cuts, first, tokens, masked = [], 0, 0, 0
    for number, (length, of_it) in enumerate(zip(lengths.tolist(), masked_lengths.tolist(), strict=True)):
        full = tokens + length > shape.tokens or masked + of_it > shape.masked
        if full or number - first == shape.sequences:
            cuts.append((first, number))
            first, tokens, masked = number, 0, 0
        tokens, masked = tokens + length, masked + of_it
    return [*cuts, (first, len(lengths))]


def read_manifest(root: Path, settings: BertDataSettings) -> Manifest:
    """Read the manifest of ``root`` and check it against ``settings``.

    Raises:
        DataError: the manifest is missing, damaged, of another format, or belongs to data for another model.
    """
    sizes = ("train_samples", "train_packs", "shards", "eval_samples", "vocabulary", "max_sequence_length")
    found = manifest.read(root, FORMAT, PREPARE_COMMAND, sizes)
    where = root / manifest.NAME
    for count in ("vocabulary", "max_sequence_length"):
        expected = getattr(settings.facts, count)
        if found.counts[count] != expected:
            raise DataError(
                f"{root} has {count} {found.counts[count]} where the model has {expected}: it is another data set than "
                "benchmark.facts is for; give the data_dir that belongs to this recipe"
            )
    kinds = range(1, settings.facts.max_sequences_per_pack + 1)
    packs = sum(found.counts.get(f"packs_of_{kind}", 0) for kind in kinds)
    if packs != found.counts["train_packs"]:
        raise DataError(
            f"{where} counts {packs} packs of 1 to {kinds[-1]} sequences but {found.counts['train_packs']} packs; run "
            f"'{PREPARE_COMMAND}'"
        )
    folder = FOLDERS[settings.reader.format]
    needed = {folder: files_of(list(found.files), folder), EVALUATION_FILE: EVALUATION_FILE in found.files}
    for name, there in needed.items():
        if not there:
            remedy = " --unpacked" if name == FOLDERS["unpacked"] else ""
            raise DataError(f"{where} names no {name}; run '{PREPARE_COMMAND}{remedy}'")
    return found


def cycle_of(packs: Sequence[int], length: int = CYCLE) -> tuple[int, ...]:
    """Return the number of packs of one, two, three … sequences in one cycle, in proportion to the whole set.

    Args:
        packs: numbers of packs of one, two, three … sequences in the whole set; not all zero.
        length: packs per cycle. Shares are rounded down; the largest remainders get the rest.
    """
    exact = [count * length for count in packs]
    total = sum(packs)
    shares = [part // total for part in exact]
    by_remainder = sorted(range(len(packs)), key=lambda kind: (-(exact[kind] % total), kind))
    for kind in by_remainder[: length - sum(shares)]:
        shares[kind] += 1
    return tuple(shares)


def shuffled(rows: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return a random permutation of ``rows`` rows."""
    return generator.permutation(rows)


def balanced(
    sequences_of_row: NDArray[np.integer], cycle: Sequence[int], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return an order in which packs at the same position have equally many sequences in all shards.

    Each cycle takes its share of randomly chosen rows of each number of sequences. If rows of one number run out,
    the cycles continue without them; rows whose number has no share come last. (``order_samples`` of NVIDIA's
    submission to MLPerf Training v3.1 does the same.)

    Args:
        sequences_of_row: number of sequences in each row, at least 1.
        cycle: numbers of packs of one, two … sequences in a cycle.
    """
    order = generator.permutation(len(sequences_of_row))
    kinds = sequences_of_row[order].astype(np.int64) - 1
    turn_of = np.zeros(len(order), np.int64)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        share = cycle[kind] if kind < len(cycle) else 0
        turn_of[rows] = np.arange(len(rows)) // share if share else len(order)
    return order[np.lexsort((kinds, turn_of))]
