"""Commands that generate, prepare and verify OpenFold's data.

``prepare`` reads the raw data (:mod:`benchmarks.openfold.raw`) in two stages, the structures and the alignments. Then
it writes the lists of chains (:mod:`benchmarks.openfold.samples`).
"""

from __future__ import annotations

import datetime
import json
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.openfold import raw
from benchmarks.openfold.raw import RawData
from benchmarks.openfold.samples import (
    ALIGNMENTS,
    CHAINS,
    DAYS,
    DICTS,
    FILES,
    FORMAT,
    INDEX,
    KALIGN,
    NO_CLUSTER,
    NOT_REALIGNED,
    OBSOLETE,
    PREPARE_COMMAND,
    REALIGNED,
    SHARDS,
    SPLITS,
    Chain,
    dict_name,
    encode_name,
    shard_of,
    write_chains,
)
from benchmarks.openfold.structures import Structure, read_structure
from benchmarks.openfold.synthetic import generate
from common.data import atomic, manifest, preparation
from common.data.commands import DataCommands
from common.data.manifest import FileEntry, Manifest
from common.data.preparation import preparing
from common.data.published import Published
from common.data.stages import Record, Stages
from common.errors import DataError
from common.untrusted.strict_json import read_large_json

Index = dict[str, dict[str, Any]]
"""Content of ``super.index``."""
RECORDS = "records"
MEMORY_PER_WORKER = 1 << 31
"""Bytes of memory for the largest structures of a file."""
PUBLISHED = Published({"train_samples": 594_595, "eval_samples": 180})
RELEASED = "2021-09-16"
"""Last release date of a structure of the training set."""
LARGEST_RESOLUTION, LARGEST_SHARE = 9.0, 0.8
"""Limits of the training set: a resolution in angstrom is missing or below the first one; the most frequent amino acid
has at most the second one as its share."""
SUBMITTED = "2021-09-17", "2021-12-11"
"""First and last day of submission of the evaluation's chains."""
MOST_RESIDUES = 700
"""Largest length of a chain of the evaluation."""


def prepare(raw_dir: Path, data_dir: Path, workers: int = 1) -> Manifest:
    """Write the prepared data set. Skip complete data and continue interrupted preparations.

    The manifest counts unknown targets of the evaluation, and evaluation chains without alignments. It counts and names
    mmCIF files that cannot be used.

    Args:
        raw_dir: has the layout of :mod:`benchmarks.openfold.raw`.

    Raises:
        DataError: raw data are missing or damaged; the disk is too small; ``data_dir`` has data of another source, or
            another process is preparing it.
    """
    source = raw.open_raw(raw_dir)
    wanted = {"fingerprint": source.fingerprint()}
    with preparing(data_dir, FORMAT, PREPARE_COMMAND, wanted, PUBLISHED, source.synthetic) as job:
        if job.found is not None:
            return job.found
        work_dir = job.begin(RECORDS)
        with Stages(work_dir, workers) as stages:
            chains, files, skipped = _write_structures(source, data_dir, stages)
            index, databases = _write_alignments(source, data_dir, work_dir, stages)
        listed, counts = _write_lists(source, data_dir, chains, index)
        kalign = REALIGNED if shutil.which(KALIGN) else NOT_REALIGNED
        counts["skipped_structures"] = len(skipped)
        described = {KALIGN: kalign, "skipped": " ".join(skipped)}
        return job.finish(files | databases | listed, counts, "Protein Data Bank and OpenProteinSet", described)


def write_structures(files: Sequence[Path], path: Path) -> Record:
    """Write the structures with protein chains of mmCIF files to a file of ``dicts``.

    Returns:
        Size and checksum of the file (``file``); its ``chains``: for each one, the columns of a :class:`Chain`, and
        the entity in place of the cluster; and ``skipped``, the names of the mmCIF files that cannot be parsed.

    Raises:
        DataError: an mmCIF file cannot be read, or its packing is damaged.
    """
    structures: dict[str, Structure] = {}
    chains: list[list[object]] = []
    skipped: list[str] = []
    for file in files:
        try:
            structure = read_structure(file)
            _check_names(structure, file)
        except ValueError as error:
            print(f"skipped {error}", file=sys.stderr)
            skipped.append(file.name)
            continue
        if structure["sequences"]:
            structures[structure["pdb_id"]] = structure
            chains += _chains_of(structure)
    with atomic.written(path) as unfinished:
        unfinished.write_bytes(pickle.dumps(structures, protocol=4))
    return {"file": asdict(manifest.file_entry(path)), "chains": chains, "skipped": skipped}


