"""Run `check` on several paths in a separate process and measure the cost of each: ``measured.py PATH...``.

The first path is valid, so that imports do not count for the others. Prints a JSON list with an object for each path:
exit code, message, seconds, and the growth in MB of the peak memory of this process and of its children.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import SuiteError
from common.submission import check


def _megabytes() -> tuple[float, float]:
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own / 1024, children / 1024


def measure(path: Path) -> dict[str, Any]:
    """Return output and cost of `check` of one path."""
    before, began = _megabytes(), time.monotonic()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code, message = check.main([str(path)]), ""
        except SuiteError as error:
            code, message = error.exit_code, str(error)
    after = _megabytes()
    return {
        "code": code,
        "message": (out.getvalue() + message)[-20_000:],
        "seconds": time.monotonic() - began,
        "megabytes": after[0] - before[0],
        "megabytes_of_a_child": after[1] - before[1],
    }


if __name__ == "__main__":
    found = [measure(Path(name)) for name in sys.argv[1:]]
    print(json.dumps(found))
