"""Read hostile files in a separate process and measure the cost of each: ``hostile.py READER VALID HOSTILE...``.

``READER`` is ``module:function``, a function of a path. The valid file is read first, so that imports do not count for
the others. Prints a JSON list with an object for each hostile file: class and message of the error, and the growth in
MB of the peak memory of the process.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.errors import SuiteError

ROOT = Path(__file__).resolve().parents[3]
MEGABYTES = 300.0
"""Memory that a hostile file may need in addition to a small valid one."""
DATA_BYTES = 6 * 2**30
"""Memory after which the kernel refuses more, so that a reader without bounds fails the test and not the machine."""
SECONDS = 240


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def complaints(reader: str, valid: Path, hostile: dict[str, Path]) -> list[str]:
    """Return a message for each hostile file that is read, needs too much memory, or does not end in one message.

    Args:
        reader: ``module:function``, which takes a path.
        hostile: file of each case, by its name.
    """
    command = [sys.executable, str(Path(__file__)), reader, str(valid), *map(str, hostile.values())]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return [f"exit status {done.returncode}: {done.stderr[-2000:]}"]
    wrong = []
    for (name, path), found in zip(hostile.items(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        if found["error"] is None:
            wrong.append(f"{name}: is read without an error")
        elif path.name not in found["message"]:
            wrong.append(f"{name}: the message does not name the file: {found['message'][:300]}")
        if found["megabytes"] > MEGABYTES:
            wrong.append(f"{name}: {found['megabytes']:.0f} MB")
        if len(found["message"]) > 5_000:
            wrong.append(f"{name}: a message of {len(found['message'])} characters")
    return wrong


def _measured(read: Any, path: Path) -> dict[str, Any]:
    before, error, message = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, None, ""
    try:
        read(path)
    except SuiteError as raised:
        error, message = type(raised).__name__, str(raised)[:6000]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"error": error, "message": message, "megabytes": grown / 1024}


def main(reader: str, valid: str, *hostile: str) -> None:
    """Print the cost of reading each hostile file."""
    module, _, function = reader.partition(":")
    read = getattr(importlib.import_module(module), function)
    read(Path(valid))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    print(json.dumps([_measured(read, Path(path)) for path in hostile]))


if __name__ == "__main__":
    main(*sys.argv[1:])
