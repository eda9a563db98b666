"""Pipeline from text to the shards that training reads. Every stage can continue after an interruption.

articles → text parts and held-out articles → sequences of each part (fixed HDF5) → plan of packs and shards →
sequences of each part, grouped by shard → shards. Intermediate files are deleted once a later stage has used them.
"""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.bert.preparation import hdf5, holdout, sequence_exchange
from benchmarks.bert.preparation.packing import MAX_SEQUENCES, pack
from benchmarks.bert.preparation.sentence_pairs import SampleSettings, create_samples, read_documents
from benchmarks.bert.preparation.wordpiece import WordPieceTokenizer, read_vocabulary
from benchmarks.bert.raw import EVALUATION, PreparationSizes, RawText
from common.data import atomic
from common.data.manifest import FileEntry, file_entry
from common.data.ragged import bounds_of
from common.data.shard_streams import shard_sizes
from common.data.stages import Record, Stages
from common.errors import DataError

PACKED, UNPACKED, EVALUATION_FOLDER = "packed", "varlength", "eval_varlength"
EVALUATION_FILE = f"{EVALUATION_FOLDER}/part_eval_10k.hdf5"
PACKING_SEED = 20200101
UNPACKED_SEED = 24


@dataclass(frozen=True)
class PreparedText:
    """Result of the pipeline, for the manifest.

    Attributes:
        files: written files, by path below the data folder.
        counts: numbers of samples, packs and shards.
        evaluation_md5: MD5 of the evaluation text; None if the text was not made from articles.
    """

    files: dict[str, FileEntry]
    counts: dict[str, int]
    evaluation_md5: str | None = None


