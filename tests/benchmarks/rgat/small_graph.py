"""A raw folder of a tiny graph in IGBH's layout, and what a preparation has to make of it, by dictionaries of lists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

NODES = {"paper": 120, "author": 90, "fos": 7}
EDGES = {"paper__cites__paper": 700, "paper__written_by__author": 300, "paper__topic__fos": 200}
WIDTH, CLASSES, LABELLED = 12, 5, 100
SETTINGS = {
    "types": list(NODES),
    "relations": list(EDGES),
    "seeds": "paper",
    "feature_size": WIDTH,
    "classes": CLASSES,
    "labelled": LABELLED,
    "train_share": 0.6,
    "eval_share": 0.2,
}
FILES = [
    *(f"features/{name}.npy" for name in NODES),
    *(
        f"graph/{relation}/{kind}.npy"
        for relation in (
            "paper__cites__paper",
            "paper__written_by__author",
            "paper__topic__fos",
            "author__rev_written_by__paper",
            "fos__rev_topic__paper",
        )
        for kind in ("indptr", "indices")
    ),
    *(f"seeds/{name}.npy" for name in ("train", "train_labels", "eval", "eval_labels")),
]


def write_raw(folder: Path, seed: int = 0) -> Path:
    """Papers' features and labels without a header, the rest with one; labels beyond the labelled are nonsense."""
    random = np.random.default_rng(seed)
    for name, count in NODES.items():
        values = random.standard_normal((count, WIDTH)).astype(np.float32) * 20
        path = folder / name / "node_feat.npy"
        path.parent.mkdir(parents=True)
        values.tofile(path) if name == "paper" else np.save(path, values)
    labels = random.integers(CLASSES, size=NODES["paper"]).astype(np.float32)
    labels[LABELLED:] = np.nan
    labels.tofile(folder / "paper" / "node_label_2K.npy")
    for relation, count in EDGES.items():
        source, _, target = relation.split("__")
        # Squares: popular nodes, duplicates, and nodes without an edge; the last author and field have none.
        ends = [
            (random.random(count) ** 2 * (NODES[name] - (name != "paper"))).astype(np.int64)
            for name in (source, target)
        ]
        edges = np.stack(ends, axis=1)
        if source == target:
            edges[::20, 1] = edges[::20, 0]  # self-loops, some of them twice
        (folder / relation).mkdir()
        np.save(folder / relation / "edge_index.npy", edges.astype(np.int32) if "fos" in relation else edges)
    mark(folder)
    return folder


def mark(folder: Path, **settings: object) -> None:
    (folder / "SYNTHETIC").write_text(json.dumps({"kind": "tiny", "settings": {**SETTINGS, **settings}}))


def raw_features(folder: Path, name: str) -> np.ndarray:
    path = folder / name / "node_feat.npy"
    return np.fromfile(path, np.float32).reshape(-1, WIDTH) if name == "paper" else np.load(path)


def raw_labels(folder: Path) -> np.ndarray:
    return np.fromfile(folder / "paper" / "node_label_2K.npy", np.float32)


def raw_edges(folder: Path, relation: str) -> np.ndarray:
    return np.load(folder / relation / "edge_index.npy").astype(np.int64)


def permutations() -> dict[str, np.ndarray]:
    """The new number of each node: drawn from one generator, in the order of the types."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randperm(count, generator=generator).numpy() for name, count in NODES.items()}


def augmented(folder: Path) -> dict[str, dict[int, list[int]]]:
    """Sources of each target, by relation, in raw numbers: the augmentation edge by edge."""
    made: dict[str, dict[int, list[int]]] = {}
    for relation in EDGES:
        source, name, target = relation.split("__")
        edges = [(int(a), int(b)) for a, b in raw_edges(folder, relation)]
        own = made.setdefault(relation, {node: [] for node in range(NODES[target])})
        if source == target:
            cited = [(a, b) for a, b in edges if a != b] + [(node, node) for node in range(NODES[source])]
            for a, b in cited + [(b, a) for a, b in cited]:
                own[b].append(a)
        else:
            back = made.setdefault(f"{target}__rev_{name}__{source}", {node: [] for node in range(NODES[source])})
            for a, b in edges:
                own[b].append(a)
                back[a].append(b)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    """All prepared files."""
    return {name: (folder / name).read_bytes() for name in FILES}