def _check_names(structure: Structure, file: Path) -> None:
    """Check that a file has the name of its structure, and that the names of the chains fit into the tables.

    Raises:
        ValueError: they do not; the message begins with the file.
    """
    if structure["pdb_id"] != raw.identifier_of(file.name):
        raise ValueError(f"{file}: it has the structure {structure['pdb_id']}")
    try:
        for author in structure["author_chain_ids"]:
            encode_name(author)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _chains_of(structure: Structure) -> list[list[object]]:
    pdb_id, authors = structure["pdb_id"], structure["mmcif_chain_id_to_author_chain_id"]
    entities = {
        chain: entity for entity, chains in structure["entity_id_to_mmcif_chain_ids"].items() for chain in chains
    }
    found: list[list[object]] = []
    for author, sequence in structure["sequences"].items():
        molecules = [chain for chain, of in authors.items() if of == author]
        found.append([
            f"{pdb_id}_{author}", pdb_id, author, ";".join(molecules), structure["release_date"],
            structure["resolution"], f"{pdb_id.upper()}_{entities[molecules[0]]}", sequence,
        ])  # fmt: skip
    return found


def write_alignments(source: RawData, chains: Sequence[str], path: Path, index: Path) -> Record:
    """Write the alignments of chains to a database, and their positions to ``index``.

    Returns:
        Size and checksum of the database (``file``).

    Raises:
        DataError: a file is damaged.
    """
    spans: dict[str, list[list[object]]] = {}
    with atomic.written(path) as unfinished, open(unfinished, "wb") as file:
        for chain in chains:
            spans[chain] = []
            for name, content in source.alignments(chain).items():
                spans[chain].append([name, file.tell(), len(content)])
                file.write(content)
    atomic.write_text(index, json.dumps(spans) + "\n")
    return {"file": asdict(manifest.file_entry(path))}


def _write_structures(
    source: RawData, data_dir: Path, stages: Stages
) -> tuple[list[Chain], dict[str, FileEntry], list[str]]:
    """Write the files of ``dicts``; return chains, files, and the names of the mmCIF files that were skipped."""
    groups: dict[str, list[Path]] = {}
    for pdb_id, path in source.structures.items():
        groups.setdefault(dict_name(pdb_id), []).append(path)
    tasks = {name: (files, data_dir / DICTS / name) for name, files in sorted(groups.items())}
    records = stages.run("structures", tasks, write_structures)
    clusters = source.clusters()
    chains = [
        Chain(name, pdb_id, author, molecules, day, resolution, clusters.get(entity, NO_CLUSTER), sequence)
        for record in records.values()
        for name, pdb_id, author, molecules, day, resolution, entity, sequence in record["chains"]
    ]
    entries = {f"{DICTS}/{name}": FileEntry(**record["file"]) for name, record in records.items()}
    return chains, entries, [name for record in records.values() for name in record["skipped"]]


def _write_alignments(
    source: RawData, data_dir: Path, work_dir: Path, stages: Stages
) -> tuple[Index, dict[str, FileEntry]]:
    """Write the databases and their index; identical chains share the files of the one that has a folder."""
    shards: list[list[str]] = [[] for _ in range(SHARDS)]
    for chain in source.chains:
        shards[shard_of(chain)].append(chain)
    indices = [work_dir / f"{number}.index" for number in range(SHARDS)]
    tasks = {
        str(number): (source, chains, data_dir / ALIGNMENTS / f"{number}.db", indices[number])
        for number, chains in enumerate(shards)
    }
    left = [
        name
        for number, chains in enumerate(shards)
        if stages.record("alignments", str(number)) is None
        for name in chains
    ]
    needed = sum(path.stat().st_size for name in left for path in (source.root / raw.MSAS / name).rglob("*_hits.*"))
    preparation.require_space(data_dir, needed)
    records = stages.run("alignments", tasks, write_alignments)
    entries: Index = {
        chain: {"db": f"{number}.db", "files": files}
        for number, path in enumerate(indices)
        for chain, files in read_large_json(path).items()
    }
    for group in source.identical():
        owner = next((chain for chain in group if chain in entries), None)
        if owner is not None:
            entries |= {chain: entries[owner] for chain in group if chain not in entries}
    atomic.write_text(data_dir / INDEX, json.dumps(entries) + "\n")
    return entries, {f"{ALIGNMENTS}/{name}.db": FileEntry(**record["file"]) for name, record in records.items()}


