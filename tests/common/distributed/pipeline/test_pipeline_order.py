"""The order of a pipeline's work: the published formula, dependences, memory, idle time, and PyTorch's orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from common.distributed.pipeline.order import (
    Unit,
    check_numbers,
    follower,
    forward_order,
    layers_of,
    most_in_flight,
    order,
    receives,
    slots,
    slots_of_chunks,
    warm_up_units,
)
from common.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """Result of a simulation.

    Attributes:
        started: for each stage, its units in order with their start times.
        ended: time at which the last unit of any stage ends.
        busy: total working time of each stage.
    """

    started: tuple[tuple[tuple[Unit, float], ...], ...]
    ended: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Return the idle time of the busiest stage, as a fraction of its working time."""
        return (self.ended - max(self.busy)) / max(self.busy)


@dataclass
class _Link:
    """Messages from one stage to the next, with the times at which each was sent, taken and received."""

    ahead: int | None
    transfer: float
    sent: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    there: list[float] = field(default_factory=list)

    def arrive(self) -> None:
        """Compute the arrival times of all messages that have been sent and have a posted receive."""
        while len(self.there) < len(self.sent):
            number = len(self.there)
            begins = self.sent[number]
            if self.ahead is not None and number >= self.ahead:
                if number - self.ahead >= len(self.taken):
                    return
                begins = max(begins, self.taken[number - self.ahead])
            if self.there:
                begins = max(begins, self.there[-1])
            self.there.append(begins + self.transfer)


@dataclass
class _Stage:
    units: list[Unit]
    time: float = 0.0
    started: list[tuple[Unit, float]] = field(default_factory=list)
    working: bool = False

    @property
    def ended(self) -> int:
        """Return the number of completed units."""
        return len(self.started) - self.working


def simulate(
    stages: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    transfer: float = 0.0,
    ahead: int | None = None,
    outstanding: int | None = None,
    orders: Sequence[Sequence[Unit]] | None = None,
) -> Timing:
    """Simulate one iteration of all stages.

    Args:
        stages, chunks, micro_batches: see :func:`common.distributed.pipeline.order.order`.
        forward, backward: duration of a unit.
        transfer: duration of a message; it does not delay the work of sender or receiver.
        ahead: number of receives posted on a link beyond the messages taken; None for no limit. Without a posted
            receive a message waits at its sender.
        outstanding: number of unfinished messages on a link at which a sender waits before the next; None for no limit.
        orders: units of every stage in order; None for the order of :func:`common.distributed.pipeline.order.order`.

    Raises:
        RuntimeError: the stages deadlock.
    """
    ranks = [_Stage(list(orders[r] if orders else order(r, stages, chunks, micro_batches))) for r in range(stages)]
    lengths = {"forward": forward, "backward": backward}
    links = {(d, r): _Link(ahead, transfer) for d in lengths for r in range(stages)}
    while any(stage.ended < len(stage.units) for stage in ranks):
        moved = False
        for rank, stage in enumerate(ranks):
            while stage.ended < len(stage.units) and _work(rank, stage, stages, chunks, lengths, links, outstanding):
                moved = True
        if not moved:
            waiting = {r: stage.units[stage.ended] for r, stage in enumerate(ranks) if stage.ended < len(stage.units)}
            raise RuntimeError(f"the stages of a pipeline wait for each other: {waiting}")
    busy = tuple(sum(lengths[unit.direction] for unit in stage.units) for stage in ranks)
    return Timing(tuple(tuple(stage.started) for stage in ranks), max(stage.time for stage in ranks), busy)


def _work(
    rank: int,
    stage: _Stage,
    stages: int,
    chunks: int,
    lengths: dict[str, float],
    links: dict[tuple[str, int], _Link],
    outstanding: int | None,
) -> bool:
    """Start a stage's next unit or end its running unit. Return False if its time is not known yet."""
    unit = stage.units[len(stage.started) - stage.working]
    if not stage.working:
        starts = stage.time
        if receives(rank, stages, chunks, unit):
            link = links[unit.direction, rank]
            link.arrive()
            if len(link.there) <= len(link.taken):
                return False
            starts = max(starts, link.there[len(link.taken)])
            link.taken.append(starts)
        stage.started.append((unit, starts))
        stage.time = starts + lengths[unit.direction]
        stage.working = True
    to = follower(rank, stages, chunks, unit)
    if to is not None:
        link = links[unit.direction, to[0]]
        waited_for = -1 if outstanding is None else len(link.sent) - outstanding
        if waited_for >= 0:
            link.arrive()
            if len(link.there) <= waited_for:
                return False
            stage.time = max(stage.time, link.there[waited_for])
        link.sent.append(stage.time)
    stage.working = False
    return True


