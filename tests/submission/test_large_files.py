"""`check` of very large logs and registries needs at most 300 MB and ends in a message.

Each is read in a fresh process, whose memory is measured.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import log_of
from mutated_lines import large_log_mutations, registry_mutations
from mutations import Mutation, wants_every_case
from undamaged import EXPERIMENT, log_text, registry_text, series

ROOT = Path(__file__).resolve().parents[2]
MEASURED = Path(__file__).with_name("measured.py")
MEGABYTES = 300.0
SAMPLE = (
    "line 14 (seed) value has 64 MB",
    "file with a line of 100 MB behind",
    "file with an event of 100 MB",
    "file with 2 TB of null bytes behind",
)

pytestmark = pytest.mark.timeout(300)


def _logs() -> list[Mutation]:
    return list(large_log_mutations(log_text("resnet")))


def _registries() -> list[Mutation]:
    return [each for each in registry_mutations(registry_text("resnet")) if each.large]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mutations" not in metafunc.fixturenames:
        return
    every_case = wants_every_case(metafunc.config)
    every = _logs() if "log" in metafunc.function.__name__ else _registries()
    if every_case:
        found = [pytest.param([each], id=each.name, marks=pytest.mark.slow) for each in every]
    elif "log" in metafunc.function.__name__:
        found = [pytest.param([each for each in every if each.name in SAMPLE], id="sample")]
    else:
        found = [pytest.param(every[:1], id=every[0].name)]
    metafunc.parametrize("mutations", found)


def measured(paths: list[Path]) -> list[dict]:
    """Return output and cost of `check` of each path but the first, which is valid and only warms up."""
    command = [sys.executable, str(MEASURED), *map(str, paths)]
    done = subprocess.run(
        command, cwd=paths[0].parent, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)[1:]


def costly(found: dict, name: str, mutation: Mutation) -> list[str]:
    """Return the faults in the result for one large file."""
    wrong = []
    for kind in ("megabytes", "megabytes_of_a_child"):
        if found[kind] > MEGABYTES:
            wrong.append(f"{mutation.name}: {found[kind]:.0f} {kind}")
    if found["code"] != 0 and name not in found["message"]:
        wrong.append(f"{mutation.name}: the message does not name {name}: {found['message'][:300]}")
    if found["code"] != 0 and mutation.line and not re.search(rf"\blines? {mutation.line}\b", found["message"]):
        wrong.append(f"{mutation.name}: the message does not name line {mutation.line}: {found['message'][:300]}")
    if len(found["message"]) > 5_000:
        wrong.append(f"{mutation.name}: a message of {len(found['message'])} characters")
    return wrong


def test_large_log_ends_in_a_message(mutations, tmp_path):
    valid = tmp_path / "valid.log"
    valid.write_text(log_text("resnet"))
    paths = [tmp_path / f"{index}.log" for index in range(len(mutations))]
    for mutation, path in zip(mutations, paths, strict=True):
        mutation.apply(path)
    found = measured([valid, *paths])
    wrong = [text for each, m, path in zip(found, mutations, paths, strict=True) for text in costly(each, path.name, m)]
    for path in paths:
        path.unlink()
    assert not wrong


def test_large_registry_ends_in_a_message(mutations, tmp_path):
    valid = Path(shutil.copytree(series("resnet"), tmp_path / "valid"))
    folders = [Path(shutil.copytree(valid, tmp_path / str(index))) for index in range(len(mutations))]
    for mutation, folder in zip(mutations, folders, strict=True):
        mutation.apply(folder / "runs.jsonl")
    found = measured([valid, *folders])
    wrong = [text for each, m in zip(found, mutations, strict=True) for text in costly(each, "runs.jsonl", m)]
    for folder in folders:
        shutil.rmtree(folder)
    assert not wrong


def test_large_log_in_a_series_ends_in_a_message(tmp_path):
    mutation = next(each for each in _logs() if each.name == SAMPLE[2])
    valid = Path(shutil.copytree(series("resnet"), tmp_path / "valid"))
    folder = Path(shutil.copytree(valid, tmp_path / "large"))
    log = log_of(folder, EXPERIMENT)
    mutation.apply(log)
    wrong = costly(measured([valid, folder])[0], log.name, mutation)
    log.unlink()
    assert not wrong
