"""The clock of a run, as one state machine over all lines of its log.

A run is initialised, started, trained in blocks or epochs, evaluated, and stopped. Published logs nest blocks, epochs
and evaluations in every way, evaluate beside the training or after it, leave out starts, and close their last spans
behind ``run_stop``; what holds for all of them, and for no log whose clock was turned back, is stated here. Times are
compared to a second (:data:`TOLERANCE_MS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.mlperf.parsed_log import PROGRESS_KEYS, Event, ParsedLog, evaluation_of
from common.mlperf.progress import Block, Blocks, blocks_of, is_number
from common.mlperf.rcp import convergence_of
from common.mlperf.rules import Rules

TOLERANCE_MS = 1000.0
"""By how much a time may lie before that of an earlier line: clocks are stepped, and events come from several ranks."""

OPEN_INIT_MINUTES, SLACK_MINUTES = 240.0, 1.0
"""The longest initialisation in the open division; and what may lie between ``init_stop`` and ``run_start``."""

MOST_COMPLAINTS = 4
"""How many lines are named: a step of the clock puts all that follow it in the wrong."""

FIRST_MS, LAST_MS = 1_262_304_000_000, 4_102_444_800_000
"""2010 and 2100 in milliseconds since the epoch: seconds, microseconds and times since a start lie outside."""

PHASES = ("before init_start", "in initialisation", "after init_stop", "in the run", "after run_stop")
_BEFORE, _INITIALISING, _INITIALISED, _RUNNING, _STOPPED = range(5)

SELF_PLAY = frozenset({"minigo"})
"""Benchmarks whose training, self-play and evaluation are processes of their own, each with a clock and spans."""


@dataclass
class _Clock:
    """What is known after a line.

    Attributes:
        log, rules: what is read, and by which rules.
        phase: index in :data:`PHASES`.
        begun: phase to the event that began it.
        latest: of training and the beginnings of evaluations, the last in time.
        open: kind of span to the event that began the one which is open.
        starts, stops: of blocks, or of epochs in a log without blocks, in file order.
        submitted: progress to the ``eval_start`` of its evaluation.
        scores: number of evaluations so far.
        passed: the first evaluation that reached the target.
        blocks: where the log's blocks end, if its numbers are understood.
        complaints: sentences, each with the line.
    """

    log: ParsedLog
    rules: Rules
    phase: int = _BEFORE
    begun: dict[int, Event] = field(default_factory=dict)
    latest: Event | None = None
    open: dict[str, Event] = field(default_factory=dict)
    starts: list[Event] = field(default_factory=list)
    stops: list[Event] = field(default_factory=list)
    submitted: dict[object, Event] = field(default_factory=dict)
    scores: int = 0
    passed: Event | None = None
    blocks: Blocks | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def training(self) -> str:
        """The kind of spans that the log divides its training into."""
        return "block" if self.log.all("block_stop") else "epoch"

    def refuse(self, event: Event, sentence: str) -> None:
        self.complaints.append(f"line {event.line}: {event.key} {sentence}")

    def refuse_earlier(self, event: Event, before: Event, why: str = "") -> bool:
        """Whether ``event`` is earlier than ``before``, which it must not be."""
        if not _earlier(event, before):
            return False
        self.refuse(event, f"is {_seconds(before, event)} earlier than {before.key} in line {before.line}{why}")
        return True


def _earlier(event: Event, other: Event) -> bool:
    return event.time_ms < other.time_ms - TOLERANCE_MS


def _seconds(late: Event, early: Event) -> str:
    return f"{(late.time_ms - early.time_ms) / 1000:.1f} s"


def clock_complaints(log: ParsedLog, rules: Rules) -> list[str]:
    """What is wrong with the clock of a run, in sentences that name the line; empty if nothing is."""
    steps = {key: step for key, step in _STEPS.items() if not _has_own_clock(key, rules)}
    wrong = [event for event in log.events if event.key in steps and not _is_time(event)]
    if wrong:
        return [
            f"line {event.line}: time_ms of {event.key} is {event.time_ms:.17g}, no whole milliseconds since 1970"
            for event in wrong[:1]
        ]
    clock = _Clock(log, rules, blocks=blocks_of(log, rules))
    for event in log.events:
        if event.key in steps:
            steps[event.key](clock, event)
    _end(clock)
    found = list(dict.fromkeys(clock.complaints))
    more = [f"and {len(found) - MOST_COMPLAINTS} more lines of this kind"] if len(found) > MOST_COMPLAINTS else []
    return [*found[:MOST_COMPLAINTS], *more]


def _has_own_clock(key: str, rules: Rules) -> bool:
    if rules.benchmark in SELF_PLAY:
        return not key.startswith(("init_", "run_"))
    return rules.scored_offline and key.startswith("eval_")


def _is_time(event: Event) -> bool:
    return FIRST_MS <= event.time_ms < LAST_MS and event.time_ms.is_integer()


def _init_start(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_BEFORE, _INITIALISING), _INITIALISING)


def _init_stop(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_INITIALISING,), _INITIALISED)


def _run_start(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_INITIALISED,), _RUNNING)
    clock.latest = event
    first, rules = clock.begun.get(_INITIALISING), clock.rules
    limit = OPEN_INIT_MINUTES if clock.log.division == "open" else rules.init_minutes
    if first is not None and event.time_ms - first.time_ms > 60_000 * (limit + SLACK_MINUTES):
        minutes = (event.time_ms - first.time_ms) / 60_000
        clock.refuse(
            event, f"comes {minutes:.1f} minutes after init_start in line {first.line}: the rules allow {limit:g}"
        )


def _run_stop(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_RUNNING,), _STOPPED)


def _enter(clock: _Clock, event: Event, allowed: tuple[int, ...], phase: int) -> None:
    before = clock.begun.get(clock.phase)
    if clock.phase not in allowed:
        clock.refuse(event, f"comes {PHASES[clock.phase]}")
    elif clock.phase == phase or before is None or not clock.refuse_earlier(event, before):
        clock.phase = phase
        clock.begun.setdefault(phase, event)


def _training(clock: _Clock, event: Event) -> None:
    """A block or epoch begins or ends."""
    if _outside(clock, event):
        return
    kind, _, end = event.key.partition("_")
    if clock.latest is not None and clock.refuse_earlier(event, clock.latest, ": the clock goes back"):
        return
    clock.latest = event if clock.latest is None else max(clock.latest, event, key=lambda each: each.time_ms)
    _nest(clock, event, kind, end)
    if kind == clock.training:
        (clock.starts if end == "start" else clock.stops).append(event)
    stop = _first(clock.log, "run_stop")
    if clock.passed is not None and end == "start" and stop is not None and _earlier(event, stop):
        clock.refuse(
            event,
            f"begins training after the evaluation that reached the target in line {clock.passed.line}, "
            f"{_seconds(stop, event)} before run_stop: the run is over when the target is reached",
        )


def _nest(clock: _Clock, event: Event, kind: str, end: str) -> None:
    """Blocks come one after the other, and each ends where it began."""
    begun = clock.open.get(kind)
    if kind != "block":
        return
    if end == "start":
        if begun is not None:
            clock.refuse(event, f"comes within the block that began in line {begun.line}")
        clock.open[kind] = event
        return
    clock.open.pop(kind, None)
    number = "first_epoch_num"
    if begun is None and clock.stops:
        clock.refuse(event, "ends a block that has not begun")
    elif begun is not None and number in event.metadata and begun.metadata.get(number) != event.metadata[number]:
        clock.refuse(
            event,
            f"ends the block of {number} {event.metadata[number]}, but line {begun.line} began that of "
            f"{begun.metadata.get(number)}",
        )


def _evaluation_start(clock: _Clock, event: Event) -> None:
    """The weights of an evaluation are fixed: it does not begin before the training that it evaluates."""
    if _outside(clock, event):
        return
    if clock.latest is not None and clock.refuse_earlier(event, clock.latest, ": the clock goes back"):
        return
    clock.latest = event if clock.latest is None else max(clock.latest, event, key=lambda each: each.time_ms)
    clock.submitted[_progress(event, clock.rules)] = event


def _evaluation_stop(clock: _Clock, event: Event) -> None:
    begun = clock.submitted.get(_progress(event, clock.rules), clock.begun.get(_RUNNING))
    if not _outside(clock, event) and begun is not None:
        clock.refuse_earlier(event, begun)


def _score(clock: _Clock, event: Event) -> None:
    """An evaluation's value: not before its beginning, or, without one, before the training that it evaluates."""
    if event.key != clock.rules.quality_key or _outside(clock, event):
        return
    clock.scores += 1
    progress = _progress(event, clock.rules)
    begun = clock.submitted.get(progress) or _trained_before(clock, clock.scores)
    needed = [each for block in _needed(clock, progress) for each in (block.start, block.stop) if each is not None]
    before = [*([begun] if begun is not None else []), *(e for e in needed if e.line < event.line)]
    if any(clock.refuse_earlier(event, each) for each in (*before, clock.begun[_RUNNING])):
        return
    if clock.log.division != "closed" or clock.log.status != "success" or clock.log.stand_in:
        return  # stand-in data have a target that no log names: a demo may pass the rules' one long before
    if clock.passed is not None:
        own = clock.submitted.get(progress)
        if own is None or own.line > clock.passed.line:  # else it was under way already
            clock.refuse(event, f"follows the evaluation that reached the target in line {clock.passed.line}")
    elif (evaluation := evaluation_of(event)) is not None:
        batch = clock.log.global_batch if isinstance(clock.log.global_batch, int) else 0
        clock.passed = event if clock.rules.meets_target(evaluation.values, batch) else None


