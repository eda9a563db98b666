"""What each annotation of a configuration's fields takes and refuses, and what the message says."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Annotated

import pytest

from common.config import ranges
from common.config.loading import build
from common.config.ranges import AtLeast, Each, Range
from common.errors import ConfigError
from common.optim.hparams import AdaptiveEpsilon

NOTHING_AND_ENDLESS = (math.nan, math.inf, -math.inf)
TINY = sys.float_info.min  # the smallest above 0 that every processor mode keeps

CASES = {
    "Positive": (ranges.Positive, "positive and finite", (TINY, 1.0, 1e308), (0.0, -1.0)),
    "NotNegative": (ranges.NotNegative, "finite and not negative", (0, 2**40, 0.0, -0.0, 1e308), (-1, -TINY)),
    "Finite": (ranges.Finite, "finite", (-1e308, 0.0, 1e308), ()),
    "Probability": (ranges.Probability, "a probability", (0.0, 0.5, 1.0), (-0.1, 1.0000001)),
    "ProbabilityBelowOne": (ranges.ProbabilityBelowOne, "a probability below 1", (0.0, 0.999), (-0.1, 1.0)),
    "Share": (ranges.Share, "a share", (0.0, 1.0), (-0.1, 1.1)),
    "ShareBelowOne": (ranges.ShareBelowOne, "a share below 1", (0.0, 0.999), (-0.1, 1.0)),
    "ShareAboveZero": (ranges.ShareAboveZero, "a share above 0", (TINY, 1.0), (0.0, 1.1)),
    "Decay": (ranges.Decay, "at least 0 and below 1", (0.0, 0.999), (-0.1, 1.0)),
    "AtLeast(1)": (AtLeast(1), "at least 1", (1, 2**40), (0, -1)),
    "AtLeast(0, …)": (AtLeast(0, "0 or more steps"), "0 or more steps", (0, 1), (-1,)),
    # numpy.finfo("float32").tiny is 1.17549435e-38
    "AdaptiveEpsilon": (AdaptiveEpsilon, "finite and at least 1.2e-38", (1.17549436e-38, 1.0), (1.17549434e-38, 0.0)),
}


def refusal(wanted: Range, value: object, kind: type = float) -> str:
    """The message that refuses ``value`` in a section, and an empty one if it is taken."""

    @dataclass(frozen=True)
    class Section:
        value: object

    Section.__annotations__["value"] = Annotated[kind, wanted]
    try:
        assert build(Section, {"value": value}, "some.section").value == value
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_values_in_the_range_are_taken(name):
    wanted, _, taken, _ = CASES[name]
    assert [value for value in taken if refusal(wanted, value, type(value))] == []


@pytest.mark.parametrize("name", CASES)
def test_a_value_outside_its_range_is_refused_with_key_value_and_range(name):
    wanted, needed, _, refused = CASES[name]
    for value in refused:
        assert refusal(wanted, value, type(value)) == f"some.section.value={value}: {needed}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", NOTHING_AND_ENDLESS)
def test_no_range_takes_nan_or_infinity(name, value):
    wanted, needed, _, _ = CASES[name]
    assert refusal(wanted, value) == f"some.section.value={value}: {needed}"


def test_every_annotation_has_a_case():
    named = {name for name, value in vars(ranges).items() if isinstance(value, Range)}
    assert named <= CASES.keys()


@dataclass(frozen=True)
class Schedule:
    """A section whose fields have all kinds of annotations."""

    rates: Annotated[tuple[float, ...], Each(ranges.Positive)] = (1.0,)
    steps: Annotated[int, AtLeast(1, "at least 1, or null")] | None = None
    limits: dict[str, Annotated[int, ranges.NotNegative]] | None = None
    warmup: Annotated[int, ranges.NotNegative] = 0
    total: int = 1

    def __post_init__(self) -> None:
        if self.warmup > self.total:
            raise ConfigError(f"warmup={self.warmup}: at most total={self.total}")


@dataclass(frozen=True)
class Outer:
    """A section in a section."""

    schedule: Schedule


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rates": [1.0, 0.0]}, "outer.schedule.rates=(1.0, 0.0): positive and finite"),
        ({"rates": [1.0, math.nan]}, "outer.schedule.rates=(1.0, nan): positive and finite"),
        ({"rates": 1.0}, "outer.schedule.rates=1.0: expected a list"),
        ({"steps": 0}, "outer.schedule.steps=0: at least 1, or null"),
        ({"steps": "many"}, "outer.schedule.steps=many: expected int, got str"),
        ({"limits": {"a": 1, "b": -1}}, "outer.schedule.limits.b=-1: finite and not negative"),
        ({"warmup": 2}, "outer.schedule.warmup=2: at most total=1"),
        ({"warmup": 2.0}, "outer.schedule.warmup=2.0: expected int, got float"),
    ],
)
def test_a_range_is_checked_wherever_a_type_is_and_the_message_has_the_whole_key(values, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        build(Outer, {"schedule": values}, "outer")


def test_null_is_in_every_range_that_may_be_null():
    assert build(Outer, {"schedule": {"steps": None, "limits": None}}, "outer").schedule == Schedule()


def test_an_extended_section_keeps_the_ranges_of_the_first_unless_it_names_its_own():
    @dataclass(frozen=True)
    class Longer(Schedule):
        warmup: Annotated[int, AtLeast(2)] = 2

    with pytest.raises(ConfigError, match=r"^warmup=1: at least 2$"):
        build(Longer, {"warmup": 1}, "")
    with pytest.raises(ConfigError, match=r"^steps=0: at least 1, or null$"):
        build(Longer, {"steps": 0, "total": 2}, "")