class TextPipeline:
    """One run of the preparation.

    Args:
        data_dir: folder for the shards.
        work_dir: folder for intermediate files and the records of the stages.
        punkt: folder of Punkt parameters, or None; only used for articles.
        unpacked: also write shards of single sequences.
        keep: keep the intermediate files.
    """

    def __init__(
        self,
        source: RawText,
        settings: PreparationSizes,
        data_dir: Path,
        work_dir: Path,
        workers: int,
        punkt: Path | None,
        unpacked: bool,
        keep: bool,
    ) -> None:
        self.source = source
        self.settings = settings
        self.data_dir = data_dir
        self.work_dir = work_dir
        self.punkt = punkt
        self.keep = keep
        self.kinds = (PACKED, UNPACKED) if unpacked else (PACKED,)
        self.stages = Stages(work_dir / "records", workers)

    def run(self) -> PreparedText:
        """Run all stages that are not complete.

        Raises:
            DataError: the text is damaged or too short.
        """
        with self.stages:
            parts, evaluation = self._make_text()
            samples = self._samples(parts)
            held_out = self._evaluation_set(evaluation)
            plan = self._plan(samples)
            self._scatter(parts, plan)
            shards = {kind: self._gather(kind, parts) for kind in self.kinds}
        if not self.keep:
            shutil.rmtree(self.work_dir / "exchange", ignore_errors=True)
        return self._made(plan, held_out, shards)

    def _text_files(self) -> tuple[list[Path], Path]:
        """Return the paths of the text parts and of the evaluation text."""
        if self.source.evaluation is not None:
            return self.source.parts, self.source.evaluation
        folder, total = self.work_dir / "text", self.settings.parts
        return [folder / f"part-{number:05d}-of-{total:05d}" for number in range(total)], folder / EVALUATION

    def _make_text(self) -> tuple[list[Path], Path]:
        """Return the paths of the text parts and of the evaluation text; create both if the source has articles."""
        parts, evaluation = self._text_files()
        if not self.source.articles:
            return parts, evaluation
        files, folder = self.source.articles, self.work_dir / "sentences"
        names = [f"{number:06d}" for number in range(len(files))]
        training, held_out = ([folder / f"{name}.{kind}" for name in names] for kind in ("train", "eval"))
        common = (len(files), self.settings.eval_articles, self.punkt)
        self.stages.run(
            "sentences",
            {
                name: (files[number], number, *common, training[number], held_out[number])
                for number, name in enumerate(names)
            },
            holdout.split_file,
        )
        groups = holdout.assign([path.stat().st_size for path in files], len(parts))
        tasks = {
            path.name: ([training[number] for number in group], path) for path, group in zip(parts, groups, strict=True)
        }
        self.stages.run("text", {**tasks, EVALUATION: (held_out, evaluation)}, holdout.join)
        self._forget(folder)
        return parts, evaluation

    def _samples(self, parts: list[Path]) -> list[int]:
        """Create the sequences of all parts; return the number of each part."""
        common = (self.source.vocabulary, self.settings.samples)
        tasks = {path.name: (path, *common, *self._sample_files(path)) for path in parts}
        return [record["sequences"] for record in self.stages.run("samples", tasks, make_samples).values()]

    def _evaluation_set(self, text: Path) -> Record:
        path = self.data_dir / EVALUATION_FILE
        arguments = (text, self.source.vocabulary, self.settings.samples, self.settings.eval_samples, path)
        return self.stages.run("evaluation", {path.name: arguments}, make_evaluation_set)[path.name]

    def _plan(self, samples: list[int]) -> Record:
        parts, _ = self._text_files()
        lengths = [self._sample_files(path)[1] for path in parts]
        slots = {kind: [self._slot_file(kind, path) for path in parts] for kind in self.kinds}
        arguments = (lengths, samples, self.settings, slots)
        return self.stages.run("plan", {"places": arguments}, make_plan)["places"]

    def _scatter(self, parts: list[Path], plan: Record) -> None:
        boundaries = {kind: self._boundaries(kind, plan) for kind in self.kinds}
        tasks = {
            path.name: (
                self._sample_files(path)[0],
                [(self._slot_file(kind, path), boundaries[kind], self._exchange(kind, path)) for kind in self.kinds],
                not self.keep,
            )
            for path in parts
        }
        self.stages.run("scatter", tasks, scatter_part)
        self._forget(self.work_dir / "samples", self.work_dir / "places", self.work_dir / "text")

    def _gather(self, kind: str, parts: list[Path]) -> dict[str, Record]:
        shards = self.settings.shards
        sources = [self._exchange(kind, path) for path in parts]
        tasks = {
            self._shard(kind, number).name: (sources, number, shards, kind == PACKED, self._shard(kind, number))
            for number in range(shards)
        }
        return self.stages.run(f"gather-{kind}", tasks, gather_shard)

    def _made(self, plan: Record, evaluation: Record, shards: dict[str, dict[str, Record]]) -> PreparedText:
        files = {EVALUATION_FILE: FileEntry(evaluation["bytes"], evaluation["sha256"])}
        for kind, records in shards.items():
            for name, record in records.items():
                files[f"{kind}/{name}"] = FileEntry(record["bytes"], record["sha256"])
        for name, entry in files.items():
            path = self.data_dir / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise DataError(f"{path} is not as it was prepared; delete {self.data_dir} and prepare again")
        sequences = sum(record["sequences"] for record in shards[PACKED].values())
        if sequences != plan["train_samples"]:
            raise DataError(f"{self.data_dir / PACKED} has {sequences} sequences of {plan['train_samples']}")
        counts = {name: plan[name] for name in plan if name.startswith(("train_", "packs_of_"))}
        text = self.stages.record("text", EVALUATION)
        return PreparedText(
            files,
            {**counts, "shards": self.settings.shards, "eval_samples": evaluation["samples"]},
            str(text["md5"]) if text else None,
        )

    def _boundaries(self, kind: str, plan: Record) -> NDArray[np.int64]:
        rows = plan["train_packs"] if kind == PACKED else plan["train_samples"]
        sizes = shard_sizes(rows, self.settings.shards, larger_first=kind == PACKED)
        return bounds_of(sizes) * (MAX_SEQUENCES if kind == PACKED else 1)

    def _sample_files(self, part: Path) -> tuple[Path, Path]:
        folder = self.work_dir / "samples"
        return folder / f"{part.name}.hdf5", folder / f"{part.name}.lengths.npy"

    def _slot_file(self, kind: str, part: Path) -> Path:
        return self.work_dir / "places" / kind / f"{part.name}.npy"

    def _exchange(self, kind: str, part: Path) -> Path:
        return self.work_dir / "exchange" / kind / part.name

    def _shard(self, kind: str, number: int) -> Path:
        if kind == PACKED:
            return self.data_dir / PACKED / f"part_{number:05d}"
        return self.data_dir / UNPACKED / f"part_{number:05d}_of_{self.settings.shards:05d}.hdf5"

    def _forget(self, *folders: Path) -> None:
        if not self.keep:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)


def make_samples(text: Path, vocabulary_file: Path, settings: SampleSettings, path: Path, lengths: Path) -> Record:
    """Write the sequences of one part, and their lengths; return ``sequences``, ``text_tokens`` and ``tokens``.

    Raises:
        DataError: the text is damaged or empty.
    """
    vocabulary = read_vocabulary(vocabulary_file)
    documents = read_documents(text, WordPieceTokenizer(vocabulary))
    if not documents:
        raise DataError(f"{text} holds no text")
    tokens = sum(len(sentence) for document in documents for sentence in document)
    sequences = create_samples(documents, vocabulary, settings)
    hdf5.write_fixed(path, sequences, settings.max_sequence_length, settings.max_masked)
    atomic.save(lengths, sequences.lengths.astype(np.int16))
    return {"sequences": len(sequences), "text_tokens": tokens, "tokens": int(sequences.lengths.sum())}


