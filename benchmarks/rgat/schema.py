"""Node types of a graph, and the relations between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

SEPARATOR = "__"
REVERSED = "rev_"


@dataclass(frozen=True)
class Relation:
    """Edges of one kind, from ``source`` to ``target``."""

    source: str
    name: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Relation:
        """Return the relation of a folder name such as ``paper__cites__paper``.

        Raises:
            ValueError: the name does not have three parts.
        """
        parts = text.split(SEPARATOR)
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{text!r} is no relation: source__name__target")
        return cls(*parts)

    def __str__(self) -> str:
        return SEPARATOR.join((self.source, self.name, self.target))

    @property
    def symmetric(self) -> bool:
        """Whether source and target have one type. The reversed edges then belong to the relation itself."""
        return self.source == self.target

    @property
    def reverse(self) -> Relation:
        """Relation of the reversed edges, with separate weights; for a reversed relation, the stored one."""
        name = self.name.removeprefix(REVERSED) if self.name.startswith(REVERSED) else REVERSED + self.name
        return Relation(self.target, name, self.source)


@dataclass(frozen=True)
class Schema:
    """Node types and relations that a network sees, both in a fixed order.

    Attributes:
        types: names of the node types.
        seeds: node type that is classified.
    """

    types: tuple[str, ...]
    relations: tuple[Relation, ...]
    seeds: str

    @classmethod
    def augmented(cls, types: Sequence[str], stored: Sequence[str], seeds: str) -> Schema:
        """Return the schema for ``stored`` relations: each relation between two types also gets its reverse.

        Raises:
            ValueError: a relation has no valid name, or joins unknown types.
        """
        forward = [Relation.parse(text) for text in stored]
        backward = [relation.reverse for relation in forward if not relation.symmetric]
        return cls(tuple(types), (*forward, *backward), seeds)

    def __post_init__(self) -> None:
        if self.seeds not in self.types:
            raise ValueError(f"nodes of type {self.seeds!r} are classified, and the types are {', '.join(self.types)}")
        for relation in self.relations:
            for end in (relation.source, relation.target):
                if end not in self.types:
                    raise ValueError(f"{relation} joins {end!r}, and the types are {', '.join(self.types)}")
        for what, names in (("types", self.types), ("relations", self.relations)):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what} are the same: {', '.join(str(name) for name in names)}")

    @functools.cached_property
    def seed_type(self) -> int:
        """Index of the seeds' type."""
        return self.types.index(self.seeds)

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """Index of each relation's source type."""
        return tuple(self.types.index(relation.source) for relation in self.relations)

    @functools.cached_property
    def targets(self) -> tuple[int, ...]:
        """Index of each relation's target type."""
        return tuple(self.types.index(relation.target) for relation in self.relations)

    def into(self, node_type: int) -> tuple[int, ...]:
        """Return the indices of the relations into a node type."""
        return tuple(number for number, target in enumerate(self.targets) if target == node_type)
