"""Names of the prepared files, relative to the prepared folder.

N nodes, F features per node, E edges, S seeds:

- ``features/<type>.npy``: (N, F), as e4m3 (bits as uint8), float16 or float32;
- ``graph/<relation>/indptr.npy``: int64 (targets + 1,); ``graph/<relation>/indices.npy``: int32 (E,);
- ``seeds/<split>.npy``: int32 (S,), in the order of the split; ``seeds/<split>_labels.npy``: int16 (S,).

Nodes of every type are numbered by its permutation, in all files.
"""

from __future__ import annotations

from benchmarks.rgat.graph import Relation, Schema

SPLITS = ("train", "eval")


def features_name(node_type: str) -> str:
    """Return the name of a type's features."""
    return f"features/{node_type}.npy"


def indptr_name(relation: Relation) -> str:
    """Return the name of the file with the first edge of each target, followed by the number of edges."""
    return f"graph/{relation}/indptr.npy"


def indices_name(relation: Relation) -> str:
    """Return the name of the file with the edges' sources."""
    return f"graph/{relation}/indices.npy"


def seeds_name(split: str) -> str:
    """Return the name of the file with the nodes of a split."""
    return f"seeds/{split}.npy"


def labels_name(split: str) -> str:
    """Return the name of the file with the classes of these nodes."""
    return f"seeds/{split}_labels.npy"


def prepared_files(schema: Schema) -> list[str]:
    """Return the names of all prepared files."""
    features = [features_name(name) for name in schema.types]
    graph = [name(relation) for relation in schema.relations for name in (indptr_name, indices_name)]
    return [*features, *graph, *(name(split) for split in SPLITS for name in (seeds_name, labels_name))]
