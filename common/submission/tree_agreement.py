"""Find contradictions inside a submission: between system descriptions, logs, code and folder names.

A *disagreement* forbids the result, because the rules say so or because the two values cannot both be true. A *remark*
forbids nothing. It concerns submitter and availability: no rule and no checker compares them, a log cannot be corrected
after the run, and published results differ in both. A missing value is not compared, and spelling is ignored:
organisations are compared by letters, availability by keywords. ``submission_platform`` is free text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

from common.errors import DataError
from common.mlperf.parsed_log import LoggedEvaluation, ParsedLog
from common.mlperf.refusals import Refusal
from common.mlperf.throughput import accelerators_of, busy_accelerators
from common.submission.found_files import FoundFiles
from common.submission.layout import ResultFolder
from common.submission.settings import normalised
from common.untrusted.strict_json import read_json_object

Sentence = TypeVar("Sentence", bound=str)

JSON_BYTES = 2**20
"""Largest size in bytes of a system description."""
SHORTEST_NAME = 3
"""Smallest number of letters with which a name may abbreviate a longer name that begins or ends with it."""
_COUNTS = ("number_of_nodes", "accelerators_per_node")
_CODE = ("benchmarks", "benchmark")
_AVAILABILITY = {"prem": "onprem", "cloud": "cloud", "preview": "preview", "research": "research", "rdi": "research"}
_NOT_OUT_YET = ("preview", "research")
_UNSET = ("", "unset", "submissionorgplaceholder")


def read_object(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in an untrusted file.

    Raises:
        DataError: the file is not regular, is too large, or does not contain a JSON object.
    """
    return read_json_object(path, most=most, follow=False)


def same_organisation(one: str, other: str) -> bool:
    """Return whether two names can mean one organisation.

    They can if one is missing, their letters are equal, one begins or ends with the other, or one has its initials.
    """
    short, long = sorted((normalised(one), normalised(other)), key=len)
    if short in _UNSET or long in _UNSET:
        return True  # a missing name contradicts nothing
    if (len(short) >= SHORTEST_NAME and (long.startswith(short) or long.endswith(short))) or short == long:
        return True
    initials = {"".join(word[0] for word in _words(name)) for name in (one, other)}
    return len(short) > 1 and short in initials


def _words(name: str) -> list[str]:
    return "".join(each if each.isalnum() else " " for each in name.casefold()).split()


def log_disagreements(log: ParsedLog, fields: Mapping[str, Any], where: str) -> Iterator[Refusal]:
    """Yield contradictions in division and system size between a log and the description of its system.

    Args:
        where: name of the description in messages.
    """
    division, described = log.division, fields.get("division")
    if isinstance(division, str) and isinstance(described, str) and division.casefold() != described.casefold():
        text = f"{log.path}: is of the {division[:80]!a} division, {where} of the {described[:80]!a} one"
        yield Refusal("division-differs", text)
    for key in _COUNTS:
        for event in log.all(key):
            logged_count, count = count_of(event.value), count_of(fields.get(key))
            on_processors = key == "accelerators_per_node" and logged_count == 0
            if None not in (logged_count, count) and logged_count != count and not on_processors:
                text = f"{log.path}: {key} is {str(event.value)[:80]}, {where} has {count}"
                yield Refusal("counts-differ", text)


def _availability(status: object) -> str | None:
    text = status.casefold() if isinstance(status, str) else ""
    return next((meaning for word, meaning in _AVAILABILITY.items() if word in text), None)


def _other_status(logged: object, described: object) -> bool:
    """Return whether two values of availability differ.

    A preview or research system is also in a cloud or on premises, so its logs may state that instead.
    """
    log, description = _availability(logged), _availability(described)
    if log is None or description is None or log == description:
        return False
    return description not in _NOT_OUT_YET or log in _NOT_OUT_YET


def _other_organisation(org: object, submitter: object) -> bool:
    return isinstance(org, str) and isinstance(submitter, str) and not same_organisation(org, submitter)


_REMARKED: tuple[tuple[str, str, Callable[[object, object], bool]], ...] = (
    ("submission_status", "status", _other_status),
    ("submission_org", "submitter", _other_organisation),
)
"""Log key, description field, and the function that returns whether their values differ."""