def make_evaluation_set(
    text: Path, vocabulary_file: Path, settings: SampleSettings, samples: int, path: Path
) -> Record:
    """Write ``samples`` sequences of ``text``, unpacked; return ``samples``, ``candidates``, ``bytes``, ``sha256``.

    Raises:
        DataError: the text or the vocabulary is damaged, or the text is too short.
    """
    vocabulary = read_vocabulary(vocabulary_file)
    candidates = create_samples(read_documents(text, WordPieceTokenizer(vocabulary)), vocabulary, settings)
    hdf5.write_varlength(path, candidates.take(pick(len(candidates), samples, text)))
    return {"samples": samples, "candidates": len(candidates), **_entry(path)}


def make_plan(
    lengths: list[Path], samples: list[int], settings: PreparationSizes, slots: dict[str, list[Path]]
) -> Record:
    """Write the position in the data set of every sequence, -1 if not used; return counts for the manifest.

    Args:
        lengths: files with the lengths of the sequences, one per part.
        samples: number of sequences in each part.
        slots: output files, one per part, for each kind of shards (``PACKED``, ``UNPACKED``).

    Raises:
        DataError: there are fewer sequences or packs than needed.
    """
    total = sum(samples)
    wanted = total if settings.train_samples is None else settings.train_samples
    if total < wanted:
        raise DataError(f"the text makes {total} sequences where {wanted} are needed to train: generate more articles")
    every = np.concatenate([np.load(path) for path in lengths])
    packs = pack(every[:wanted], settings.max_sequence_length, PACKING_SEED)
    if packs.count < settings.shards:
        raise DataError(f"{packs.count} packs cannot fill {settings.shards} shards; use fewer (--shards)")
    for kind, paths in slots.items():
        slot_of = np.full(total, -1, np.int32)
        slot_of[:wanted] = packs.slots if kind == PACKED else shuffled_slots(wanted)
        for path, (start, stop) in zip(paths, _ranges(samples), strict=True):
            atomic.save(path, slot_of[start:stop])
    sizes = np.bincount(packs.sizes, minlength=MAX_SEQUENCES + 1)
    kinds = {f"packs_of_{size}": int(sizes[size]) for size in range(1, MAX_SEQUENCES + 1)}
    tokens = int(every[:wanted].sum(dtype=np.int64))
    return {"train_samples": wanted, "train_packs": packs.count, **kinds, "tokens": tokens}


def shuffled_slots(total: int) -> NDArray[np.int32]:
    """Return the position of each of ``total`` sequences after a shuffle with ``random.Random(24)`` of Python."""
    order = array("i", range(total))
    random.Random(UNPACKED_SEED).shuffle(order)
    slots = np.empty(total, np.int32)
    slots[np.frombuffer(order, np.int32) if total else []] = np.arange(total, dtype=np.int32)
    return slots


def scatter_part(
    samples: Path, destinations: list[tuple[Path, NDArray[np.int64], Path]], delete_samples: bool
) -> Record:
    """Write the sequences of one part, grouped by shard; return the ``bytes`` of all outputs.

    Args:
        samples: fixed HDF5 file of the part.
        destinations: for each kind of shards: the file of positions, the boundaries of the shards, the output file.
        delete_samples: delete ``samples`` afterwards.
    """
    if samples.exists() or not all(path.exists() for _, _, path in destinations):
        for slots, boundaries, path in destinations:
            sequence_exchange.scatter(hdf5.read_fixed(samples), np.load(slots), boundaries, path)
    if delete_samples:
        samples.unlink(missing_ok=True)
    return {"bytes": sum(path.stat().st_size for _, _, path in destinations)}


def gather_shard(sources: list[Path], shard: int, shards: int, packed: bool, path: Path) -> Record:
    """Write one shard from all files of :func:`scatter_part`; return ``sequences``, ``bytes`` and ``sha256``.

    Args:
        sources: output files of :func:`scatter_part`.
        packed: whether to write packs of sequences instead of single ones.
    """
    slots, sequences = sequence_exchange.gather(sources, shard, shards)
    if packed:
        _, sizes = np.unique(slots // MAX_SEQUENCES, return_counts=True)
        hdf5.write_packed(path, sequences, sizes)
    else:
        hdf5.write_varlength(path, sequences)
    return {"sequences": len(sequences), **_entry(path)}


def _ranges(sizes: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for size in sizes:
        yield start, start + size
        start += size


def _entry(path: Path) -> Record:
    entry = file_entry(path)
    return {"bytes": entry.bytes, "sha256": entry.sha256}


def pick(candidates: int, wanted: int, text: Path) -> np.ndarray:
    """Return the indices of the selected candidates: int(i * (candidates / wanted)), with a Python float quotient.

    Raises:
        DataError: there are fewer candidates than wanted.
    """
    if candidates < wanted:
        raise DataError(f"{text} makes {candidates} sequences where {wanted} are needed for evaluation: too short")
    stride = candidates / wanted
    return np.array([int(number * stride) for number in range(wanted)], np.int64)