def _write_lists(
    source: RawData, data_dir: Path, chains: list[Chain], index: Index
) -> tuple[dict[str, FileEntry], dict[str, int]]:
    """Write ``chains.csv``, the superseded structures and both sets; return files and counts of the manifest.

    Raises:
        DataError: a set is empty.
    """
    with atomic.written(data_dir / CHAINS) as unfinished, open(unfinished, "w", encoding="utf-8", newline="") as file:
        write_chains(file, chains)
    with atomic.written(data_dir / OBSOLETE) as unfinished:
        shutil.copyfile(source.root / raw.OBSOLETE, unfinished)
    targets, unknown = _targets(source.evaluated(), chains)
    sets = {
        "train": [chain for chain in chains if chain.pdb_chain_id in index and in_training_set(chain)],
        "eval": [
            chain
            for chain, day in targets
            if SUBMITTED[0] <= day <= SUBMITTED[1] and len(chain.sequence) <= MOST_RESIDUES
        ],
    }
    for split, name in SPLITS.items():
        if not sets[split]:
            raise DataError(f"{source.root} has no chain for {name}: all are outside of the limits of dates and sizes")
        atomic.save(data_dir / name, np.array([_row(chain, index) for chain in sets[split]], np.int64))
    known = [[encode_name(chain.pdb_id), encode_name(chain.author_chain_id), _day(chain)] for chain in chains]
    atomic.save(data_dir / DAYS, np.array(known, np.int64))
    entries = manifest.describe_files(data_dir, [CHAINS, OBSOLETE, INDEX, DAYS, *SPLITS.values()])
    counts = {f"{split}_samples": len(found) for split, found in sets.items()}
    residues = sum(len(chain.sequence) for chain in sets["train"])
    alone = sum(chain.pdb_chain_id not in index for chain in sets["eval"])
    return entries, counts | {
        "train_residues": residues, "unknown_targets": unknown, "eval_without_alignments": alone
    }  # fmt: skip


def in_training_set(chain: Chain) -> bool:
    """Return whether a chain belongs to the training set, if it has alignments."""
    return (
        chain.release_date <= RELEASED
        and (chain.resolution is None or chain.resolution < LARGEST_RESOLUTION)
        and chain.pdb_cluster_id != NO_CLUSTER
        and max(Counter(chain.sequence).values()) <= LARGEST_SHARE * len(chain.sequence)
    )


def _targets(days: Mapping[str, str], chains: Sequence[Chain]) -> tuple[list[tuple[Chain, str]], int]:
    """Return the chain and the day of submission of each target of the evaluation, and the number of unknown targets.

    A target names an mmcif chain or, if there is none of this name, a chain of the authors. Several targets can name
    the same chain, which then has the day of the first one.
    """
    by_molecule = {f"{chain.pdb_id}_{name}": chain for chain in chains for name in chain.mmcif_chain_ids.split(";")}
    known = {chain.pdb_chain_id: chain for chain in chains} | by_molecule
    found: dict[str, tuple[Chain, str]] = {}
    for name, day in days.items():
        if name in known:
            found.setdefault(known[name].pdb_chain_id, (known[name], day))
    return list(found.values()), sum(name not in known for name in days)


def _row(chain: Chain, index: Index) -> list[int]:
    """Return the row of a chain in the table of its set; see :data:`benchmarks.openfold.samples.SET_COLUMNS`."""
    entry = index.get(chain.pdb_chain_id, {"db": "0.db", "files": []})
    spans = {name: (start, size) for name, start, size in entry["files"]}
    names = encode_name(chain.pdb_id), encode_name(chain.author_chain_id)
    files = [number for name in FILES for number in spans.get(name, (0, 0))]
    database = int(entry["db"].removesuffix(".db"))
    return [*names, _day(chain), len(chain.sequence), chain.pdb_cluster_id, database, *files]


def _day(chain: Chain) -> int:
    return datetime.date.fromisoformat(chain.release_date).toordinal()


COMMANDS = DataCommands(
    "openfold",
    raw="mmCIF files of the Protein Data Bank, and OpenProteinSet",
    prepared="prepared chains",
    real="Protein Data Bank and OpenProteinSet",
    generate=generate,
    prepare=prepare,
    verify=manifest.verification(FORMAT, PREPARE_COMMAND),
    published=PUBLISHED,
    memory_per_worker=MEMORY_PER_WORKER,
)
