"""Checks of the clock of a run: one state machine over all lines of its log.

A run is initialized, started, trained in blocks or epochs, evaluated, and stopped. Published logs nest blocks, epochs
and evaluations in every way, evaluate during the training or after it, lack starts, and close their last intervals
after ``run_stop``. The checks accept all of these logs and fail for a log whose clock was set back. Labels of blocks
are used only if :func:`common.mlperf.progress.blocks_of` can interpret them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from common.mlperf.parsed_log import PROGRESS_KEYS, Event, ParsedLog, evaluation_of
from common.mlperf.progress import Blocks, LoggedBlock, block_pairs, blocks_of, checkpoint_scores, is_finite
from common.mlperf.rcp import convergence_of
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules

TOLERANCE_MS = 1000.0
"""Largest step back in time that is accepted, in ms: clocks are adjusted, and several ranks log events."""

OPEN_INIT_MINUTES, SLACK_MINUTES = 240.0, 1.0
"""Longest initialization in the open division, and longest time between ``init_stop`` and ``run_start``, in minutes."""

MOST_COMPLAINTS = 4
"""Largest number of refusals and of notes, because after one step of the clock all later lines are wrong."""

FIRST_MS, LAST_MS = 1_262_304_000_000, 4_102_444_800_000
"""Years 2010 and 2100 in ms since 1970. Values in s or us, and times relative to a start, are outside this range."""

PHASES = ("before init_start", "during initialization", "after init_stop", "during the run", "after run_stop")
_BEFORE, _INITIALIZING, _INITIALIZED, _RUNNING, _STOPPED = range(5)

SELF_PLAY = frozenset({"minigo"})
"""Benchmarks whose training, self-play and evaluation are separate processes with separate clocks."""


@dataclass
class _Clock:
    """State after a line.

    Attributes:
        phase: index in :data:`PHASES`.
        begun: phase to the event that began it.
        latest: latest training event or start of an evaluation, by time.
        starts, stops: events of blocks, or of epochs in a log without blocks, in file order.
        submitted: progress to the ``eval_start`` of its evaluation.
        scores: number of evaluations so far.
        passed: first evaluation that reached the target.
        staging: start of the copy of data to faster storage, until its stop.
        blocks: blocks of the log; None if their labels cannot be interpreted.
    """

    log: ParsedLog
    rules: Rules
    phase: int = _BEFORE
    begun: dict[int, Event] = field(default_factory=dict)
    latest: Event | None = None
    starts: list[Event] = field(default_factory=list)
    stops: list[Event] = field(default_factory=list)
    submitted: dict[object, Event] = field(default_factory=dict)
    scores: int = 0
    passed: Event | None = None
    staging: Event | None = None
    blocks: Blocks | None = None
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def training(self) -> str:
        """The kind of intervals into which the log divides its training: ``block`` or ``epoch``."""
        return "block" if self.log.all("block_stop") else "epoch"

    def refuse(self, reason: str, event: Event, sentence: str) -> None:
        """Refuse the log because of ``event``.

        Args:
            sentence: what is wrong, as a continuation of the event's key.
        """
        self.refusals.append(Refusal(reason, f"line {event.line}: {event.key} {sentence}"))

    def refuse_earlier(self, event: Event, before: Event, why: str = "", reason: str = "clock-backwards") -> bool:
        """Refuse ``event`` if it is earlier than ``before``; return whether it is.

        Args:
            why: text to append to the sentence.
        """
        if not _earlier(event, before):
            return False
        text = f"is {_seconds(before, event)} earlier than {before.key} in line {before.line}{why}"
        self.refuse(reason, event, text)
        return True


def _earlier(event: Event, other: Event) -> bool:
    return event.time_ms < other.time_ms - TOLERANCE_MS


def _seconds(late: Event, early: Event) -> str:
    return f"{(late.time_ms - early.time_ms) / 1000:.1f} s"


def check_clock(log: ParsedLog, rules: Rules) -> tuple[list[Refusal], list[str]]:
    """Return refusals and notes on the clock of a run; each names its line."""
    if rules.scored_in_any_order:
        log = replace(log, events=tuple(_without_blocks_of_evaluations(log)))
    steps = {key: step for key, step in _STEPS.items() if not _has_own_clock(key, rules)}
    wrong = [event for event in log.events if event.key in steps and not _is_time(event)]
    if wrong:
        event = wrong[0]
        text = (
            f"line {event.line}: time_ms of {event.key} is {event.time_ms:.17g}, no milliseconds since 1970; are they "
            "seconds or microseconds, or does the clock begin at the start of the run?"
        )
        return [Refusal("time-no-milliseconds", text)], []
    clock = _Clock(log, rules, blocks=blocks_of(log, rules))
    for event in log.events:
        if event.key in steps:
            steps[event.key](clock, event)
    _end(clock)
    found = list(dict.fromkeys(clock.refusals))
    if len(found) > MOST_COMPLAINTS:
        more = found[MOST_COMPLAINTS].about(f"{len(found) - MOST_COMPLAINTS} more lines, the first of them: ")
        found = [*found[:MOST_COMPLAINTS], more]
    return found, clock.notes[:MOST_COMPLAINTS]


def _has_own_clock(key: str, rules: Rules) -> bool:
    if rules.benchmark in SELF_PLAY:
        return not key.startswith(("init_", "run_"))
    return rules.scored_offline and key.startswith("eval_")


def _without_blocks_of_evaluations(log: ParsedLog) -> Iterator[Event]:
    """Yield the events without blocks and epochs that are within an evaluation and have the time of its start.

    Some logs divide an evaluation into blocks, which have the time of the checkpoint like the other lines of it.
    """
    started: Event | None = None
    for event in log.events:
        if event.key in ("eval_start", "eval_stop"):
            started = event if event.key == "eval_start" else None
        within = started is not None and abs(event.time_ms - started.time_ms) <= TOLERANCE_MS
        if not within or not event.key.startswith(("block_", "epoch_")):
            yield event


def _is_time(event: Event) -> bool:
    return FIRST_MS <= event.time_ms < LAST_MS


def _init_start(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_BEFORE, _INITIALIZING), _INITIALIZING)


def _init_stop(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_INITIALIZING,), _INITIALIZED)


def _run_start(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_INITIALIZED,), _RUNNING)
    clock.latest = event
    first, rules = clock.begun.get(_INITIALIZING), clock.rules
    limit = OPEN_INIT_MINUTES if clock.log.division == "open" else rules.init_minutes
    if first is not None and event.time_ms - first.time_ms > 60_000 * (limit + SLACK_MINUTES):
        minutes = (event.time_ms - first.time_ms) / 60_000
        text = f"comes {minutes:.1f} minutes after init_start in line {first.line}: the rules allow {limit:g}"
        clock.refuse("initialization-too-long", event, text)


def _run_stop(clock: _Clock, event: Event) -> None:
    _enter(clock, event, (_RUNNING,), _STOPPED)


def _enter(clock: _Clock, event: Event, allowed: tuple[int, ...], phase: int) -> None:
    before = clock.begun.get(clock.phase)
    if clock.phase not in allowed:
        clock.refuse("phase-order", event, f"comes {PHASES[clock.phase]}")
    elif clock.phase == phase or before is None or not clock.refuse_earlier(event, before):
        clock.phase = phase
        clock.begun.setdefault(phase, event)


def _staging_start(clock: _Clock, event: Event) -> None:
    before = clock.begun.get(clock.phase)
    if before is None or not clock.refuse_earlier(event, before):
        clock.staging = event


def _staging_stop(clock: _Clock, event: Event) -> None:
    if clock.staging is None:
        clock.refuse("staging-not-started", event, "comes without a staging_start before it")
    else:
        clock.refuse_earlier(event, clock.staging)
    clock.staging = None


def _training(clock: _Clock, event: Event) -> None:
    """Handle the start or end of a block or epoch."""
    if _outside(clock, event):
        return
    kind, _, end = event.key.partition("_")
    if clock.latest is not None and clock.refuse_earlier(event, clock.latest, ": the clock goes back"):
        return
    clock.latest = event if clock.latest is None else max(clock.latest, event, key=lambda each: each.time_ms)
    if kind == clock.training:
        (clock.starts if end == "start" else clock.stops).append(event)
    stop = _first(clock.log, "run_stop")
    if clock.passed is not None and end == "start" and stop is not None and _earlier(event, stop):
        clock.notes.append(
            f"line {event.line}: training goes on after the evaluation that reached the target in line "
            f"{clock.passed.line}, and run_stop comes {_seconds(stop, event)} later than needed"
        )


def _evaluation_start(clock: _Clock, event: Event) -> None:
    """Check that an evaluation does not start before the training that it evaluates."""
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
    """Check that a score is not earlier than its evaluation's start or training, and follows no passing score."""
    if event.key != clock.rules.quality_key or _outside(clock, event):
        return
    clock.scores += 1
    progress = _progress(event, clock.rules)
    begun = clock.submitted.get(progress) or _trained_before(clock, clock.scores)
    needed = [each for block in _needed(clock, progress) for each in (block.start, block.stop) if each is not None]
    before = [*([begun] if begun is not None else []), *(e for e in needed if e.line < event.line)]
    if any(clock.refuse_earlier(event, each) for each in (*before, clock.begun[_RUNNING])):
        return
    if clock.log.division != "closed" or clock.log.status != "success" or clock.log.other_data:
        return  # other data have another target, and may reach the rules' target long before
    if clock.passed is not None:
        own = clock.submitted.get(progress)
        if own is None or own.line > clock.passed.line:  # otherwise it had already started
            text = f"follows the evaluation that reached the target in line {clock.passed.line}"
            clock.refuse("evaluation-after-target", event, text)
    elif (evaluation := evaluation_of(event)) is not None:
        batch = clock.log.global_batch if isinstance(clock.log.global_batch, int) else 0
        clock.passed = event if clock.rules.meets_target(evaluation.values, batch) else None


