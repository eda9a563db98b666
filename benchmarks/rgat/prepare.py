"""Download, prepare, verify and generate R-GAT's data: IGBH as features, graph and seeds in one random order.

:mod:`benchmarks.rgat.prepared` lists the files. The stages of a preparation are: permutations; features, type by type;
edges, relation by relation; seeds; checksums. Every stage resumes after an interruption. The intermediate files of a
type or relation are deleted when it is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from benchmarks.rgat import bucket_sort, raw
from benchmarks.rgat.bucket_sort import SortedEdges, load_permutation
from benchmarks.rgat.graph import Relation
from benchmarks.rgat.prepared import (
    FEATURES,
    FORMAT,
    PERMUTATION_SEED,
    PREPARE_COMMAND,
    SCALE,
    SPLIT_SEED,
    SPLITS,
    edges_count,
    features_name,
    indices_name,
    indptr_name,
    labels_name,
    nodes_count,
    prepared_files,
    seeds_mark,
    seeds_name,
    split_seeds,
    verify,
)
from benchmarks.rgat.raw import GraphSettings, RawArray, RawGraph
from benchmarks.rgat.synthetic import generate
from common.data import atomic, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest, file_entry
from common.data.options import Option
from common.data.preparation import preparing
from common.data.published import Published
from common.data.row_output import RowOutput
from common.data.stages import Record, Stages, memory_of_start
from common.errors import DataError
from common.mlperf.fixed import benchmark_settings

INTERMEDIATE = "intermediate"
BYTES_PER_WORKER = 1 << 28
"""Raw bytes per additional process."""
_RULES = benchmark_settings("rgat")
PUBLISHED = Published(
    {
        **{name: _RULES[name] for name in ("train_samples", "eval_samples")},
        **{name: _RULES["facts"][name] for name in ("labelled", "classes")},
        **{nodes_count(name): count for name, count in raw.NODES[raw.FULL].items()},
    }
)
"""Counts of IGBH-Full as prepared."""
_BLOCK = 1 << 22  # labels per read
_MOST_EDGES = 1 << 30
"""Maximum number of edges of a piece, because its bounds are int32."""
_FEATURES_DONE, _EDGES_DONE = "features", "edges"


def prepare(
    raw_dir: Path,
    data_dir: Path,
    workers: int = 1,
    size: Annotated[
        str | None, Option("size of IGBH (default: determined from the number of papers)", choices=raw.NODES)
    ] = None,
    memory_gb: Annotated[
        float,
        Option(
            "memory for sorting, all processes together; permutations need 2 GB more, labels and seeds 3 GB", least=1e-9
        ),
    ] = min(32, max(1, psutil.virtual_memory().total // 2_000_000_000)),
) -> Manifest:
    """Write the prepared data set. Do nothing if it is complete, and resume an interrupted preparation.

    Args:
        raw_dir: IGBH or synthetic data, as :mod:`benchmarks.rgat.raw` describes.
        memory_gb: a resumed preparation keeps the memory per process with which it began; use fewer workers to take
            less memory. Permutations take 4 bytes per node, labels and seeds 20 bytes per labelled node.

    Raises:
        ConfigError: an option is wrong.
        DataError: the raw data are missing, incomplete or damaged; the disk is too small; ``data_dir`` holds data
            from another source or with other settings, or another process is preparing them.
    """
    memory = round(memory_gb * 1e9)
    source = raw.open_raw(raw_dir, size)
    settings = {**dataclasses.asdict(source.settings), "features": FEATURES}
    wanted = {"fingerprint": source.fingerprint(), "settings": json.dumps(settings, sort_keys=True)}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(INTERMEDIATE)
        workers = min(workers, 1 + _bytes(source) // BYTES_PER_WORKER)
        memory = memory_of_start(work_dir / "memory", memory // workers)
        stages = PreparationStages(source, data_dir, work_dir, workers, memory)
        preparation.require_space(data_dir, stages.space() - _occupied(data_dir))
        files, edges, seeds = stages.run()
        counts = {
            **{f"{split}_samples": count for split, count in seeds.items()},
            "labelled": source.labelled,
            "classes": source.settings.classes,
            **{nodes_count(name): count for name, count in source.nodes.items()},
            **{edges_count(name): count for name, count in edges.items()},
        }
        origin = {
            "feature_scale": str(SCALE),
            "permutation_seed": str(PERMUTATION_SEED),
            "split_seed": str(SPLIT_SEED),
            "seeds": seeds_mark(data_dir),
            "torch": torch.__version__,
        }
        return job.finish(files, counts, source.name, origin)


def _bytes(source: RawGraph) -> int:
    arrays = (*source.features.values(), *source.edges.values())
    return sum(array.path.stat().st_size for array in arrays)


def _occupied(folder: Path) -> int:
    """Return the bytes on disk of a folder's files; holes in sparse files do not count."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class PreparationStages:
    """Preparation of features, edges and seeds from a raw graph, in stages that resume after an interruption.

    Args:
        work_dir: receives intermediate files and the records of the stages.
        memory: bytes per process.
    """

    def __init__(self, source: RawGraph, data_dir: Path, work_dir: Path, workers: int, memory: int) -> None:
        self.source = source
        self.data_dir = data_dir
        self.work_dir = work_dir
        self.memory = memory
        self.permutations = work_dir / "permutations"
        self.stages = Stages(work_dir / "records", workers, functools.partial(torch.set_num_threads, 1))

    def run(self) -> tuple[dict[str, FileEntry], dict[str, int], dict[str, int]]:
        """Run all unfinished stages. Return all files, the edges of each relation and the seeds of each split.

        Raises:
            DataError: raw files are damaged.
        """
        with self.stages:
            self.stages.run(
                "permutation", {"all": (self.permutations, self.source.nodes)}, bucket_sort.write_permutations
            )
            for name, array in self.source.features.items():
                self._write_features(name, array)
            edges: dict[str, int] = {}
            for text, array in self.source.edges.items():
                edges |= self._write_edges(Relation.parse(text), array)
            seeds = self._write_seeds()
            return self._checksums(), edges, seeds

    def space(self) -> int:
        """Return the peak bytes on disk: all files, permutations, intermediate files of one type or relation."""
        width = self.source.settings.feature_size
        nodes = self.source.nodes
        by_type = {name: count * width for name, count in nodes.items()}
        files, intermediate = 4 * sum(nodes.values()) + sum(by_type.values()), list(by_type.values())
        for relation in self.source.settings.schema.relations:
            files += 8 * nodes[relation.target]
        for text, array in self.source.edges.items():
            relation = Relation.parse(text)
            loops = 2 * nodes[relation.source] if relation.symmetric else 0
            files += 4 * (2 * array.rows + loops)
            intermediate.append(16 * array.rows)
        return files + max(intermediate) + 6 * self.source.labelled

    def _write_features(self, name: str, source: RawArray) -> None:
        stage = f"features-{name}"
        target = RowOutput(self.data_dir / features_name(name), "|u1", (source.rows, source.width), npy=True)
        if self.stages.record(_FEATURES_DONE, name) is not None:
            if target.begun:
                return
            self._forget(_FEATURES_DONE, name, stage)
        step = max(1, self.memory // (target.row_bytes + bucket_sort.ROW_EXTRA))
        folder = self._intermediate_dir(stage)
        ranges = [(first, min(first + step, source.rows)) for first in range(0, source.rows, step)]
        pieces = {f"{number:06d}": folder / f"{number:06d}" for number in range(len(ranges))}
        self.stages.run(
            f"{stage}-pieces",
            {
                piece: (source, self.permutations, name, first, last, self.memory, path)
                for (piece, path), (first, last) in zip(pieces.items(), ranges, strict=True)
            },
            bucket_sort.write_feature_piece,
        )
        tasks = {
            piece: (list(pieces.values()), first, last, self.memory, target)
            for piece, (first, last) in zip(pieces, ranges, strict=True)
        }
        self._write_rows(f"{stage}-buckets", tasks, bucket_sort.write_feature_bucket, [target])
        self.stages.keep(_FEATURES_DONE, name, {"rows": source.rows})
        shutil.rmtree(folder, ignore_errors=True)

    def _write_edges(self, relation: Relation, source: RawArray) -> dict[str, int]:
        """Write the edges of a relation and, if it joins two types, of its reverse; return the number of each."""
        relations = [relation] if relation.symmetric else [relation, relation.reverse]
        done, stage = self.stages.record(_EDGES_DONE, str(relation)), f"edges-{relation}"
        if done is not None and all(
            (self.data_dir / name(one)).is_file() for one in relations for name in (indptr_name, indices_name)
        ):
            return {name: int(count) for name, count in done.items()}
        if done is not None:
            self._forget(_EDGES_DONE, str(relation), stage)
        forward, backward = self._sorted(stage, relation, source)
        parts = (
            {relation: [forward, backward]} if relation.symmetric else {relation: [forward], relations[1]: [backward]}
        )
        counts = {str(one): self._collect(stage, one, parts[one]) for one in relations}
        self.stages.keep(_EDGES_DONE, str(relation), counts)
        shutil.rmtree(self._intermediate_dir(stage), ignore_errors=True)
        return counts

    def _sorted(self, stage: str, relation: Relation, source: RawArray) -> tuple[list[SortedEdges], list[SortedEdges]]:
        """Return the pieces of a file, sorted by target and, reversed, by source."""
        nodes, folder = self.source.nodes, self._intermediate_dir(stage)
        step = min(max(1, self.memory // bucket_sort.EDGE_MEMORY), _MOST_EDGES)
        tasks, forward, backward = {}, [], []
        for number, first in enumerate(range(0, source.rows, step)) if source.rows else [(0, 0)]:
            name = f"{number:06d}"
            forward.append(SortedEdges(folder / f"{name}.forward", nodes[relation.target]))
            backward.append(SortedEdges(folder / f"{name}.backward", nodes[relation.source]))
            last = min(first + step, source.rows)
            tasks[name] = (source, self.permutations, relation, first, last, forward[-1], backward[-1])
        self.stages.run(f"{stage}-pieces", tasks, bucket_sort.write_edge_piece)
        return forward, backward

    def _collect(self, stage: str, relation: Relation, parts: list[list[SortedEdges]]) -> int:
        """Write the final files of a relation, and return its number of edges."""
        loops = relation.symmetric
        buckets = bucket_sort.buckets(parts, len(parts) if loops else 0, max(1, self.memory // bucket_sort.EDGE_MEMORY))
        total, targets = sum(bucket.edges for bucket in buckets), self.source.nodes[relation.target]
        indptr = RowOutput(self.data_dir / indptr_name(relation), "<i8", (targets + 1,), npy=True)
        indices = RowOutput(self.data_dir / indices_name(relation), "<i4", (total,), npy=True)
        block = min(bucket_sort.BLOCK_EDGES, max(1, self.memory // bucket_sort.EDGE_MEMORY))
        tasks = {f"{bucket.first:010d}": (parts, loops, bucket, block, indptr, indices) for bucket in buckets}
        self._write_rows(f"{stage}-{relation.name}-buckets", tasks, bucket_sort.write_edge_bucket, [indptr, indices])
        return total

    def _write_rows(
        self, stage: str, tasks: dict[str, tuple[Any, ...]], work: Callable[..., Record], targets: list[RowOutput]
    ) -> None:
        """Run a stage whose tasks write ``targets``; restart it if a target is missing or from another preparation."""
        if not ((self.stages.folder / stage).is_dir() and all(target.begun for target in targets)):
            for target in targets:
                target.begin()
            self._drop(stage)
        self.stages.run(stage, tasks, work)
        for target in targets:
            target.finish()

    def _write_seeds(self) -> dict[str, int]:
        source, stage = self.source, "seeds"
        names = [name(split) for split in SPLITS for name in (seeds_name, labels_name)]
        if not all((self.data_dir / name).is_file() for name in names):
            self._drop(stage)
            self._drop("checksums")
        arguments = (source.labels, source.settings, source.labelled, self.permutations, self.data_dir)
        return self.stages.run(stage, {"all": arguments}, write_seeds)["all"]

    def _checksums(self) -> dict[str, FileEntry]:
        names = prepared_files(self.source.settings.schema)
        names.sort(key=lambda name: (self.data_dir / name).stat().st_size, reverse=True)
        tasks = {name.replace("/", "."): (self.data_dir / name,) for name in names}
        records = self.stages.run("checksums", tasks, checksum).values()
        return {name: FileEntry(**record) for name, record in zip(names, records, strict=True)}

    def _intermediate_dir(self, stage: str) -> Path:
        return self.work_dir / "between" / stage

    def _forget(self, done: str, name: str, stage: str) -> None:
        """Discard the records of a type or relation whose files are missing, so that it is prepared again."""
        self.stages.path(done, name).unlink(missing_ok=True)
        shutil.rmtree(self._intermediate_dir(stage), ignore_errors=True)
        for folder in self.stages.folder.glob(f"{stage}-*"):
            shutil.rmtree(folder)
        self._drop("checksums")

    def _drop(self, stage: str) -> None:
        shutil.rmtree(self.stages.folder / stage, ignore_errors=True)


def checksum(path: Path) -> Record:
    """Return the :class:`FileEntry` of a file, as a record."""
    return dataclasses.asdict(file_entry(path))


def read_labels(source: RawArray, labelled: int, classes: int) -> NDArray[np.int16]:
    """Return the first ``labelled`` labels.

    Raises:
        DataError: a label is not one of the classes.
    """
    labels = np.empty(labelled, np.int16)
    for first in range(0, labelled, _BLOCK):
        block = source.read(first, min(first + _BLOCK, labelled))[:, 0]
        known = (block >= 0) & (block < classes) & (np.floor(block) == block)
        if not known.all():
            row = int(np.flatnonzero(~known)[0])
            raise DataError(f"{source.path}: row {first + row:,} has the label {block[row]:g} of {classes:,} classes")
        labels[first : first + len(block)] = block
    return labels


def write_seeds(source: RawArray, settings: GraphSettings, labelled: int, permutations: Path, folder: Path) -> Record:
    """Write new numbers and labels of both splits' seeds; return seeds by split. Takes 20 bytes per labelled node.

    Raises:
        DataError: a label is not one of the classes, or a split is empty.
    """
    labels = read_labels(source, labelled, settings.classes)
    numbers = load_permutation(permutations, settings.seeds)
    sizes = {}
    for name, seeds in split_seeds(labelled, settings.train_share, settings.eval_share).items():
        if not len(seeds):
            raise DataError(f"{source.path}: {labelled:,} labelled nodes leave none for {name}")
        atomic.save(folder / seeds_name(name), numbers[seeds])
        atomic.save(folder / labels_name(name), labels[seeds])
        sizes[name] = len(seeds)
    return sizes


COMMANDS = DataCommands(
    "rgat",
    raw="IGBH's features, labels and edges",
    prepared="prepared features, graph and seeds",
    real=f"IGBH-{raw.FULL}",
    generate=generate,
    prepare=prepare,
    verify=verify,
    published=PUBLISHED,
)
