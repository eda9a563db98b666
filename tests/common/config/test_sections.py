"""Base classes and functions for the sections of a workload's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from common.config.sections import unused_layers, used_layers
from common.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    wide: int = 4
    narrow: int = 6
    hidden: int = 8


def asked(wide: int, narrow: int) -> SimpleNamespace:
    return SimpleNamespace(wide=wide, narrow=narrow)


def test_zero_stands_for_all_layers() -> None:
    assert used_layers(Sizes(), asked(0, 2), "network", "wide", "narrow") == Sizes(4, 2)
    assert used_layers(Sizes(), asked(3, 6), "network", "wide", "narrow") == Sizes(3, 6)


def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.narrow=7: the base has 6; 0 uses all"):
        used_layers(Sizes(), asked(1, 7), "base", "wide", "narrow")


def test_layers_that_are_left_out_are_named() -> None:
    own = SimpleNamespace(facts=Sizes(), model=asked(3, 6))
    assert unused_layers(own, "network", "wide", "narrow") == ["model.wide=3: the network has 4"]
    own.model = asked(0, 0)
    assert not unused_layers(own, "network", "wide", "narrow")
