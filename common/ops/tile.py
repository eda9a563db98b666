"""Sizes by which a kernel divides its work."""

from __future__ import annotations

from types import SimpleNamespace


class Tile(SimpleNamespace):
    """Named integers by which a kernel divides its work: ``Tile(rows=4, columns=1024, warps=8)``.

    Each number is an attribute. ``bench.only=tiles`` searches for faster values. Unless the table of a kernel says
    otherwise, these names mean:

    - ``rows``, ``columns``, ``elements``: size of a tile;
    - ``depth``: part of the inner dimension of a matrix product that one step multiplies;
    - ``warps``: warps per program;
    - ``programs``: programs per multiprocessor, each of which loops over many tiles; 0 for one program per tile;
    - ``stages``: tiles that a program loads ahead; 1 for plain loads.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # tiles are never modified
        return hash(tuple(sorted(vars(self).items())))

    def replace(self, **numbers: int) -> Tile:
        """Return a copy of the tile with the given attributes replaced.

        Raises:
            TypeError: the tile has no number of that name.
        """
        if unknown := numbers.keys() - vars(self).keys():
            raise TypeError(f"{self} has no {', '.join(sorted(unknown))}")
        return Tile(**{**vars(self), **numbers})
