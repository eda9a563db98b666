"""The benchmark results of a submission, each with its runs, system and code, and the reasons not to package them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import ConfigError
from common.launch.series import Begin
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules
from common.submission.run_sets import PRUNED, RunSet, find_run_sets, of_logs
from common.submission.score import ResultScore, ScoredRun, score
from common.submission.settings import ResultSettings, SubmissionSettings
from common.submission.source_code import LARGEST_FILE
from common.submission.system_description import Description
from common.submission.tree_agreement import count_of, log_disagreements, size_refusals


@dataclass(frozen=True)
class SubmissionEntry:
    """The runs of one benchmark on one system."""

    settings: ResultSettings
    score: ResultScore

    @property
    def system(self) -> str:
        """Name of the system."""
        return self.settings.system

    @property
    def implementation(self) -> str:
        """Name of the folder that holds the code."""
        return self.settings.implementation

    @property
    def rules(self) -> Rules:
        """The rules by which the score was computed. Use this only for entries without refusals."""
        assert self.score.rules is not None
        return self.score.rules

    @property
    def benchmark(self) -> str:
        """Benchmark name in the logs, which is also the name of the result folder."""
        return self.rules.log_name

    @property
    def begin(self) -> Begin | None:
        """Launch record of the first experiment; None if the runs are not a series."""
        series = self.score.run_set.series
        return None if series is None else series.experiments[0].begin

    @property
    def never_started(self) -> tuple[int, ...]:
        """Numbers of the last launched instances that ended before ``run_start``; empty without a series."""
        series = self.score.run_set.series
        last = () if series is None else series.experiments[-series.instances :]
        return tuple(run.begin.experiment for run in last if run.end is not None and run.end.status == "not started")

    @property
    def files(self) -> tuple[tuple[str, ScoredRun], ...]:
        """Path in the result folder of each log that is submitted, and its run."""
        if not self.score.instances:
            return tuple((f"result_{index}.txt", run) for index, run in enumerate(self.score.chosen))
        run_set = self.score.run_set
        numbers = run_set.numbers if run_set.series is None else range(len(run_set.numbers))
        found = []
        for number, run in zip(numbers, self.score.runs, strict=True):
            folder = f"{PRUNED}/" if run.verdict.paths[0] in run_set.pruned else ""
            found.append((f"{folder}result_{number}.txt", run))
        return tuple(found)

    @property
    def doctors(self) -> tuple[Path, ...]:
        """Files in which `doctor` described the nodes; empty if there are none."""
        series = self.score.run_set.series
        if self.settings.doctor is not None:
            return (self.settings.doctor,)
        return series.doctors if series is not None else ()


def gather(settings: SubmissionSettings, ruleset: str) -> list[SubmissionEntry]:
    """Return the results of a submission, scored under one ruleset.

    Raises:
        ConfigError: a requested series does not exist, or the ruleset is not known.
        DataError: a folder has no results, or a ``runs.jsonl`` is damaged.
    """
    return [SubmissionEntry(each, score(run_set, ruleset)) for each in settings.results for run_set in _run_sets(each)]


def _run_sets(settings: ResultSettings) -> list[RunSet]:
    if settings.results is None:
        return [of_logs(settings.logs)]
    found = find_run_sets([settings.results])
    if settings.series is None:
        return [_pruned(run_set, settings) for run_set in found]
    named = [each for each in found if each.series is not None and each.series.name == settings.series]
    if not named:
        known = ", ".join(each.series.name for each in found if each.series is not None) or "none"
        raise ConfigError(f"{settings.results} has no series {settings.series}; it has {known}")
    return [_pruned(run_set, settings) for run_set in named]


def _pruned(run_set: RunSet, settings: ResultSettings) -> RunSet:
    """Return the set without the instances that shall not count."""
    if not settings.pruned:
        return run_set
    logs = dict(zip(run_set.numbers, run_set.logs, strict=True))
    unknown = [number for number in settings.pruned if number not in logs]
    if run_set.series is None or not run_set.instances or unknown:
        what = f"has no run {unknown[0]}" if unknown else "is no series of instances (launch.instances)"
        raise ConfigError(f"{run_set.name}: {what}, of which pruned={list(settings.pruned)} could leave one out")
    return replace(run_set, pruned=run_set.pruned | {logs[number] for number in settings.pruned})


def refusals(entries: Sequence[SubmissionEntry], settings: SubmissionSettings) -> list[Refusal]:
    """Return all reasons, each with its file, that forbid packaging the entries."""
    found = [text for entry in entries for text in _of_entry(entry, settings)]
    scored = [entry for entry in entries if entry.score.rules is not None]
    return list(dict.fromkeys([*found, *_conflicts(scored)]))


def _of_entry(entry: SubmissionEntry, settings: SubmissionSettings) -> list[Refusal]:
    found = [*entry.score.obstacles, *_code_refusals(entry)]
    division = settings.systems[entry.system].division
    for run in entry.score.runs:
        path = run.verdict.paths[0]
        if run.log is None:
            continue
        if run.log.division != division:
            text = f"{path}: is of the {run.log.division} division, systems.{entry.system}.division is {division}"
            found.append(Refusal("division-differs", text))
        org = run.log.value("submission_org")
        if org is not None and not settings.is_org(str(org)):
            expected = settings.submission_org or settings.submitter
            text = (
                f"{path}: was submitted by {org!r} (submission_org), the submission is {expected!r}'s; if they are the "
                "same, give submission_org in the submission's file"
            )
            found.append(Refusal("submitter-differs", text))
        if (size := path.stat().st_size) > LARGEST_FILE:
            text = f"{path}: has {size / 2**20:.1f} MiB; the repository checker rejects files above 50"
            found.append(Refusal("file-unfit", text))
    return found


def contradicted_descriptions(
    entries: Sequence[SubmissionEntry], descriptions: Mapping[str, Description]
) -> list[Refusal]:
    """Return contradictions of the logs and launch scales with the system descriptions."""
    found: list[Refusal] = []
    for entry in entries:
        fields, where = descriptions[entry.system].fields, f"the description of {entry.system}"
        logs = [run.log for run in entry.score.runs if run.log is not None]
        if entry.score.instances:
            refusals = size_refusals(logs, fields, where, entry.never_started)
            found += [refusal.about(f"{entry.score.run_set.name}: ") for refusal in refusals]
        else:
            found += [refusal for log in logs for refusal in log_disagreements(log, fields, where)]
        if entry.begin is not None:
            nodes, _, ranks = entry.begin.scale.partition("x")
            counts = {"number_of_nodes": nodes, "accelerators_per_node": ranks}
            if entry.score.instances:  # the nodes of one: `size_refusals` compares those of all
                del counts["number_of_nodes"]
            for name, launched in counts.items():
                stated_count = count_of(fields[name])
                if stated_count is not None and stated_count != int(launched):
                    text = (
                        f"{entry.score.run_set.name}: was launched with the scale {entry.begin.scale}, but {name} in "
                        f"{where} is {fields[name]}: say in the submission's fields which is right"
                    )
                    found.append(Refusal("counts-differ", text))
    return list(dict.fromkeys(found))


def _code_refusals(entry: SubmissionEntry) -> list[Refusal]:
    if entry.settings.code is not None:
        return []
    name = entry.score.run_set.name
    if entry.begin is None:
        text = f"{name}: has no runs.jsonl with the commit: name the folder of its code (results.code)"
        return [Refusal("source-unknown", text)]
    if entry.begin.commit is None or entry.begin.dirty is None:
        text = (
            f"{name}: runs.jsonl does not know the commit, or whether the source differed from it: launch from a clone"
        )
        return [Refusal("source-unknown", text)]
    return []


def _conflicts(entries: Sequence[SubmissionEntry]) -> list[Refusal]:
    """Return conflicts between results.

    Two results for one folder, two codes for one implementation name, training and HPC mixed, a throughput alone.
    """
    results: dict[tuple[str, str, bool], SubmissionEntry] = {}
    codes: dict[tuple[str, str], SubmissionEntry] = {}
    found = []
    for entry in entries:
        name, benchmark = entry.score.run_set.name, entry.benchmark
        other = results.setdefault((entry.system, benchmark, entry.score.instances), entry)
        if other is not entry:
            text = (
                f"{other.score.run_set.name} and {name} are both {benchmark} on {entry.system}: a submission has one "
                "result of each; name the series, or another system"
            )
            found.append(Refusal("place-taken", text))
        other = codes.setdefault((entry.implementation, benchmark), entry)
        if _code(other) != _code(entry):
            text = (
                f"{other.score.run_set.name} ran {_code(other)}, {name} ran {_code(entry)}: one implementation of "
                f"{benchmark} has one code; give one of them another implementation name"
            )
            found.append(Refusal("place-taken", text))
        if entry.rules.usage != entries[0].rules.usage:
            text = f"{name}: {benchmark} is of the {entry.rules.usage} rounds; submit it by itself"
            found.append(Refusal("checker-refuses", text))
        timed = any(each.benchmark == benchmark and not each.score.instances for each in entries)
        if entry.score.instances and not timed:
            text = f"{name}: the submission has no time to solution of {benchmark}"
            found.append(Refusal("throughput-alone", text))
    return found


def _code(entry: SubmissionEntry) -> str:
    if entry.settings.code is not None:
        return str(entry.settings.code)
    return f"commit {entry.begin.commit}" if entry.begin is not None else "unknown code"