def _trained_before(clock: _Clock, number: int) -> Event | None:
    """The latest training that is sure to precede the evaluation of a number: a block, or an epoch, for each before."""
    if len(clock.stops) >= number:
        return clock.stops[number - 1]
    return clock.starts[number - 1] if len(clock.starts) >= number else None


_STEPS: dict[str, Callable[[_Clock, Event], None]] = {
    "init_start": _init_start,
    "init_stop": _init_stop,
    "run_start": _run_start,
    "run_stop": _run_stop,
    "block_start": _training,
    "block_stop": _training,
    "epoch_start": _training,
    "epoch_stop": _training,
    "eval_start": _evaluation_start,
    "eval_stop": _evaluation_stop,
    "eval_accuracy": _score,
    "eval_error": _score,
}
"""Key to what it does with the clock; other keys don't matter to it, and their times are not judged."""


def _outside(clock: _Clock, event: Event) -> bool:
    """Whether an event of the run stands outside of it; it is refused where that would change the run's time."""
    stop = clock.begun.get(_STOPPED)
    if clock.phase < _RUNNING:
        clock.refuse(event, f"comes {PHASES[clock.phase]}: the run begins with run_start")
    elif stop is not None and clock.log.status == "success":
        clock.refuse_earlier(event, stop, ", which it follows: was run_stop moved?")
    return clock.phase != _RUNNING


