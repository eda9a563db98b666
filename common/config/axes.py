"""Sizes of the layout axes: pipeline (pp), data (dp), context (cp) and tensor (tp) parallelism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from common.errors import ConfigError


def factor(world_size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of pp, cp and tp (default 1), and of dp, which takes all remaining ranks.

    Raises:
        ConfigError: an unknown axis or size, or the product of pp, cp and tp does not divide ``world_size``.
    """
    fixed = {axis: int(sizes.get(axis, 1)) for axis in ("pp", "cp", "tp")}
    for axis, size in sizes.items():
        if axis not in fixed:
            raise ConfigError(f"layout.{axis}={size}: the axes to choose are pp, cp and tp; dp takes the other ranks")
        if size < 1:
            raise ConfigError(f"layout.{axis}={size}: an axis has a positive size")
    used = math.prod(itertools.chain(fixed.values(), [1]))
    if world_size % used:
        named = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
        raise ConfigError(f"layout: {named} = {used} does not divide {world_size} ranks")
    return {**fixed, "dp": world_size // used}