def count_of(value: object) -> int | None:
    """Return the value of a description field as an integer; None if it is not a plain number."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def size_refusals(
    logs: Sequence[ParsedLog], fields: Mapping[str, Any], where: str, never_started: Sequence[int] = ()
) -> Iterator[Refusal]:
    """Yield a refusal if instances use more accelerators at the same time than their system has, or too few at all.

    The rules ask for S <= T <= M * S, of M instances on S accelerators each, in a system with T.

    Args:
        logs: logs of all instances, pruned ones included.
        where: name of the system description in messages.
        never_started: numbers of the instances that ended before ``run_start``.
    """
    nodes, per_node = (count_of(fields.get(key)) for key in _COUNTS)
    sizes = [size for log in logs if (size := accelerators_of(log)) is not None]
    if nodes is None or per_node is None or not sizes:
        return
    # Logs of runs on processors state 0 accelerators, and their nodes are counted.
    total = nodes if all(log.value("accelerators_per_node") == 0 for log in logs) else nodes * max(per_node, 1)
    if (busy := busy_accelerators(logs)) > total:
        text = (
            f"instances that run at the same time use {busy} accelerators, and {where} has {total}: a log states "
            "number_of_nodes of its instance, not of the job"
        )
        yield Refusal("instance-size", text)
    if sum(sizes) < total:
        numbers = ", ".join(map(str, never_started))
        missing = f"experiments that never reached run_start: {numbers}" if numbers else "instances are missing"
        text = f"{len(sizes)} instances use {sum(sizes)} of the {total} accelerators in {where}: {missing}"
        yield Refusal("instance-missing", text)


def folder_disagreements(
    folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]
) -> Iterator[Refusal]:
    """Yield contradictions of the logs in a result folder with its name and with ``fields`` of its description."""
    where = f"systems/{folder.system}.json"
    sized = {name: value for name, value in fields.items() if not folder.weak or name not in _COUNTS}
    for log in logs:
        if isinstance(log.benchmark, str) and log.benchmark != folder.benchmark:
            text = f"{log.path}: is of the benchmark {log.benchmark[:80]!a}, but lies in a folder of {folder.benchmark}"
            yield Refusal("folder-of-another", text)
        yield from log_disagreements(log, sized, where)


def folder_remarks(folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]) -> Iterator[str]:
    """Yield remarks where logs state another submitter or status than ``fields`` of the system description."""
    for key, field, differ in _REMARKED:
        described = fields.get(field)
        logged = Counter(str(value)[:80] for log in logs if differ(value := log.value(key), described))
        for text, count in logged.items():
            yield (
                f"{key} is {text!a} in {count} of {len(logs)} logs, the {field} in systems/{folder.system}.json is "
                f"{str(described)[:80]!a}"
            )


def repeated_runs(logs: Mapping[PurePosixPath, ParsedLog]) -> Iterator[Refusal]:
    """Yield a refusal for each run whose log is in two result folders."""
    names = {log.path: name for name, log in logs.items()}
    for owner, copy in copied_runs(list(logs.values())):
        if owner.path.parent != copy.path.parent:
            text = (
                f"{names[copy.path]} and {names[owner.path]} are one run: their evaluations or times agree to the "
                "millisecond; a run is of one system and one benchmark"
            )
            yield Refusal("run-copied", text)


def missing_code(
    content: FoundFiles, folder: ResultFolder, benchmarks: Set[str]
) -> tuple[Sequence[Refusal], Sequence[str]]:
    """Check that the benchmark of a result folder has code, and a README with launch instructions.

    Args:
        benchmarks: names of all benchmarks in the submission.

    Returns:
        Complaints if code or README is missing, and remarks if they are in a folder of another name. Folders with the
        names of other benchmarks are not searched.
    """
    expected, own_name = f"benchmarks/{folder.benchmark}", folder.benchmark.casefold()
    others = {name.casefold() for name in benchmarks} - {own_name}
    every = [path for path in content.files if len(path.parts) > 1 and path.parts[0] in _CODE]
    unclaimed = [path for path in every if path.parts[1].casefold() not in others]
    own = [path for path in unclaimed if len(path.parts) > 2 and path.parts[1].casefold() == own_name]
    if not any(not _is_readme(path) for path in unclaimed):
        text = f"its code is missing: there are no files in {expected}/implementations/<implementation>/"
        return [Refusal("code-missing", text)], []
    if not any(_is_readme(path) for path in unclaimed):
        return [Refusal("code-missing", f"{expected} has no README that says how to launch it")], []
    if not any(len(path.parts) > 4 and path.parts[2] == "implementations" for path in own):
        return [], [f"no code is in {expected}/implementations/<implementation>/, where the rules have it"]
    return [], [] if any(map(_is_readme, own)) else [f"{expected} has no README that says how to launch it"]


def _is_readme(path: PurePosixPath) -> bool:
    return path.name.casefold().startswith("readme")


def implementation_findings(
    tree: Path, content: FoundFiles, folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]
) -> Iterator[tuple[bool, str]]:
    """Compare ``<system>_<implementation>.json`` with its path, the system description and the logs.

    The rules do not define the content of this file, published submissions omit it, and no checker reads it. So only
    its scale, which our launcher takes from the run, can be a disagreement.

    Yields:
        True for a disagreement or False for a remark, and its text.
    """
    parts = (folder.benchmark.casefold(), "implementations", folder.system)
    for path in content.files:
        within = tuple(part.casefold() if i == 0 else part for i, part in enumerate(path.parts[1:-1]))
        if path.parts[0] not in _CODE or within != parts or path.suffix != ".json":
            continue
        implementation = path.stem.removeprefix(f"{folder.system}_")
        if implementation == path.stem:
            continue
        try:
            own = read_object(tree / path)
        except DataError as error:
            yield False, str(error)
            continue
        yield from ((True, f"{path}: {text}") for text in _scale_disagreements(own, folder, fields))
        yield from ((False, f"{path}: {text}") for text in _own_remarks(own, folder, implementation, fields, logs))
        if not any(each.parts[: len(path.parts) - 1] == (*path.parts[:-2], implementation) for each in content.files):
            yield False, f"{path}: there is no code in {path.parent.parent / implementation}"


def _scale_disagreements(own: Mapping[str, Any], folder: ResultFolder, fields: Mapping[str, Any]) -> Iterator[str]:
    scale = own.get("scale")
    if isinstance(scale, str) and not folder.weak:
        for key, part in zip(_COUNTS, scale.split("x"), strict=False):
            stated, described = count_of(part), count_of(fields.get(key))
            if stated is not None and described not in (stated, None):
                yield f"scale is {scale[:80]!a}, {key} in systems/{folder.system}.json is {described}"


def _own_remarks(
    own: Mapping[str, Any],
    folder: ResultFolder,
    implementation: str,
    fields: Mapping[str, Any],
    logs: Sequence[ParsedLog],
) -> Iterator[str]:
    expected = {"system": folder.system, "implementation": implementation, "benchmark": folder.benchmark}
    for key, value in expected.items():
        if isinstance(own.get(key), str) and own[key] != value:
            yield f"{key} is {own[key][:80]!a}, expected {value!r}"
    if _other_organisation(submitter := own.get("submitter"), described := fields.get("submitter")):
        yield f"submitter is {str(submitter)[:80]!a}, systems/{folder.system}.json has {str(described)[:80]!a}"
    values = own.get("hyperparameters")
    for key, value in values.items() if isinstance(values, dict) else ():
        other = next((log for log in logs if log.all(key) and log.value(key) != value), None)
        if other is not None:
            yield f"{key[:80]!a} is {ascii(value)[:80]}, {other.path.name} has {ascii(other.value(key))[:80]}"


def at_most(sentences: Iterator[Sentence], number: int = 50) -> list[Sentence]:
    """Return the first ``number`` sentences and, if there are more, one more that says so."""
    found = list(islice(sentences, number + 1))
    if len(found) > number:
        last = found[number]
        more = "there are more of these, such as: "
        found[number] = cast(Sentence, last.about(more) if isinstance(last, Refusal) else more + last)
    return found


TELLING_VALUES = 6
"""Smallest number of different evaluation results that identify a run."""
TELLING_GAPS = 10
"""Smallest number of different time gaps between log lines that identify a run."""


def copied_runs(logs: Sequence[ParsedLog]) -> list[tuple[ParsedLog, ParsedLog]]:
    """Return pairs of logs of one run, which appears twice, as (first log, log that repeats it).

    Two logs are of one run if they agree in the sequence of evaluation results, in the times of these results to the
    millisecond, or in the time gaps between all log lines.
    """
    first: dict[tuple[object, ...], ParsedLog] = {}
    found = []
    for log in logs:
        marks = list(_marks(log))
        owner = next((first[mark] for mark in marks if mark in first), None)
        if owner is not None:
            found.append((owner, log))
        for mark in marks:
            first.setdefault(mark, log)
    return found


def copy_refusals(logs: Sequence[ParsedLog]) -> list[Refusal]:
    """Return a refusal for each pair of :func:`copied_runs`."""
    return [
        Refusal(
            "run-copied",
            f"{copy.path} and {owner.path} are one run: their evaluations or times agree to the millisecond; a result "
            "counts each run once",
        )
        for owner, copy in copied_runs(logs)
    ]


def _marks(log: ParsedLog) -> Iterator[tuple[object, ...]]:
    """Yield fingerprints that do not change if somebody edits seed, date, benchmark name or other lines of a log."""
    starts = log.all("run_start")
    values = tuple((repr(each.progress), _values(each)) for each in log.evaluations)
    if len({value for _, value in values}) >= TELLING_VALUES:
        yield ("values", values)
    if starts and log.evaluations:
        curve = [
            (repr(each.progress), _values(each), _ms(each.time_ms - starts[0].time_ms)) for each in log.evaluations
        ]
        length = None if log.run_minutes is None else _ms(60_000 * log.run_minutes)
        yield ("curve", tuple(curve), length)
    gaps = tuple(_ms(after.time_ms - before.time_ms) for before, after in pairwise(log.events))
    if len(set(gaps)) >= TELLING_GAPS:
        yield ("gaps", gaps)


def _values(evaluation: LoggedEvaluation) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in evaluation.values.items()))


def _ms(milliseconds: float) -> float:
    return round(milliseconds, 0)  # stays a float, because times in damaged logs can be infinite
