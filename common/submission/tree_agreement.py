"""Whether a submission agrees with itself: descriptions of systems, logs, code and names of folders.

What one side does not say is not compared, and spelling is not either: organisations are compared by their letters,
availability by its words. ``submission_platform`` is free text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import DataError
from common.mlperf.parsed_log import ParsedLog
from common.submission.copied_runs import copied_runs
from common.submission.found_files import FoundFiles
from common.submission.layout import ResultFolder
from common.untrusted.strict_json import read_json_object

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


def log_disagreements(log: ParsedLog, fields: Mapping[str, Any], where: str) -> Iterator[str]:
    """What a log says of submitter, division, availability and size that the description of its system contradicts.

    Args:
        log: of a run on the system.
        fields: of the system's description.
        where: the description, for messages.
    """
    division, said = log.division, fields.get("division")
    if isinstance(division, str) and isinstance(said, str) and division.casefold() != said.casefold():
        yield f"{log.path}: is of the {division[:80]!a} division, {where} of the {said[:80]!a} one"
    logged, described = log.value("submission_status"), fields.get("status")
    if _contradict(_availability(logged), _availability(described)):
        yield f"{log.path}: submission_status is {str(logged)[:80]!a}, the status in {where} is {str(described)[:80]!a}"
    org, submitter = log.value("submission_org"), fields.get("submitter")
    if isinstance(org, str) and isinstance(submitter, str) and not same_organisation(org, submitter):
        yield f"{log.path}: submission_org is {org[:80]!a}, the submitter in {where} is {submitter[:80]!a}"
    for key in _COUNTS:
        for event in log.all(key):
            logged_count, count = count_of(event.value), count_of(fields.get(key))
            on_processors = key == "accelerators_per_node" and logged_count == 0
            if None not in (logged_count, count) and logged_count != count and not on_processors:
                yield f"{log.path}: {key} is {str(event.value)[:80]}, {where} has {count}"


def _availability(status: object) -> str | None:
    text = status.casefold() if isinstance(status, str) else ""
    return next((meaning for word, meaning in _AVAILABILITY.items() if word in text), None)


def _contradict(logged: str | None, described: str | None) -> bool:
    """A system that is not for sale yet stands in a cloud or not, too, and its logs may say so instead."""
    if logged is None or described is None or logged == described:
        return False
    return described not in _NOT_OUT_YET or logged in _NOT_OUT_YET


def count_of(value: object) -> int | None:
    """The number that a field of a description states; None if it states none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def folder_disagreements(folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]) -> Iterator[str]:
    """What the logs of a folder of results say against its name and the description of its system."""
    where = f"systems/{folder.system}.json"
    sized = {name: value for name, value in fields.items() if not folder.weak or name not in _COUNTS}
    for log in logs:
        if isinstance(log.benchmark, str) and log.benchmark != folder.benchmark:
            yield f"{log.path}: is of the benchmark {log.benchmark[:80]!a}, but lies in a folder of {folder.benchmark}"
        yield from log_disagreements(log, sized, where)


def repeated_runs(logs: Mapping[PurePosixPath, ParsedLog]) -> Iterator[str]:
    """Runs that are in two folders of results."""
    names = {log.path: name for name, log in logs.items()}
    for owner, copy in copied_runs(list(logs.values())):
        if owner.path.parent != copy.path.parent:
            yield (
                f"{names[copy.path]} and {names[owner.path]} are one run: their evaluations or times agree to the "
                "millisecond; a run is of one system and one benchmark"
            )


def missing_code(content: FoundFiles, folder: ResultFolder) -> Iterator[str]:
    """Whether the folder's benchmark has code, and a README that says how to launch it."""
    code = [
        path
        for path in content.files
        if len(path.parts) > 2 and path.parts[0] in _CODE and path.parts[1].casefold() == folder.benchmark.casefold()
    ]
    place = f"benchmarks/{folder.benchmark}"
    if not any(len(path.parts) > 4 and path.parts[2] == "implementations" for path in code):
        yield f"{folder.path}: its code is missing: there are no files in {place}/implementations/<implementation>/"
    elif not any(path.name.casefold().startswith("readme") for path in code):
        yield f"{folder.path}: {place} has no README that says how to launch it"


def implementation_disagreements(
    tree: Path, content: FoundFiles, folder: ResultFolder, fields: Mapping[str, Any], logs: Sequence[ParsedLog]
) -> Iterator[str]:
    """What ``<system>_<implementation>.json`` says against its place, the system's description and the logs."""
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
            yield str(error)
            continue
        yield from (f"{path}: {text}" for text in _own_disagreements(own, folder, implementation, fields, logs))
        if not any(each.parts[: len(path.parts) - 1] == (*path.parts[:-2], implementation) for each in content.files):
            yield f"{path}: there is no code in {path.parent.parent / implementation}"


def _own_disagreements(
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
    submitters = (own.get("submitter"), fields.get("submitter"))
    if all(isinstance(each, str) for each in submitters) and not same_organisation(*map(str, submitters)):
        yield f"submitter is {str(submitters[0])[:80]!a}, systems/{folder.system}.json has {str(submitters[1])[:80]!a}"
    scale = own.get("scale")
    if isinstance(scale, str) and not folder.weak:
        for key, part in zip(_COUNTS, scale.split("x"), strict=False):
            told, described = count_of(part), count_of(fields.get(key))
            if told is not None and described not in (told, None):
                yield f"scale is {scale[:80]!a}, {key} in systems/{folder.system}.json is {described}"
    values = own.get("hyperparameters")
    for key, value in values.items() if isinstance(values, dict) else ():
        other = next((log for log in logs if log.all(key) and log.value(key) != value), None)
        if other is not None:
            yield f"{key[:80]!a} is {ascii(value)[:80]}, {other.path.name} has {ascii(other.value(key))[:80]}"


def at_most(complaints: Iterator[str], number: int = 50) -> list[str]:
    """The first complaints, and whether there are more."""
    found = list(islice(complaints, number + 1))
    return found if len(found) <= number else [*found[:number], "there are more of these"]
