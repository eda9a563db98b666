"""How a kernel cuts its work."""

from __future__ import annotations

from types import SimpleNamespace


class Tile(SimpleNamespace):
    """Integers by name that say how a kernel cuts its work: ``Tile(rows=4, columns=1024, warps=8)``.

    Each number is an attribute. ``bench.only=tiles`` searches for faster values. Unless the table of a kernel says
    otherwise, these names mean:

    - ``rows``, ``columns``, ``elements``: size of a tile; ``depth``: the part of a product's sum that is added at once;
    - ``warps``: warps of one program;
    - ``programs``: programs per multiprocessor, each of which walks over many tiles; 0 for one program a tile;
    - ``stages``: tiles that a program has in flight; 1 for plain loads.
    """

    def __hash__(self) -> int:  # type: ignore[override]  # nobody changes a tile
        return hash(tuple(sorted(vars(self).items())))

    def replace(self, **numbers: int) -> Tile:
        """Return a tile with other numbers in place of some.

        Raises:
            TypeError: the tile has no number of such a name.
        """
        if unknown := numbers.keys() - vars(self).keys():
            raise TypeError(f"{self} has no {', '.join(sorted(unknown))}")
        return Tile(**{**vars(self), **numbers})
