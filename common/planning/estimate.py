"""Implementation of ``mlperf-suite estimate``: time, energy and best settings of a training on N GPUs."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common.config.output_files import require_writable, write_file
from common.config.system import Hardware
from common.contract.workload import Workload
from common.doctor.limits import hardware_of
from common.errors import ConfigError
from common.measure.arguments import numbers_of
from common.planning.convergence import batches_of, convergence_at
from common.planning.estimate_text import best_plans, document, written
from common.planning.page import page_of
from common.planning.points import RESULTS, Load, read_measurements
from common.planning.recipes import recipe_file, write_recipes
from common.planning.search import FixedChoices, LayoutSearch, Plan

DESCRIPTION = """Estimate time to train, efficiency and energy of a benchmark on numbers of GPUs, from measured steps of
one GPU, link constants of the system, and the reference convergence points (RCPs) of MLCommons."""
EPILOG = """The system has a section `hardware`; `mlperf-suite doctor --write-system FILE` writes one for this machine.
Without --batches all batches with an RCP are tried. For each number of GPUs, the command searches layouts,
micro-batches and numbers of evaluation ranks that fit into memory, and prints the arguments of `train` for the best."""


def main(argv: Sequence[str], load: Load, workload_class: Callable[[str], type[Workload]]) -> int:
    """Print the table of estimates; write them as JSON, and the best settings as recipes, on request.

    Args:
        argv: see ``mlperf-suite estimate --help``.

    Raises:
        ConfigError: an argument is wrong, or something that the estimate needs is not known.
    """
    parser = argparse.ArgumentParser(
        prog="mlperf-suite estimate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", help="name of a workload: see `mlperf-suite list`")
    parser.add_argument("--gpus", type=numbers_of, default=[1, 8, 64], help="numbers of GPUs (default: 1,8,64)")
    parser.add_argument("--batches", type=numbers_of, help="global batches (default: all with an RCP)")
    parser.add_argument("--system", default="h200", help="name in configs/system, or a path (default: h200)")
    parser.add_argument("--measured", type=Path, nargs="+", action="extend", default=[], metavar="FILE",
                        help="results of `mlperf-suite measure`, or reports of `mlperf-suite bench` (default: files in "
                        "docs/results)")  # fmt: skip
    parser.add_argument("--micro-batch", type=int, help="only this micro-batch (default: search)")
    parser.add_argument("--layout", type=_axes, metavar="AXIS=SIZE,…",
                        help="only these sizes of pp, cp and tp, such as tp=4,cp=2 (default: search)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all estimates to FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page with plots to FILE")
    parser.add_argument("--write-recipe", type=Path, metavar="DIR",
                        help="write the best settings as recipes for `train --config-dir DIR`")  # fmt: skip
    arguments = parser.parse_args(list(argv))
    for option in ("json", "page"):
        require_writable(f"estimate: --{option}", getattr(arguments, option), arguments.measured)
    if arguments.write_recipe is not None:
        require_writable("estimate: --write-recipe", recipe_file(arguments.write_recipe, arguments.benchmark))
    cls = workload_class(arguments.benchmark)
    hardware = hardware_of(arguments.system)
    search = _search(arguments.benchmark, arguments.system, hardware, arguments.measured, cls, load)
    batches = arguments.batches or list(batches_of(arguments.benchmark))
    if not batches:
        raise ConfigError(f"estimate: {arguments.benchmark} has no RCPs: the samples to train are not known")
    fixed = FixedChoices(arguments.micro_batch, arguments.layout)
    rows, refused = _estimates(search, arguments.gpus, batches, fixed)
    if not rows:
        raise refused[0]
    named = None if Path(arguments.system).suffix else arguments.system
    print(written(rows, named))
    if named is None:
        print(f"\n`train` reads systems by name: these commands leave {arguments.system} out and use system=auto.")
    for error in refused:
        print(f"\nLeft out: {str(error).removeprefix('estimate: ')}")
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(document(rows, arguments.system, hardware, named), indent=1) + "\n")
    if arguments.page is not None:
        page = page_of(arguments.benchmark, rows, hardware, arguments.system, named)
        write_file(arguments.page, page)
    if arguments.write_recipe is not None:
        best = {gpus: plan.settings for gpus, plan in best_plans(rows).items()}
        names = write_recipes(arguments.write_recipe, arguments.benchmark, search.accelerator, best)
        folder = shlex.quote(str(arguments.write_recipe.absolute()))
        print()
        for name in names:
            words = [f"benchmark={arguments.benchmark}", f"scale={name}", *([f"system={named}"] if named else [])]
            print(f"mlperf-suite train --config-dir {folder} {' '.join(words)}")
    return 0


def _search(
    benchmark: str, system: str, hardware: Hardware, files: Sequence[Path], cls: type[Workload], load: Load
) -> LayoutSearch:
    measured = read_measurements(files or sorted(RESULTS.rglob("*.json")), benchmark, hardware.gpu, load)
    if not measured.points:
        raise ConfigError(
            f"estimate: no measured step of {benchmark} on {hardware.gpu} in "
            f"{', '.join(map(str, files)) or RESULTS}: measure it with `mlperf-suite measure {benchmark}`, and name "
            "its results.json with --measured"
        )
    axes = [axis for axis in cls.axes if axis != "dp"]
    convergence = partial(convergence_at, benchmark)
    return LayoutSearch(
        benchmark, system, hardware, measured.points, axes, load, convergence, measured.reader, measured.evaluation
    )


def _estimates(
    search: LayoutSearch, gpus: Sequence[int], batches: Sequence[int], fixed: FixedChoices
) -> tuple[dict[int, list[Plan]], list[ConfigError]]:
    """Return the best plan of each batch, by number of GPUs; and the errors of those that do not fit."""
    rows: dict[int, list[Plan]] = {}
    refused: list[ConfigError] = []
    for count in sorted(set(gpus)):
        for batch in sorted(set(batches)):
            try:
                rows.setdefault(count, []).append(search.accepted(search.plans(count, batch, fixed)))
            except ConfigError as error:
                refused.append(error)
    return {count: plans for count, plans in rows.items() if plans}, refused


def _axes(text: str) -> tuple[int, int, int]:
    sizes = {"pp": 1, "cp": 1, "tp": 1}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part}: expected pp, cp or tp with a size, such as tp=4")
        sizes[axis] = int(size)
    return sizes["pp"], sizes["cp"], sizes["tp"]