PLAIN = [(p, 1, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 13)]
INTERLEAVED = [(p, v, r * p) for p in (2, 3, 4, 6, 8) for v in (2, 3, 6) for r in (1, 2, 5)]
PUBLISHED = [(8, 6, 64), (8, 6, 128), (6, 8, 6), (8, 12, 128), (8, 12, 8), (8, 4, 72)]
TRIPLES = [*PLAIN, *INTERLEAVED, *PUBLISHED]


def by_formula(rank: int, p: int, v: int, m: int) -> list[tuple[str, int, int]]:
    """Unit k of each direction as Megatron-LM computes it, one by one."""

    def unit(direction: str, k: int) -> tuple[str, int, int]:
        chunk = k % (p * v) // p
        return direction, chunk if direction == "forward" else v - 1 - chunk, k // (p * v) * p + k % p

    total = m * v
    first = total if m == p else min(total, 2 * (p - rank - 1) + (v - 1) * p)
    units = [unit("forward", k) for k in range(first)]
    for k in range(first, total):
        units += [unit("forward", k), unit("backward", k - first)]
    return units + [unit("backward", k) for k in range(total - first, total)]


@pytest.mark.parametrize(("p", "v", "m"), [*INTERLEAVED, *PUBLISHED])
def test_interleaved_order_is_the_published_formula(p, v, m):
    for rank in range(p):
        assert [tuple(unit) for unit in order(rank, p, v, m)] == by_formula(rank, p, v, m)


def test_a_worked_case():
    units = [f"{unit.direction[0]}{unit.micro_batch}" for unit in order(1, 3, 1, 4)]
    assert units == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]


@pytest.mark.slow_cases("8-12-128")
@pytest.mark.parametrize(("p", "v", "m"), TRIPLES)
def test_every_unit_runs_once_and_after_its_inputs(p, v, m):
    done = set()
    timing = simulate(p, v, m)
    events = sorted((time, rank, unit) for rank, units in enumerate(timing.started) for unit, time in units)
    ends = {}
    for time, rank, unit in events:
        part, last = unit.chunk * p + rank, p * v - 1
        needed = []
        if unit.direction == "forward" and part > 0:
            needed = [("forward", part - 1)]
        if unit.direction == "backward":
            needed = [("forward", part)] + ([("backward", part + 1)] if part < last else [])
        assert all(ends[direction, at, unit.micro_batch] <= time for direction, at in needed)
        ends[unit.direction, part, unit.micro_batch] = time + (1.0 if unit.direction == "forward" else 2.0)
        done.add((rank, unit))
    assert len(done) == len(events) == 2 * p * v * m


@pytest.mark.parametrize(("p", "v", "m"), TRIPLES)
def test_idle_time_is_the_formula(p, v, m):
    forward, backward = 1.0, 2.0
    wanted = Fraction(p - 1, m * v)
    assert simulate(p, v, m, forward, backward).bubble == pytest.approx(float(wanted), abs=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 2, 8), (8, 6, 16), (6, 8, 6), (2, 2, 2)])
def test_one_receive_ahead_and_one_send_outstanding_cost_no_time(p, v, m):
    free = simulate(p, v, m, transfer=0.2)
    assert simulate(p, v, m, transfer=0.2, ahead=1, outstanding=1).ended == pytest.approx(free.ended, abs=1e-9)


def test_stages_that_wait_for_each_other_are_found():
    wrong = [order(0, 2, 1, 2)[::-1], order(1, 2, 1, 2)]
    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate(2, 1, 2, orders=wrong)


@pytest.mark.parametrize(("p", "v", "m"), TRIPLES)
def test_memory_in_flight_is_the_formula(p, v, m):
    for rank in range(p):
        held = most_in_flight(order(rank, p, v, m))
        if v == 1:
            assert held == min(p - rank, m)
        else:
            assert held == min(warm_up_units(rank, p, v, m) + 1, m * v)


@pytest.mark.parametrize(("p", "v", "m"), TRIPLES)
def test_the_gradients_of_a_chunk_are_final_after_its_last_micro_batch_and_later_chunks_come_first(p, v, m):
    for rank in range(p):
        last = {unit.chunk: (at, unit.micro_batch) for at, unit in enumerate(order(rank, p, v, m)) if unit[0][0] == "b"}
        assert {micro_batch for _, micro_batch in last.values()} == {m - 1}
        assert sorted(last, key=lambda chunk: last[chunk][0]) == list(range(v))[::-1]


