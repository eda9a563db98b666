"""Names of the prepared files, below the prepared folder.

F numbers of a node's features, E edges, S seeds:

- ``features/<type>.npy``: (N, F), as e4m3 (its bits as uint8), float16 or float32;
- ``graph/<relation>/indptr.npy``: int64 (N of the target's type + 1,); ``graph/<relation>/indices.npy``: int32 (E,);
- ``seeds/<split>.npy``: int32 (S,), in the split's order; ``seeds/<split>_labels.npy``: int16 (S,).

Nodes of every type are numbered in the order of its permutation, here and there.
"""

from __future__ import annotations

from benchmarks.rgat.schema import Relation, Schema

SPLITS = ("train", "eval")


def features_name(node_type: str) -> str:
    """The features of a type."""
    return f"features/{node_type}.npy"


def indptr_name(relation: Relation) -> str:
    """Where the edges of each target of a relation begin, and the number of all."""
    return f"graph/{relation}/indptr.npy"


def indices_name(relation: Relation) -> str:
    """The edges' sources."""
    return f"graph/{relation}/indices.npy"


def seeds_name(split: str) -> str:
    """The nodes of a split."""
    return f"seeds/{split}.npy"


def labels_name(split: str) -> str:
    """Their classes."""
    return f"seeds/{split}_labels.npy"


def prepared_files(schema: Schema) -> list[str]:
    """All of them."""
    features = [features_name(name) for name in schema.types]
    graph = [name(relation) for relation in schema.relations for name in (indptr_name, indices_name)]
    return [*features, *graph, *(name(split) for split in SPLITS for name in (seeds_name, labels_name))]
