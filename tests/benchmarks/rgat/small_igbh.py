"""IGBH with a handful of nodes: facts in the place of the benchmark's."""

from __future__ import annotations

TYPES = ["paper", "author", "institute", "fos", "journal", "conference"]
RELATIONS = [
    "paper__cites__paper",
    "paper__written_by__author",
    "author__affiliated_to__institute",
    "paper__topic__fos",
    "paper__published__journal",
    "paper__venue__conference",
]
FACTS = {
    "node_types": TYPES,
    "relations": RELATIONS,
    "seeds": "paper",
    "feature_size": 4,
    "classes": 3,
    "labelled": 20,
    "train_share": 0.6,
    "eval_share": 0.1,
}
