"""Which iterations get a graph of their own, and that each reads the micro-batches that it is given.

Graphs are played here: one remembers the batches that it was captured with, and a replay reads them again.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.step import graphs
from common.step.graphs import StepRunner, combinations
from common.step.train_step import DeviceResult


class Weighing:
    """A step whose result is the sum of its micro-batches' numbers, the second one's tenfold, and so on."""

    rehearsing, one_key = None, False

    def __init__(self) -> None:
        self.layout, self.skip = Layout(), torch.zeros(())
        self.seen: list[Batch] = []
        self.runs: list[tuple[object, ...]] = []

    def __call__(self, micro_batches) -> DeviceResult:
        self.seen = list(micro_batches)
        if not self.skip:
            self.runs.append(tuple(batch.key for batch in micro_batches))
        return DeviceResult(self.weigh(micro_batches), ("loss",))

    @staticmethod
    def weigh(micro_batches) -> torch.Tensor:
        return torch.stack([batch.tensors["x"] * 10.0**index for index, batch in enumerate(micro_batches)]).sum()


class PlayedGraph:
    """A graph that on replay does again what was captured."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.result = torch.zeros(())

    def pool(self) -> None: ...

    def replay(self) -> None:
        self.result.copy_(Weighing.weigh(self.batches))


@pytest.fixture
def warmed(monkeypatch):
    """A function that makes a runner, warmed up for the keys, whose graphs are played."""

    @contextlib.contextmanager
    def capturing(graph, stream, pool):
        yield
        graph.batches = step.seen

    monkeypatch.setattr(graphs, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    step = Weighing()

    def warm_up(keys: str, micro_batches: int) -> tuple[StepRunner, Weighing]:
        runner = StepRunner(step, nn.Identity(), micro_batches)
        runner.capture, runner.stream = True, SimpleNamespace()
        monkeypatch.setattr(runner, "on_stream", contextlib.nullcontext)
        runner.warm_up([Batch({"x": torch.tensor(-1.0)}, 1, key) for key in keys])
        for captured in runner._captured.values():
            captured.graph.result = captured.result.values
        return runner, step

    return warm_up


def micro_batches(keys: str, first: int = 1) -> list[Batch]:
    """One for each key, numbered from ``first``."""
    return [Batch({"x": torch.tensor(float(number))}, 1, key) for number, key in enumerate(keys, first)]


def test_every_combination_of_keys_has_a_graph_and_no_order_has_one_of_its_own():
    assert combinations("ab", 3) == [tuple(keys) for keys in ("aaa", "aab", "abb", "bbb")]
    assert combinations("abcd", 1) == [("a",), ("b",), ("c",), ("d",)]
    assert len(combinations("ab", 8)) == 9
    assert combinations("ab", 3, one_key=True) == [("a",) * 3, ("b",) * 3]


def test_where_combinations_are_many_only_micro_batches_of_one_key_have_a_graph():
    assert len(combinations("ab", 15)) == 16 == graphs.MOST_GRAPHS
    assert combinations("ab", 16) == [("a",) * 16, ("b",) * 16]
    assert combinations("abcd", 8) == [(key,) * 8 for key in "abcd"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [("aaa", 321.0), ("aba", 231.0), ("bbb", 321.0), ("bab", 312.0)],
    ids=["aaa", "aba", "bbb", "bab"],
)
def test_a_graph_reads_the_micro_batches_sorted_by_their_keys(warmed, keys, expected):
    runner, step = warmed("ab", 3)
    runner(micro_batches("abb", 5))  # what other graphs have left in inputs that are common does not matter
    assert runner(micro_batches(keys)).values.item() == expected
    assert step.runs == []
    assert runner.uncaptured == {}


def test_an_eager_iteration_has_the_same_order_as_a_captured_one(warmed):
    runner, step = warmed("ba", 3)
    runner.capture = False
    runner._captured.clear()
    assert runner(micro_batches("aba")).values.item() == 312.0
    assert step.runs == [("b", "a", "a")]
    assert runner.uncaptured == {}


def test_a_batch_without_a_graph_runs_eagerly_and_is_counted(warmed):
    runner, step = warmed("ab", 2)
    for keys in ("ca", "ac", "a"):
        runner(micro_batches(keys))
    assert runner.uncaptured == {("a", "c"): 2, ("a",): 1}
    assert step.runs == [("a", "c"), ("a", "c"), ("a",)]
