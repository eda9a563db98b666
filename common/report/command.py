"""``mlperf-suite report``: write a page and pictures of a run, a set of runs, or a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common.config.output_files import require_writable, write_file
from common.report.canvas import to_png
from common.report.collect import gather
from common.report.page import compose

EPILOG = """RUN is the output_dir of a run, a log of any implementation, a folder of results with runs.jsonl, or a
folder with result_*.txt. The page shows one RUN, or compares several, which must have the same benchmark, target,
division and kind of data."""


def main(argv: Sequence[str]) -> int:
    """Write the page, and the pictures if requested, and print their paths; return 0.

    Raises:
        SuiteError: runs cannot be read or are not comparable, or a file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite report", description="Draw one or several runs as an HTML page.", epilog=EPILOG
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run, a log, or a folder of results"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="path of the page (default: next to the first RUN)"
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write the pictures as PNG files to DIR")
    parser.add_argument(
        "--ruleset",
        metavar="X.Y.Z",
        help="version of the rules (default: the one in the log, or the newest under which the log is valid)",
    )
    args = parser.parse_args(list(argv))
    output = args.output or _default_output(args.runs)
    require_writable("report: --output", output, args.runs)
    if args.png is not None:
        require_writable("report: --png", args.png / "times.png")
    subjects = gather(args.runs, args.ruleset)
    require_writable("report: --output", output, [run.log.path for subject in subjects for run in subject.runs])
    document = compose(subjects)
    write_file(output, document.html)
    print(output)
    if args.png is not None:
        for picture in document.pictures:
            path = args.png / f"{picture.name}.png"
            write_file(path, to_png(picture.figure))
            print(path)
    return 0


def _default_output(runs: Sequence[Path]) -> Path:
    """Return the default path of the page: beside the first run, and named after it."""
    first = runs[0].resolve()
    name = first.name if first.is_dir() else first.stem
    return first.parent / (f"{name}_comparison.html" if len(runs) > 1 else f"{name}_report.html")
