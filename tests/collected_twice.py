"""``python -m tests.collected_twice [ARGUMENT OF PYTEST…]``: whether the tests have the same ids in every process.

pytest-xdist refuses to start when its workers collect different tests. Ids differ if they depend on the clock, on the
order of a set or on an address in memory. This command collects twice, the second time with another
``PYTHONHASHSEED`` and a clock that is a day ahead (:mod:`tests.shifted_clock`), and prints the ids that differ.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str]) -> int:
    """Collect twice, at the same time, and compare.

    Returns:
        0 if both collections are equal, 1 if they differ or tests cannot be collected.
    """
    started = [_start(1, arguments), _start(2, ["-p", "tests.shifted_clock", *arguments])]
    outputs = [process.communicate()[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        if process.returncode != 0:
            print(f"{output}The tests cannot be collected: pytest ended with the exit code {process.returncode}.")
            return 1
    first, second = ([line for line in output.splitlines() if "::" in line] for output in outputs)
    if first == second:
        print(f"Both collections have the same {len(first)} tests.")
        return 0
    print(*difflib.unified_diff(first, second, "first collection", "a day later", n=0, lineterm=""), sep="\n")
    print("These ids depend on the clock, on the order of a set or on an address. Give the cases ids=[…] of their own.")
    return 1


def _start(hash_seed: int, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--disable-warnings", "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
