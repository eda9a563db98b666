"""Whether a submission agrees with itself: descriptions of systems, logs, code and names of folders.

A *disagreement* forbids the result: a sentence of the rules says so, or the two sides cannot both be true. A *remark*
forbids nothing, because no rule and no checker compares the two sides: who submits, and how available the system is.
A log cannot be corrected after the run, and published results differ in both. What one side does not say is not
compared, and spelling is not either: organisations are compared by their letters, availability by its words.
``submission_platform`` is free text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

from common.errors import DataError
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.refusals import Refusal
from common.submission.copied_runs import copied_runs
from common.submission.found_files import FoundFiles
from common.submission.layout import ResultFolder
from common.untrusted.strict_json import read_json_object

Sentence = TypeVar("Sentence", bound=str)

JSON_BYTES = 2**20
"""The largest description that is read."""
SHORTEST_NAME = 3
"""Letters of a name that may stand for a longer one that begins or ends with it."""
_COUNTS = ("number_of_nodes", "accelerators_per_node")
_CODE = ("benchmarks", "benchmark")
_AVAILABILITY = {"prem": "onprem", "cloud": "cloud", "preview": "preview", "research": "research", "rdi": "research"}
_NOT_OUT_YET = ("preview", "research")
_UNSET = ("", "unset", "submissionorgplaceholder")


def read_object(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file that anybody may have written.

    Raises:
        DataError: it is none, too large, or no regular file.
    """
    return read_json_object(path, most=most, follow=False)


def same_organisation(one: str, other: str) -> bool:
    """Whether two names are spellings of one: the same letters, the first of the other's words, or their initials."""
    letters, others = _letters(one), _letters(other)
    if letters in _UNSET or others in _UNSET:
        return True  # nothing is said
    short, long = sorted((letters, others), key=len)
    if (len(short) >= SHORTEST_NAME and (long.startswith(short) or long.endswith(short))) or short == long:
        return True
    initials = {"".join(word[0] for word in _words(name)) for name in (one, other)}
    return len(short) > 1 and short in initials


def _letters(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _words(name: str) -> list[str]:
    return "".join(each if each.isalnum() else " " for each in name.casefold()).split()


def log_disagreements(log: ParsedLog, fields: Mapping[str, Any], where: str) -> Iterator[Refusal]:
    """Yield division and size that a log states and the description of its system contradicts.

    Args:
        log: of a run on the system.
        fields: of the system's description.
        where: the description, for messages.
    """
    division, said = log.division, fields.get("division")
    if isinstance(division, str) and isinstance(said, str) and division.casefold() != said.casefold():
        text = f"{log.path}: is of the {division[:80]!a} division, {where} of the {said[:80]!a} one"
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
    """Whether two words for availability differ.

    A system that is not for sale yet stands in a cloud or on premises, too, and its logs may say that instead.
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
"""Key of the log, field of the description, and whether their values differ."""


def count_of(value: object) -> int | None:
    """The number that a field of a description states; None if it states none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def folder_disagreements(
    folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]
) -> Iterator[Refusal]:
    """Yield what the logs of a folder of results say against its name and the description of its system."""
    where = f"systems/{folder.system}.json"
    sized = {name: value for name, value in fields.items() if not folder.weak or name not in _COUNTS}
    for log in logs:
        if isinstance(log.benchmark, str) and log.benchmark != folder.benchmark:
            text = f"{log.path}: is of the benchmark {log.benchmark[:80]!a}, but lies in a folder of {folder.benchmark}"
            yield Refusal("folder-of-another", text)
        yield from log_disagreements(log, sized, where)


def folder_remarks(folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]) -> Iterator[str]:
    """Where the logs of a folder of results name another submitter or status than the description of its system."""
    for key, field, differ in _REMARKED:
        described = fields.get(field)
        logged = Counter(str(value)[:80] for log in logs if differ(value := log.value(key), described))
        for text, count in logged.items():
            yield (
                f"{key} is {text!a} in {count} of {len(logs)} logs, the {field} in systems/{folder.system}.json is "
                f"{str(described)[:80]!a}"
            )


def repeated_runs(logs: Mapping[PurePosixPath, ParsedLog]) -> Iterator[Refusal]:
    """Yield runs that are in two folders of results."""
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
    """Whether the benchmark of a folder has code, and a README that says how to launch it.

    Args:
        content: of the submission.
        folder: of the results.
        benchmarks: names of all benchmarks of the submission.

    Returns:
        complaints, where neither a folder of the benchmark's name has it nor one that no other benchmark is named
        after; and remarks, where it is in such a folder.
    """
    place, own_name = f"benchmarks/{folder.benchmark}", folder.benchmark.casefold()
    others = {name.casefold() for name in benchmarks} - {own_name}
    every = [path for path in content.files if len(path.parts) > 1 and path.parts[0] in _CODE]
    unclaimed = [path for path in every if path.parts[1].casefold() not in others]
    own = [path for path in unclaimed if len(path.parts) > 2 and path.parts[1].casefold() == own_name]
    if not any(not _is_readme(path) for path in unclaimed):
        text = f"its code is missing: there are no files in {place}/implementations/<implementation>/"
        return [Refusal("code-missing", text)], []
    if not any(_is_readme(path) for path in unclaimed):
        return [Refusal("code-missing", f"{place} has no README that says how to launch it")], []
    if not any(len(path.parts) > 4 and path.parts[2] == "implementations" for path in own):
        return [], [f"no code is in {place}/implementations/<implementation>/, where the rules have it"]
    return [], [] if any(map(_is_readme, own)) else [f"{place} has no README that says how to launch it"]


def _is_readme(path: PurePosixPath) -> bool:
    return path.name.casefold().startswith("readme")


def implementation_findings(
    tree: Path, content: FoundFiles, folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]
) -> Iterator[tuple[bool, str]]:
    """What ``<system>_<implementation>.json`` says against its path, the description of the system and the logs.

    The rules do not say what is in this file, published submissions omit it, and no checker reads it. So only the
    scale, which our launcher takes from the run, can disagree.

    Yields:
        whether it is a disagreement, and its text.
    """
    parts = (folder.benchmark.casefold(), "implementations", folder.system)
    for path in content.files:
        place = tuple(part.casefold() if i == 0 else part for i, part in enumerate(path.parts[1:-1]))
        if path.parts[0] not in _CODE or place != parts or path.suffix != ".json":
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
            told, described = count_of(part), count_of(fields.get(key))
            if told is not None and described not in (told, None):
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
    """Return the first sentences and, where there are more, one that says so."""
    found = list(islice(sentences, number + 1))
    if len(found) > number:
        last = found[number]
        more = "there are more of these, such as: "
        found[number] = cast(Sentence, last.about(more) if isinstance(last, Refusal) else more + last)
    return found
