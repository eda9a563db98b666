"""Write the folders and files of a submission in the layout of the submission rules.

::

    <submitter>/
        LICENSE.md  README.md
        systems/<system>.json
        benchmarks/<benchmark>/implementations/<implementation>/        the code
        benchmarks/<benchmark>/implementations/<system>/                README-<system>.md, setup.sh, init_datasets.sh,
                                                                        <system>_<implementation>.json
        results/<system>/<benchmark>/result_<i>.txt                     the logs, byte for byte, in launch order

In HPC rounds, ``strong/`` or ``weak/`` is between system and benchmark, and the logs of instances that do not count in
a throughput result are in ``pruned_results/`` below the benchmark. The package checker writes ``scaling.json``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.mlperf.compliance import rule_records
from common.mlperf.parsed_log import ParsedLog
from common.mlperf.rules import Rules
from common.submission.entries import SubmissionEntry
from common.submission.layout import STRONG
from common.submission.run_sets import WEAK
from common.submission.settings import SubmissionSettings
from common.submission.source_code import copy_folder, export_commit
from common.submission.system_description import Description
from common.submission.texts import init_datasets_script, setup_script, submission_readme, system_readme
from common.untrusted.regular_file import open_regular

OWN_LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def write_tree(
    root: Path,
    settings: SubmissionSettings,
    ruleset: str,
    entries: Sequence[SubmissionEntry],
    descriptions: Mapping[str, Description],
    repository: Path,
) -> None:
    """Write the submitter's folder ``root``, which must not exist.

    Args:
        root: path that ends with the name of the submitter.
        entries: results without refusals.
        repository: clone that has the commits of the runs.

    Raises:
        ConfigError: code or a text file that the submission names cannot be read or is not allowed.
        OSError: a file cannot be written.
    """
    root.mkdir()
    (root / "LICENSE.md").write_bytes(_read(settings.license or OWN_LICENSE, "license"))
    (root / "README.md").write_text(submission_readme(settings.submitter, ruleset, entries))
    for name, description in descriptions.items():
        _write_json(root / "systems" / f"{name}.json", description.fields)
    for entry in entries:
        _write_code(root, entry, repository)
        _write_launch(root, settings.submitter, entry)
        _copy_logs(root, entry)


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name another file as {key}") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4) + "\n")


def _implementations(root: Path, entry: SubmissionEntry) -> Path:
    return root / "benchmarks" / entry.benchmark / "implementations"


def _write_code(root: Path, entry: SubmissionEntry, repository: Path) -> None:
    target = _implementations(root, entry) / entry.implementation
    if target.exists():  # another system of this submission has the same implementation
        return
    target.mkdir(parents=True)
    if entry.settings.code is not None:
        copy_folder(entry.settings.code, target)
    else:
        assert entry.begin is not None
        assert entry.begin.commit is not None
        export_commit(repository, entry.begin.commit, target)


def _write_launch(root: Path, submitter: str, entry: SubmissionEntry) -> None:
    folder = _implementations(root, entry) / entry.system
    folder.mkdir(parents=True)
    own = entry.settings
    readme = "" if own.readme is None else _read(own.readme, "readme").decode(errors="replace")
    (folder / f"README-{entry.system}.md").write_text(system_readme(entry, readme))
    scripts = {
        "setup.sh": _read(own.setup, "setup") if own.setup else setup_script(entry).encode(),
        "init_datasets.sh": (
            _read(own.init_datasets, "init_datasets") if own.init_datasets else init_datasets_script(entry).encode()
        ),
    }
    for name, content in scripts.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755)
    _write_json(folder / f"{entry.system}_{entry.implementation}.json", _run_description(submitter, entry))


def _run_description(submitter: str, entry: SubmissionEntry) -> dict[str, Any]:
    begin, log = entry.begin, entry.score.chosen[0].log
    assert log is not None
    launched = {} if begin is None else {
        "commit": begin.commit,
        "configuration": begin.configuration,
        "scale": begin.scale,
        "arguments": list(begin.overrides),
    }  # fmt: skip
    return {
        "submitter": submitter,
        "system": entry.system,
        "implementation": entry.implementation,
        "benchmark": entry.benchmark,
        "ruleset": entry.rules.ruleset,
        **launched,
        "hyperparameters": _hyperparameters(log, entry.rules),
    }


def _hyperparameters(log: ParsedLog, rules: Rules) -> dict[str, object]:
    """Return the logged hyperparameters of a run: keys in the rule file of the benchmark, and optimizer keys."""
    keys = rule_records(f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml")
    prefixes = ("opt_", "lars_", "sgd_", "scheduler_")
    later = ("eval_accuracy", "eval_error", "aggregated_eval_accuracy", "seed", "weights_initialization")
    wanted = (event for event in log.events if event.key in keys or event.key.startswith(prefixes))
    return {event.key: event.value for event in wanted if event.key not in later}


def result_folder(root: Path, entry: SubmissionEntry) -> Path:
    """Return the folder for the logs of an entry."""
    between = WEAK if entry.score.instances else STRONG if entry.rules.usage == "hpc" else ""
    return Path(root, "results", entry.system, between, entry.benchmark)


def _copy_logs(root: Path, entry: SubmissionEntry) -> None:
    for name, run in entry.files:
        target = result_folder(root, entry) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(run.verdict.paths[0]) as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)
