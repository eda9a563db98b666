"""Count the source files that one training step enters: ``python scripts/count_entered_files.py resnet --list``.

The step is the second one of ``train benchmark=NAME scale=test device=cpu``, from its launch by the trainer to the
request for the next batches. A file counts if Python code of it was called in the meantime. The number says how many
files somebody opens who reads a step from the trainer to the operations.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SECOND = 2


def entered(arguments: Sequence[str]) -> list[str]:
    """Run a training in this process; return the files below common/ and benchmarks/ that the second step entered.

    Args:
        arguments: arguments of ``mlperf-suite``: ``train`` and its overrides.

    Raises:
        RuntimeError: the run ended before its second step.
    """
    from common import cli
    from common.run.trainer import Trainer

    files: set[Path] = set()
    steps = 0
    launch = Trainer._launch

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(Path(frame.f_code.co_filename))

    def launched(trainer: Trainer, micro_batches: list[Any]) -> None:
        nonlocal steps
        steps += 1
        sys.setprofile(note if steps == SECOND else None)
        try:
            launch(trainer, micro_batches)
        finally:
            sys.setprofile(None)

    with mock.patch.object(Trainer, "_launch", launched), contextlib.redirect_stdout(sys.stderr):
        code = cli.run(arguments)
    if steps < SECOND:
        raise RuntimeError(f"the run ended with exit code {code} before its second step")
    inside = (path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT))
    return sorted(str(path) for path in inside if path.parts[0] in ("common", "benchmarks"))


def main(argv: Sequence[str]) -> int:
    """Count the files of one benchmark, on synthetic data in a temporary folder. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", help="name of a workload")
    parser.add_argument("--list", action="store_true", help="also print the files")
    chosen = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    from common import cli
    from common.config.override import override

    benchmark = f"benchmark={chosen.benchmark}"
    with tempfile.TemporaryDirectory() as folder:
        raw, data, output = (f"{folder}/{name}" for name in ("raw", "data", "output"))
        with contextlib.redirect_stdout(sys.stderr):
            code = cli.run(["generate", benchmark, "scale=test", "--raw-dir", raw])
            code = code or cli.run(["prepare", benchmark, "--raw-dir", raw, "--data-dir", data])
        if code:
            return code
        folders = {"data_dir": data, "output_dir": output}
        given = [override(key, value) for key, value in folders.items()]
        files = entered(["train", benchmark, "scale=test", "device=cpu", *given])
    if chosen.list:
        print("\n".join(files))
    print(f"{chosen.benchmark}: {len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