def _first(log: ParsedLog, key: str) -> Event | None:
    return next(iter(log.all(key)), None)


def _progress(event: Event, rules: Rules) -> float | None:
    """How far training was at an evaluation: where the rules have it, or else where this line does."""
    for key in (rules.progress_key, *PROGRESS_KEYS):
        if is_number(value := event.metadata.get(key)):
            return float(value)
    return None


def _needed(clock: _Clock, progress: float | None) -> tuple[Block, ...]:
    """The blocks whose training an evaluation evaluates; none where the log's numbers are not understood."""
    return () if clock.blocks is None or progress is None else clock.blocks.needed(progress)


def _end(clock: _Clock) -> None:
    """Whether ``run_stop`` comes after what it ends, and the run has a length."""
    start, stop = clock.begun.get(_RUNNING), clock.begun.get(_STOPPED)
    if start is None or stop is None:
        return
    if stop.time_ms <= start.time_ms:
        clock.refuse(stop, f"has the time of run_start in line {start.line}: a run of no length")
    elif clock.log.status == "success" and clock.rules.scored_offline:
        _end_of_checkpoint(clock, stop)
    elif clock.log.status == "success" and clock.rules.benchmark not in SELF_PLAY:
        _end_of_training(clock, stop)


def _end_of_checkpoint(clock: _Clock, stop: Event) -> None:
    """``run_stop`` has the time at which the training of the first passing checkpoint ended."""
    passed = convergence_of(clock.log, clock.rules)
    key = clock.rules.progress_key
    ends = (event for event in clock.log.all("block_stop") if passed is not None and event.metadata.get(key) == passed)
    for end in ends:
        clock.refuse_earlier(stop, end, f", which ended the training of the checkpoint at {key} {passed:g}")
        return


def _end_of_training(clock: _Clock, stop: Event) -> None:
    """``run_stop`` is not before the evaluation that ends the run, nor before the end of the training evaluated."""
    scores = [event for event in clock.log.all(clock.rules.quality_key) if event.line < stop.line]
    if not scores:
        return
    last = scores[-1]
    if clock.refuse_earlier(stop, last, ", which it ends"):
        return
    progress = _progress(last, clock.rules)
    submitted = clock.submitted.get(progress)
    if clock.blocks is not None and progress is not None:
        ends = [block.stop for block in clock.blocks.needed(progress) if block.stop is not None]
    else:
        ends = [
            end
            for number, (begun, end) in enumerate(_spans(clock), start=1)
            if not (begun.line > submitted.line if submitted is not None else number > len(scores))
        ]
    for end in ends:
        if end.line < stop.line and clock.refuse_earlier(stop, end, ", which it ends"):
            return


def _spans(clock: _Clock) -> Iterator[tuple[Event, Event]]:
    """Beginning and end of each block, or epoch in a log without blocks."""
    begun = clock.begun[_RUNNING]
    for event in sorted([*clock.starts, *clock.stops], key=lambda each: each.line):
        if event.key.endswith("_start"):
            begun = event
        else:
            yield begun, event
