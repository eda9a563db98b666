"""Implementation of ``mlperf-suite characterise``: what the steps of workloads spend their time on, on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.characterise.counters import ncu_command, read_counters
from common.characterise.observations import observations
from common.characterise.page import page
from common.characterise.variants import COUNTERS, VARIANTS, plan_of
from common.characterise.workload import Characterised
from common.config.composition import compose, scales_of
from common.config.system import Hardware
from common.config.yaml_files import CONFIGS
from common.doctor.limits import hardware_of, load_system
from common.errors import ConfigError
from common.measure.arguments import gpus_of, make_folder, parser_of, require_known, require_seconds
from common.measure.node import Node
from common.measure.table import MeasuredCopy

DESCRIPTION = (
    "Characterise the training steps of benchmarks on this machine: kernels, roofline, formats, CUDA graphs, "
    "implementations, numbers of GPUs. Write a page and a JSON file that compare the benchmarks."
)
SECONDS = 300.0
"""Time limit of one benchmark with all its variants."""
BRIEF = ("bench.seconds=2", "bench.repetitions=3", "bench.profile_steps=3")
"""Settings that keep each measurement short: the steps are timed for two seconds, all repetitions together."""
PAGE, DATA = "characterisation.html", "characterisation.json"


def main(argv: Sequence[str], benchmarks: Collection[str]) -> int:
    """Measure all variants and write the page and its JSON; return 1 if a measurement failed, else 0.

    Args:
        argv: arguments of the command, which ``--help`` describes.
        benchmarks: names of all benchmarks.

    Raises:
        ConfigError: there is nothing to measure, this machine has too few GPUs, or an argument is wrong.
    """
    arguments = _parse(argv)
    require_known("characterise", arguments.benchmarks, benchmarks, arguments.scale)
    names, gpus = gpus_of("characterise", arguments.gpus, arguments.override, on_cpu=(1,))
    if arguments.system is not None and not names:
        raise ConfigError(
            f"--system {arguments.system}: CPU ranks replace GPUs here, and a system has the rates of a GPU"
        )
    hardware = None if arguments.system is None else hardware_of(arguments.system)
    asked = arguments.benchmarks or [name for name in sorted(benchmarks) if arguments.scale in scales_of(name)]
    if not asked:
        raise ConfigError(f"characterise: no benchmark has a scale {arguments.scale}")
    make_folder("characterise", arguments.output)
    command = shlex.join(["mlperf-suite", "characterise", *argv])
    places = len(names) or max(gpus)
    settings = [*BRIEF, *arguments.override]
    done: list[Characterised] = []
    for name in asked:
        tree = compose([f"benchmark={name}", f"scale={arguments.scale}", *arguments.override])
        counted = arguments.output / f"{name}-counters.csv"
        counted.unlink(missing_ok=True)
        ncu, cpu = ncu_command(counted), not names
        plan = plan_of(name, scales_of(name), arguments.scale, tree, arguments.variants, gpus, places, cpu, ncu)
        node = Node(places, names, arguments.output, arguments.seconds, lambda job: settings, arguments.apart)
        outcomes: list[MeasuredCopy] = []
        for outcome in node.measure(plan.jobs, within=arguments.seconds):
            outcomes.append(outcome)
            if outcome.figures is None:
                print(f"{outcome.name}: failed: {outcome.failure}", flush=True)
        devices = {each.figures["device"] for each in outcomes if each.figures is not None}
        if hardware is not None and devices - {hardware.gpu}:
            raise ConfigError(f"--system {arguments.system}: its rates are of {hardware.gpu}, this is {min(devices)}")
        own, system = (hardware, arguments.system) if hardware is not None else _found(devices)
        counters, why = read_counters(counted) if ncu and not cpu else ({}, "")
        if why:
            failed = [each.failure for each in outcomes if each.job.variant == COUNTERS and each.figures is None]
            plan = replace(plan, absent={**plan.absent, COUNTERS: "; ".join([*failed, why])})
        done.append(Characterised(name, plan, outcomes, own, cpu, counters))
        # Both files are complete after each benchmark, so an interrupted command leaves its results too.
        _write(arguments.output, command, done, system)
    print(arguments.output / PAGE)
    return int(any(each.failures() for each in done))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("characterise", DESCRIPTION, "characterised")
    parser.add_argument(
        "--variants",
        type=_variants,
        default=VARIANTS,
        help=f"variants of the step to measure, some of {','.join(VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"time limit of one benchmark with all its variants (default: {SECONDS:.0f})",
    )
    parser.add_argument(
        "--system",
        metavar="NAME",
        help="rates of this machine: a name in configs/system, or a file written by `doctor --write-system` "
        "(default: the system in configs/system that has this GPU)",
    )
    arguments = parser.parse_args(argv)
    require_seconds("characterise", arguments.seconds)
    return arguments


def _variants(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(VARIANTS)):
        raise argparse.ArgumentTypeError(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    return names


def _found(devices: Collection[str]) -> tuple[Hardware | None, str]:
    """Return the hardware of the system in ``configs/system`` that has the measured GPU, and the system's name."""
    for path in sorted((CONFIGS / "system").glob("*.yaml")):
        hardware = load_system(path.stem)[0].hardware
        if hardware is not None and hardware.gpu in devices:
            return hardware, path.stem
    return None, ""


def _write(folder: Path, command: str, done: Sequence[Characterised], system: str) -> None:
    hardware = next((each.hardware for each in done if each.hardware is not None), None)
    judged = observations(done)
    first = next((figures for each in done if (figures := each.figures()) is not None), None)
    content: dict[str, Any] = {
        "command": command,
        "provenance": None if first is None else first["provenance"],
        "hardware": None if hardware is None else {"system": system, **asdict(hardware)},
        "observations": [asdict(each) for each in judged],
        "workloads": {each.benchmark: each.to_json() for each in done},
    }
    (folder / DATA).write_text(json.dumps(content, indent=1) + "\n")
    (folder / PAGE).write_text(page(done, judged, _rates(hardware, system), command))


def _rates(hardware: Hardware | None, system: str) -> str:
    if hardware is None:
        return (
            "The rates of this machine are unknown, so there is no roofline. `mlperf-suite doctor --write-system FILE` "
            "measures those of a GPU; give the file with --system."
        )
    products = ", ".join(f"{name} {rate:,.0f}" for name, rate in hardware.tflops.items())
    return (
        f"Rates of the roofline, from system {system}: memory {hardware.memory_gbs:,.0f} GB/s; matrix products, "
        f"TFLOP/s: {products}."
    )
