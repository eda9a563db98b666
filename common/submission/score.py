"""Compute the score of a benchmark from its runs, or the reasons why there is no score.

A result has N runs. From a longer series, the rules choose N consecutive runs: the window whose olympic mean is the
median of all windows (:func:`common.mlperf.rcp.pick_window`). The score is the olympic mean of its times, multiplied
by the RCP normalisation factor (training rules, sections on results and on reference convergence points).

Instances that trained at the same time have another score in HPC rounds (:mod:`common.mlperf.throughput`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from common.errors import ConfigError
from common.mlperf.checker_process import one_checker_process
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rcp import Reference, Window, convergence_of, olympic_mean, pick_window, reference_at
from common.mlperf.refusals import Refusal
from common.mlperf.result_verdict import contradictions, judge_together, rcp_test
from common.mlperf.rules import Rules, rules_for
from common.mlperf.throughput import Throughput, instance_refusals, throughput_of
from common.mlperf.verdict import Verdict, candidate_rulesets, data_limit, judge, judge_log
from common.submission.registry_evidence import log_contradictions, verdict_contradiction
from common.submission.run_sets import PRUNED, RunSet
from common.submission.tree_agreement import copy_refusals


@dataclass(frozen=True)
class ScoredRun:
    """One run of a set.

    Attributes:
        number: number of the experiment or of the result file.
        log: the parsed log; None if it cannot be read.
        convergence: training progress at convergence, in ``Rules.unit``; None if the run did not converge.
    """

    number: int
    verdict: Verdict
    log: ParsedLog | None
    convergence: float | None

    @property
    def seed(self) -> object:
        """The first seed in the log; None if the log has no seed."""
        return self.log.seeds[0][2] if self.log is not None and self.log.seeds else None


@dataclass(frozen=True)
class ResultScore:
    """The score of a set of runs, with the values from which it was computed.

    Attributes:
        runs: all runs, in launch order.
        rules: rules of the benchmark; None if no ruleset accepts the benchmark of the logs.
        window: the consecutive runs that form the result; None if there are too few runs, and for instances.
        reference: RCP convergence at the batch size of the runs; None if no RCP exists for it.
        convergence: olympic mean convergence of the window; None without a window, or if too many runs failed.
        factor: RCP normalisation factor; None if the RCP test failed or did not run.
        obstacles: reasons why there is no score, each with its files; empty if there is one.
        notes: information that does not change the score.
        throughput: score of a throughput result; None for other results, and if anything prevents it.
    """

    run_set: RunSet
    runs: tuple[ScoredRun, ...]
    rules: Rules | None
    window: Window | None
    reference: Reference | None
    convergence: float | None
    factor: float | None
    obstacles: tuple[Refusal, ...]
    notes: tuple[str, ...]
    throughput: Throughput | None = None

    @property
    def chosen(self) -> tuple[ScoredRun, ...]:
        """The runs of the window, or the instances that count; empty if there is no window."""
        if self.instances:
            return _counting(self.run_set, self.runs)
        return () if self.window is None else self.runs[self.window.start : self.window.start + self.window.runs]

    @property
    def instances(self) -> bool:
        """Whether this is a throughput result: each run is an instance on a part of the system."""
        return _of_instances(self.rules, self.run_set)

    @property
    def olympic_minutes(self) -> float | None:
        """Olympic mean time of the window, in minutes; None without a window or if too many runs failed."""
        return self.window.score if self.window is not None and self.window.valid else None

    @property
    def minutes(self) -> float | None:
        """The normalised score, or the time to train all instances, in minutes; None if anything prevents one."""
        if self.throughput is not None:
            return self.throughput.minutes
        if self.obstacles or self.olympic_minutes is None or self.factor is None:
            return None
        return self.factor * self.olympic_minutes

    @property
    def other_data(self) -> bool:
        """Whether the log of any run states that it did not use the data set of the benchmark."""
        return any(run.log is not None and run.log.other_data for run in self.runs)

    @property
    def choice(self) -> str:
        """A phrase for reports: the runs that form the result, and why."""
        if self.instances:
            return f"{len(self.chosen)} of {len(self.runs)} instances, {len(self.run_set.pruned)} pruned"
        if self.window is None or self.rules is None:
            return "no runs are chosen"
        first, last = self.chosen[0].number, self.chosen[-1].number
        if len(self.runs) == self.window.runs:
            return f"all {len(self.runs)} runs, {first} to {last}"
        windows = len(self.runs) - self.window.runs + 1
        return (
            f"runs {first} to {last} of {len(self.runs)}: of the {windows} windows of {self.window.runs} consecutive "
            "runs it has the median olympic mean, failed runs counted as infinitely slow"
        )


def score(run_set: RunSet, ruleset: str | None = None) -> ResultScore:
    """Return the score of a set of runs under one ruleset.

    Args:
        ruleset: version; None for the version in ``runs.jsonl``. Without ``runs.jsonl``, the version that all logs
            share, or else the newest with the fewest refused logs.

    Raises:
        ConfigError: the ruleset is not known.
    """
    version = ruleset or run_set.ruleset
    with one_checker_process():
        return _score(run_set, version)


def _score(run_set: RunSet, version: str | None) -> ResultScore:
    verdicts = _judge_all(run_set, version)
    version = version or verdicts[0].ruleset if verdicts else version
    rules = _rules(verdicts, version)
    runs = tuple(_scored(number, verdict, rules) for number, verdict in zip(run_set.numbers, verdicts, strict=True))
    if not run_set.declared_together:
        reason = f"{run_set.name}: they were not launched as one series; name the logs of a result, in launch order"
        refusal = Refusal("not-consecutive", reason)
        return ResultScore(run_set, runs, rules, None, None, None, None, (refusal,), ())
    counting = _counting(run_set, runs) if _of_instances(rules, run_set) else runs
    obstacles = [*run_set.complaints, *_registry_obstacles(run_set, runs)]
    obstacles += _obstacles(run_set, runs, counting, rules)
    notes = [*run_set.notes]
    if version is not None and run_set.ruleset not in (None, version):
        notes.append(f"the runs were logged under ruleset {run_set.ruleset} and are judged by {version}")
    if _of_instances(rules, run_set):
        return _score_instances(run_set, runs, counting, rules, obstacles, notes)
    if rules is not None and len(runs) < rules.runs:
        text = f"{run_set.name}: a result of {rules.log_name} needs {rules.runs} runs, these are {len(runs)}"
        obstacles.append(Refusal("run-count", text))
    disorder = [*run_set.gaps, *_misordered(run_set.name, runs)]
    if run_set.series is not None or (rules is not None and len(runs) > rules.runs):
        obstacles += disorder
    else:  # published results are not in launch order, and the order matters only if runs are chosen from more
        notes += [each.sentence for each in disorder]
    if rules is None or len(runs) < rules.runs:
        return ResultScore(run_set, runs, rules, None, None, None, None, tuple(obstacles), tuple(notes))
    window = pick_window([run.verdict.minutes for run in runs], rules.runs, rules.dropped)
    chosen = runs[window.start : window.start + window.runs]
    factor = None
    if not obstacles:
        verdict = judge_together([run.verdict for run in chosen], rules.ruleset)
        obstacles += [refusal.about(f"{run_set.name}: ") for refusal in verdict.refusals]
        notes += verdict.notes
        factor = verdict.score / window.score if verdict.score is not None and window.score > 0 else None
    return ResultScore(
        run_set,
        runs,
        rules,
        window,
        _reference(chosen, rules),
        _mean_convergence(chosen, rules),
        factor,
        tuple(obstacles),
        tuple(dict.fromkeys(notes)),
    )


def _of_instances(rules: Rules | None, run_set: RunSet) -> TypeGuard[Rules]:
    """Return whether the runs of a set are the instances of a throughput result, which only HPC rounds have."""
    return rules is not None and rules.usage == "hpc" and run_set.instances


def _counting(run_set: RunSet, runs: tuple[ScoredRun, ...]) -> tuple[ScoredRun, ...]:
    """Return the instances that are not pruned."""
    return tuple(run for run in runs if run.verdict.paths[0] not in run_set.pruned)


def _score_instances(
    run_set: RunSet,
    runs: tuple[ScoredRun, ...],
    kept: tuple[ScoredRun, ...],
    rules: Rules,
    obstacles: list[Refusal],
    notes: list[str],
) -> ResultScore:
    """Return the score of the instances of a throughput result, of which ``kept`` count."""
    for gap in run_set.gaps:
        obstacles.append(Refusal("instance-missing", f"{gap.sentence}, and {PRUNED} does not have it"))
    if len(kept) < rules.runs:
        text = f"{run_set.name}: {len(kept)} instances of {rules.log_name} count, and a result needs {rules.runs}"
        obstacles.append(Refusal("instance-count", text))
    obstacles += instance_refusals([run.verdict for run in kept])
    logs = [run.log for run in kept if run.log is not None]
    throughput = None
    if not obstacles:
        _, found, notes_of_test = rcp_test(logs, rules)
        obstacles += [refusal.about(f"{run_set.name}: ") for refusal in found]
        notes += notes_of_test
    if not obstacles:
        pruned = [run.log for run in runs if run.log is not None and run.verdict.paths[0] in run_set.pruned]
        throughput = throughput_of(logs, pruned)
        notes.append(str(throughput))
    return ResultScore(
        run_set,
        runs,
        rules,
        None,
        _reference(kept, rules) if kept else None,
        _mean_convergence(kept, rules) if len(kept) >= rules.runs else None,
        None,
        tuple(obstacles),
        tuple(dict.fromkeys(notes)),
        throughput,
    )


def _judge_all(run_set: RunSet, version: str | None) -> list[Verdict]:
    """Return the verdicts of all logs under one ruleset; for None, the one that :func:`score` describes."""
    with ThreadPoolExecutor(max_workers=2) as pool:  # read one log while the checker process judges another

        def judge_under(ruleset: str | None, logs: Sequence[ParsedLog | None]) -> list[Verdict]:
            jobs = [
                pool.submit(copy_context().run, judge, path, ruleset, run_set.follow)
                if log is None
                else pool.submit(copy_context().run, judge_log, log, ruleset)
                for path, log in zip(run_set.logs, logs, strict=True)
            ]
            return [job.result() for job in jobs]

        try:
            if version is not None or not run_set.logs:
                return judge_under(version, [None] * len(run_set.logs))
            first = judge_under(None, [None] * len(run_set.logs))
            if len({verdict.ruleset for verdict in first}) == 1:
                return first
            logs = [verdict.log for verdict in first]
            candidates = candidate_rulesets([log for log in logs if log is not None])
            best, fewest = first, len(first) + 1
            for candidate in candidates:  # newest first
                verdicts = judge_under(candidate, logs)
                refused = sum(verdict.kind == "refused" for verdict in verdicts)
                if refused < fewest:
                    best, fewest = verdicts, refused
                if not refused:
                    break
            return best
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _rules(verdicts: list[Verdict], version: str | None) -> Rules | None:
    """Return the rules of the first benchmark in the logs that the ruleset accepts; None if there is none."""
    for verdict in verdicts:
        if verdict.benchmark is not None:
            try:
                return rules_for(str(verdict.benchmark), version)
            except ConfigError:
                continue
    return None


def _scored(number: int, verdict: Verdict, rules: Rules | None) -> ScoredRun:
    log = verdict.log
    convergence = convergence_of(log, rules) if log is not None and rules is not None and verdict.converged else None
    return ScoredRun(number, verdict, log, convergence)


def _obstacles(
    run_set: RunSet, runs: tuple[ScoredRun, ...], counting: tuple[ScoredRun, ...], rules: Rules | None
) -> list[Refusal]:
    """Return the faults of the runs that prevent a score, whichever runs are chosen.

    Args:
        counting: the runs without pruned instances.
    """
    name = run_set.name
    if not runs:
        return [Refusal("run-count", f"{name}: has no runs")]
    found = []
    for run in runs:
        path = run.verdict.paths[0]
        if run.verdict.kind == "refused" and not (run.verdict.cut_short and run_set.may_be_cut_short):
            own = _runs_in_one_log(run.log) or [refusal.without(str(path)) for refusal in run.verdict.refusals]
            found += [refusal.about(f"{path} is refused: ") for refusal in own]
        if run.log is not None and run.log.other_data:
            found.append(Refusal("data-synthetic", f"{path}: {data_limit(run.log)}"))
    logs = [run.log for run in runs if run.log is not None]
    found += copy_refusals(logs)
    if rules is not None:
        compared = [run.log for run in counting if run.log is not None]
        found += [refusal.about(f"{name}: ") for refusal in (contradictions(compared, rules) if compared else ())]
    return found


def _runs_in_one_log(log: ParsedLog | None) -> list[Refusal]:
    """Refuse a log that holds several runs. All its other faults follow from this one."""
    starts = {event.time_ms for event in log.all("run_start")} if log is not None else set()
    if len(starts) <= 1:
        return []
    return [Refusal("run-incomplete", f"run_start occurs {len(starts)} times: each run has its own log")]


def _registry_obstacles(run_set: RunSet, runs: tuple[ScoredRun, ...]) -> list[Refusal]:
    """Return contradictions between the logs of a series and its ``runs.jsonl``."""
    if run_set.series is None:
        return []
    found: list[str] = []
    experiments = {run.begin.experiment: run for run in run_set.series.experiments}
    for run in runs:
        if run.log is None:
            continue  # the verdict gives the reason
        experiment = experiments[run.number]
        found += log_contradictions(run_set.series, experiment, run.log)
        if run.verdict.ruleset == experiment.begin.ruleset:
            changed = verdict_contradiction(experiment, run.log, run.verdict.kind)
            found += [] if changed is None else [changed]
    return [Refusal("registry-contradiction", text) for text in found]


def _misordered(name: str, runs: tuple[ScoredRun, ...]) -> list[Refusal]:
    """Return a refusal for the first log that begins earlier than its predecessor; empty if all are in order."""
    begun = [(run.verdict.paths[0], run.log.events[0].time_ms) for run in runs if run.log is not None]
    for (before, earlier), (path, time_ms) in pairwise(begun):
        if time_ms < earlier:
            text = f"{name}: {path.name} began before {before.name}: the logs are not in launch order"
            return [Refusal("not-consecutive", text)]
    return []


def _reference(chosen: tuple[ScoredRun, ...], rules: Rules) -> Reference | None:
    batch = chosen[0].log.global_batch if chosen[0].log is not None else None
    whole = isinstance(batch, int | float) and not isinstance(batch, bool) and batch == batch // 1
    return reference_at(rules, int(batch)) if batch is not None and whole else None


def _mean_convergence(chosen: tuple[ScoredRun, ...], rules: Rules) -> float | None:
    counts = [math.inf if run.convergence is None else run.convergence for run in chosen]
    try:
        mean = olympic_mean(counts, rules.dropped)
    except OverflowError:  # only a refused log can state such a large number; no real run trains that long
        return None
    return mean if math.isfinite(mean) else None