def pytorchs(schedule: type, p: int, v: int, m: int) -> dict[int, list[Unit]]:
    """The order of PyTorch's schedule, from its own planning, without idle places."""
    planner: Any = schedule.__new__(schedule)
    planner._n_microbatches, planner.pp_group_size, planner._num_stages, planner.n_local_stages = m, p, p, v
    planner.number_of_rounds = max(1, m // p)
    planner.microbatches_per_round = m // planner.number_of_rounds
    planner._stage = SimpleNamespace(submod=None)
    if schedule is Schedule1F1B:
        found = planner._get_pipeline_order()
    else:
        found = {rank: planner._calculate_single_rank_operations(rank) for rank in range(p)}
    orders = {}
    for rank, actions in found.items():
        orders[rank] = [
            Unit("forward" if action.computation_type.name == "FORWARD" else "backward", action.stage_index // p, mb)
            for action in actions
            if action is not None and (mb := action.microbatch_index) is not None
            and action.computation_type.name in ("FORWARD", "FULL_BACKWARD")
        ]  # fmt: skip
    return orders


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 8), (8, 9)])
def test_one_chunk_in_the_order_of_pytorch(p, m):
    # PyTorch's listing, which it does not run by, counts the last stage's forward passes from 1 and has one too many.
    found = pytorchs(Schedule1F1B, p, 1, m)
    assert [order(rank, p, 1, m) for rank in range(p - 1)] == [found[rank] for rank in range(p - 1)]


@pytest.mark.parametrize(("p", "v", "m"), [t for t in INTERLEAVED if t[0] < t[2]])
def test_several_chunks_in_the_order_of_pytorch(p, v, m):
    assert {rank: order(rank, p, v, m) for rank in range(p)} == pytorchs(ScheduleInterleaved1F1B, p, v, m)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 3), (4, 2, 3), (4, 2, 6), (3, 3, 1)])
def test_forward_only_sees_all_micro_batches_in_the_order_that_neighbours_share(p, v, m):
    units = forward_order(p, v, m)
    assert sorted(units) == [Unit("forward", chunk, mb) for chunk in range(v) for mb in range(m)]
    assert simulate(p, v, m, orders=[units] * p, ahead=1, outstanding=1).busy == (float(v * m),) * p


NUMBERS = [
    (p, v, m)
    for p in range(1, 9)
    for v in (1, 2, 3, 6)
    for m in (1, 2, 3, 4, 8, 12, 24, 40)
    if not (p == 1 < v) and not (v > 1 and m % p)
]


@pytest.mark.parametrize(("p", "v", "m"), NUMBERS)
def test_a_slot_is_one_micro_batchs_until_its_backward_pass_and_none_is_spare(p, v, m):
    for rank in range(p):
        units = order(rank, p, v, m)
        slot_of, counts = slots(units), slots_of_chunks(units)
        held = {}
        most = dict.fromkeys(range(v), 0)
        for direction, chunk, micro_batch in units:
            slot = chunk, slot_of[chunk, micro_batch]
            if direction == "forward":
                assert slot not in held
                held[slot] = micro_batch
            else:
                assert held.pop(slot) == micro_batch
            most[chunk] = max(most[chunk], sum(of == chunk for of, _ in held))
        assert not held
        assert counts == most


@pytest.mark.parametrize(("p", "m"), [(1, 1536), (4, 64), (8, 1536)])
def test_a_stage_of_one_chunk_has_as_many_slots_as_stages_from_it_on(p, m):
    assert [slots_of_chunks(order(rank, p, 1, m)) for rank in range(p)] == [{0: p - rank} for rank in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), NUMBERS)
def test_fewer_micro_batches_need_no_more_slots(p, v, m):
    """As long as they are not as few as the stages, in another order: those of a warm-up replay graphs of training."""
    for rank in range(p):
        of_training = slots_of_chunks(order(rank, p, v, m))
        few = slots_of_chunks(order(rank, p, v, min(m, 2 * p + (p == 1))))
        assert all(few[chunk] <= of_training[chunk] for chunk in range(v))


def test_layers_go_round_the_stages():
    assert layers_of(12, 1, 2, 3) == (range(2, 4), range(6, 8), range(10, 12))
    layers = [layer for stage in range(4) for chunk in layers_of(96, stage, 4, 6) for layer in chunk]
    assert sorted(layers) == list(range(96))


def test_layers_that_the_chunks_do_not_divide_are_an_error():
    with pytest.raises(ConfigError, match=r"10 layers are not divided by layout\.pp=2 times 3 chunks"):
        layers_of(10, 0, 2, 3)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((4, 2, 6), "layout.pp=4 does not divide the 6 micro-batches"),
        ((1, 2, 6), "layout.pp=1 with 2 chunks"),
        ((2, 0, 6), "chunks=0: use at least 1"),
        ((2, 1, 0), "micro-batches=0: use at least 1"),
    ],
)
def test_numbers_without_an_order_are_an_error(numbers, words):
    with pytest.raises(ConfigError, match=words):
        check_numbers(*numbers)
