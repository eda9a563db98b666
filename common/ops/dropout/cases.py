"""Cases of dropout of hidden states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from common.ops.cases import Case, Draw, Pass, both_ways, size_of
from common.ops.sizes import transformer as size


def passes(
    function: Callable[..., Tensor], draw: Draw, tokens: int, features: int, p: float, site: int = size.SITE
) -> list[Pass]:
    """Make the forward and backward passes."""
    x, dy, seed = draw.normal(tokens, features), draw.normal(tokens, features), draw.seed()
    moved = 2 * size_of(x)
    return both_ways(lambda: function(x, p, seed, site), [x], [dy], moved=(moved, moved))


CASES = (
    Case(
        "BERT-large",
        passes,
        {"tokens": size.PACKS * size.LENGTH, "features": size.HIDDEN, "p": size.PROBABILITY},
        tests=[
            {"tokens": 7, "features": 333},
            {"tokens": 3, "features": 4099, "p": 0.5, "site": 1_000_003},
            {"tokens": 1, "features": 999, "p": 0.999, "site": 0},
            {"tokens": 2, "features": 5, "p": 0.0},
        ],
        gpu={"tokens": 2931},
        exact=True,
    ),
)