def _trained_before(clock: _Clock, number: int) -> Event | None:
    """Return the latest training before evaluation ``number``, which follows at least that many blocks or epochs."""
    if len(clock.stops) >= number:
        return clock.stops[number - 1]
    return clock.starts[number - 1] if len(clock.starts) >= number else None


_STEPS: dict[str, Callable[[_Clock, Event], None]] = {
    "init_start": _init_start,
    "init_stop": _init_stop,
    "staging_start": _staging_start,
    "staging_stop": _staging_stop,
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
"""Key -> function that handles it. The times of other keys are not checked."""


def _outside(clock: _Clock, event: Event) -> bool:
    """Return whether an event is outside the run. Refuse it if it would change the time of the run."""
    stop = clock.begun.get(_STOPPED)
    if clock.phase < _RUNNING:
        clock.refuse("outside-run", event, f"comes {PHASES[clock.phase]}: the run begins with run_start")
    elif stop is not None and clock.log.status == "success":
        clock.refuse_earlier(event, stop, ", which it follows: was run_stop moved?", "outside-run")
    return clock.phase != _RUNNING


def _first(log: ParsedLog, key: str) -> Event | None:
    return next(iter(log.all(key)), None)


def _progress(event: Event, rules: Rules) -> float | None:
    """Return the training progress at an evaluation, under the key of the rules or else the first key present."""
    for key in (rules.progress_key, *PROGRESS_KEYS):
        if is_finite(value := event.metadata.get(key)):
            return float(value)
    return None


def _needed(clock: _Clock, progress: float | None) -> tuple[LoggedBlock, ...]:
    """Return the blocks whose training an evaluation evaluates; empty if labels cannot be interpreted."""
    return () if clock.blocks is None or progress is None else clock.blocks.needed(progress)


def _end(clock: _Clock) -> None:
    """Check that ``run_stop`` comes after the training and evaluation that it ends, and that the run takes time."""
    start, stop = clock.begun.get(_RUNNING), clock.begun.get(_STOPPED)
    if start is None or stop is None:
        return
    if stop.time_ms <= start.time_ms:
        text = f"has the time of run_start in line {start.line}: a run of no length"
        clock.refuse("run-without-length", stop, text)
    elif clock.log.status == "success":
        if clock.rules.benchmark in SELF_PLAY:
            _end_of_generation(clock, stop)
        else:
            (_end_of_checkpoint if clock.rules.scored_offline else _end_of_training)(clock, stop)


def _end_of_generation(clock: _Clock, stop: Event) -> None:
    """Check that ``run_stop`` has the time at which the first passing generation was saved.

    A generation is saved just before or after its ``epoch_stop``. A log may number its evaluations as its generations,
    or count them from 0 or 1. In published logs generations count from 18, and evaluations from 18,
    from 1 or, as the reference does by default, from 0.
    """
    passed, key = convergence_of(clock.log, clock.rules), clock.rules.progress_key
    ends: dict[float, Event] = {}  # some programs repeat lines
    for event in clock.log.all("epoch_stop"):
        if is_finite(label := event.metadata.get(key)):
            ends.setdefault(float(label), event)
    if passed is None or not ends:
        return
    generations, first = list(ends), min(checkpoint_scores(clock.log, clock.rules))
    if first >= generations[0]:
        index = generations.index(passed) if passed in ends else len(generations)
    else:
        index = int(passed - min(first, 1))  # counted from 0 or 1; early evaluations may be skipped
    if index >= len(generations):
        text = f"follows an evaluation at {key} {passed:g}, and the log has no epoch_stop of that generation"
        clock.refuse("evaluation-untrained", stop, text)
        return
    why = f", after which the generation evaluated at {key} {passed:g} was saved"
    clock.refuse_earlier(stop, ends[generations[index]], why, "run-stop-early")
    following = ends[generations[index + 1]] if index + 1 < len(generations) else None
    if following is not None and _earlier(following, stop):
        clock.notes.append(
            f"line {stop.line}: run_stop comes {_seconds(stop, following)} after epoch_stop in line {following.line}, "
            f"but the generation evaluated at {key} {passed:g} was saved before: the run is longer than needed"
        )


def _end_of_checkpoint(clock: _Clock, stop: Event) -> None:
    """Check that ``run_stop`` is not before the end of the training of the first passing checkpoint."""
    passed, key = convergence_of(clock.log, clock.rules), clock.rules.progress_key
    if passed is None:
        return
    end = _training_of_checkpoint(clock.log, key, passed)
    why = f", which ended the training of the checkpoint at {key} {passed:g}"
    if end is not None and clock.refuse_earlier(stop, end, why, "run-stop-early"):
        return
    # With any labels: a block that starts with less progress is trained before the checkpoint is complete.
    starts = [event for event in clock.log.all("block_start") if is_finite(event.metadata.get(key))]
    earlier = [event for event in starts if event.metadata[key] < passed]
    if earlier:
        why = f", which began training that the checkpoint at {key} {passed:g} includes"
        clock.refuse_earlier(stop, max(earlier, key=lambda event: event.time_ms), why, "run-stop-early")


def _training_of_checkpoint(log: ParsedLog, key: str, checkpoint: float) -> Event | None:
    """Return the end of the block after which a checkpoint was written; None if the labels do not show it.

    Some logs label ``block_stop`` with the progress at the end of the block. Others repeat the label of
    ``block_start``; then the block ends where the next one starts.
    """
    pairs = [(start, stop) for start, stop in block_pairs(log) if start is not None and stop is not None]
    labels = [(start.metadata.get(key), stop.metadata.get(key), stop) for start, stop in pairs]
    at_end = (stop for begin, end, stop in labels if end == checkpoint and begin != end)
    repeated = (stop for (begin, end, stop), (after, _, _) in pairwise(labels) if begin == end and after == checkpoint)
    return next(at_end, next(repeated, None))


def _end_of_training(clock: _Clock, stop: Event) -> None:
    """Check that ``run_stop`` is not before the last evaluation, nor before the training that this evaluates."""
    scores = [event for event in clock.log.all(clock.rules.quality_key) if event.line < stop.line]
    if not scores:
        return
    last = scores[-1]
    if clock.refuse_earlier(stop, last, ", which it ends", "run-stop-early"):
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
        if end.line < stop.line and clock.refuse_earlier(stop, end, ", which it ends", "run-stop-early"):
            return


def _spans(clock: _Clock) -> Iterator[tuple[Event, Event]]:
    """Yield start and end of each block, or of each epoch in a log without blocks."""
    begun = clock.begun[_RUNNING]
    for event in sorted([*clock.starts, *clock.stops], key=lambda each: each.line):
        if event.key.endswith("_start"):
            begun = event
        else:
            yield begun, event
