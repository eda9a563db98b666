"""Worker process that runs MLCommons' compliance and RCP checkers on the events of untrusted logs.

:mod:`common.mlperf.checker_process` starts it in a sandbox. A request is one line of JSON, followed by one line for
each event (its JSON object); the request's ``lines`` counts them per log. An answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from common.mlperf.rules import rules_for

Logs = Sequence[Sequence[str]]


def compliance(request: dict[str, Any], logs: Logs) -> object:
    """Return the findings of the compliance checker on one log."""
    from common.mlperf.compliance import check_lines

    return [asdict(finding) for finding in check_lines(logs[0], request["usage"], request["ruleset"])]


def convergence(request: dict[str, Any], logs: Logs) -> object:
    """Return the outcome of the RCP test on the logs of a result, as a dict of the fields of ``RcpResult``."""
    from common.mlperf.rcp_engine import run_rcp_test

    return asdict(run_rcp_test(logs, rules_for(request["benchmark"], request["ruleset"])))


def reference(request: dict[str, Any], logs: Logs) -> object:
    """Return the reference at a global batch as a dict; None without an RCP."""
    from common.mlperf.rcp_engine import find_reference

    found = find_reference(rules_for(request["benchmark"], request["ruleset"]), request["global_batch"])
    return None if found is None else asdict(found)


def points(request: dict[str, Any], logs: Logs) -> object:
    """Return all RCPs of a benchmark as dicts of the fields of ``ReferencePoint``."""
    from common.mlperf.rcp_engine import find_points

    return [asdict(point) for point in find_points(rules_for(request["benchmark"], request["ruleset"]))]


TASKS: dict[str, Callable[[dict[str, Any], Logs], object]] = {
    "compliance": compliance,
    "convergence": convergence,
    "reference": reference,
    "points": points,
}


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of checkers out of the answers
    source = sys.stdin
    while head := source.readline():
        request = json.loads(head)
        logs = [list(islice(source, count)) for count in request["lines"]]
        try:
            answer = {"answer": TASKS[request["task"]](request, logs)}
        except MemoryError:
            logs.clear()
            answer = {"stopped": "it ran out of memory"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
