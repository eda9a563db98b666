"""How many thread blocks NCCL takes of a GPU for a communicator, and how soon, beside products that need them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from common.config.schema import Ctas

NCCLS_OWN = Ctas()

MOST_OF_LINKS = 2
"""Of neighbours in a pipeline: who waits for a message holds thread blocks until it comes, and products lack them."""


def of_axes(ctas: Mapping[str, Ctas], axes: tuple[str, ...]) -> Ctas:
    """Those of a communicator over some axes: of ``dp``, which moves most, if it is among them, else of the first.

    Args:
        ctas: by axis; a missing one is left to NCCL.
        axes: that the communicator spans, outermost first.
    """
    leading = "dp" if "dp" in axes else next(iter(axes), "")
    return ctas.get(leading, NCCLS_OWN)


def of_links(ctas: Mapping[str, Ctas], axis: str) -> Ctas:
    """Those of two neighbours on an axis, who hand on to each other: few, unless more are asked for."""
    asked = ctas.get(axis, NCCLS_OWN)
    few = asked.max is None and (asked.min or 0) <= MOST_OF_LINKS
    return replace(asked, max=MOST_OF_LINKS) if few else asked


def options(ctas: Ctas) -> Any:
    """For a process group that is made; None where nothing is asked for, and on Gloo, which has no thread blocks."""
    given = {"min_ctas": ctas.min, "max_ctas": ctas.max, "cga_cluster_size": ctas.cluster}
    given = {name: value for name, value in given.items() if value is not None}
    if ctas == NCCLS_OWN or dist.get_backend() != "nccl":
        return None
    made: Any = dist.ProcessGroupNCCL.Options()
    if ctas.priority == "high":
        made.is_high_priority_stream = True
    for name, value in given.items():
        setattr(made.config, name, value)
    return made


def in_words(ctas: Ctas) -> str:
    """For people; nothing where all is NCCL's own choice."""
    parts = (("at least", ctas.min), ("at most", ctas.max), ("in clusters of", ctas.cluster))
    given = [f"{words} {value}" for words, value in parts if value is not None]
    return ", ".join(given if ctas.priority == "normal" else [*given, f"at {ctas.priority} priority"])
