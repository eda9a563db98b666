"""Arguments that ``mlperf-suite measure`` and ``mlperf-suite characterise`` share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from common.config.composition import scales_of
from common.config.override import did_you_mean
from common.distributed.startup import find_rank_info
from common.errors import ConfigError

SCALE = "8xH200"


def devices() -> list[str]:
    """Return the names of the GPUs that this process sees, as in ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def counts_up_to(most: int) -> list[int]:
    """Return the powers of two up to ``most``, and ``most`` itself, in ascending order."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def parser_of(command: str, description: str, output: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of both commands.

    Args:
        command: name of the command.
        output: default folder for the results.
    """
    parser = argparse.ArgumentParser(prog=f"mlperf-suite {command}", description=description)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help="default: all that have this scale")
    parser.add_argument("--scale", default=SCALE, help=f"scale to measure (default: {SCALE})")
    parser.add_argument(
        "--gpus", type=numbers_of, help="numbers of GPUs, such as 1,2,4 (default: powers of two, and all GPUs)"
    )
    parser.add_argument("--output", type=Path, default=Path(output), help=f"folder for the results (default: {output})")
    parser.add_argument(
        "--apart", action="store_true", help="start each benchmark only when the previous one has ended"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        help="setting for every benchmark, such as bench.steps=50; may be repeated",
    )
    return parser


def numbers_of(text: str) -> list[int]:
    """Return the numbers in a list with commas, for `argparse`; each is at least 1."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 1 on, with commas between them")
    return counts


def require_seconds(command: str, seconds: float) -> None:
    """Raise a ConfigError if ``--seconds`` is not a time limit."""
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{command}: --seconds={seconds:g}: expected seconds, more than 0")


def require_known(command: str, asked: Sequence[str], benchmarks: Collection[str], scale: str) -> None:
    """Check the names of benchmarks, and that they have the scale.

    Raises:
        ConfigError: one of ``asked`` is not in ``benchmarks``, or has no such scale.
    """
    for name in asked:
        if name not in benchmarks:
            near = did_you_mean(name, benchmarks)
            raise ConfigError(f"{command}: no benchmark {name!r}; there are {', '.join(sorted(benchmarks))}{near}")
        if scale not in (scales := scales_of(name)):
            near = did_you_mean(scale, scales)
            raise ConfigError(f"{command}: {name} has no scale {scale}; it has {', '.join(scales)}{near}")


def gpus_of(
    command: str, asked: Sequence[int] | None, overrides: Sequence[str], on_cpu: Sequence[int] | None = None
) -> tuple[list[str], list[int]]:
    """Return the names of the GPUs of this machine, and the numbers of GPUs to measure.

    With the override ``device=cpu``, CPU ranks replace GPUs: there are no names.

    Args:
        asked: numbers of GPUs that the user wants; None for powers of two, and all.
        on_cpu: numbers of CPU ranks if ``asked`` is None; None to require ``asked``.

    Raises:
        ConfigError: there is nothing to measure, or this machine has too few GPUs.
    """
    cpu = "device=cpu" in overrides
    find_rank_info(os.environ)  # raises if the environment is wrong, since every bench would fail
    names = [] if cpu else devices()
    gpus = list(asked or (on_cpu or [] if cpu else counts_up_to(len(names)) if names else []))
    if not gpus and cpu:
        raise ConfigError(f"{command}: --gpus is missing; it gives the number of CPU ranks that replace GPUs")
    if not gpus:
        raise ConfigError(
            f"{command}: no GPU was found; CPU ranks replace GPUs with --gpus=1 --override=device=cpu and a --scale "
            "that they can carry"
        )
    if not cpu and max(gpus) > len(names):
        raise ConfigError(f"{command}: {len(names)} GPUs are here, too few for --gpus={','.join(map(str, gpus))}")
    return names, gpus


def make_folder(command: str, path: Path) -> None:
    """Make the folder for the results.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{command}: --output={path} cannot be made: {error.strerror}") from error
