"""Whether ``data_dir`` holds data of the benchmark at all, asked before a run is opened; no sample is looked at."""

from __future__ import annotations

import shlex
from pathlib import Path

from common.config.schema import RunConfig, SessionConfig
from common.data import manifest


def require_prepared(run: RunConfig, session: SessionConfig) -> None:
    """Look whether the folder is there and its manifest is of the format that the workload reads, if it reads one.

    Raises:
        DataError: it is not; the message has the commands that make the data.
    """
    if run.declaration.data_format is not None:
        remedy = f"give another data_dir, or make it: {_commands(run, session)}"
        manifest.require_format(session.data_dir, run.declaration.data_format, remedy)


def _commands(run: RunConfig, session: SessionConfig) -> str:
    """What makes the recipe's data, from a stand-in where the recipe is for one; beside a folder that holds others."""
    name, folder = f"benchmark={run.benchmark.name}", session.data_dir
    if (folder / manifest.NAME).exists():
        whole = folder.absolute()
        folder = whole.parent / f"{whole.name}-{run.benchmark.name}"
    scale = Path(run.config_file).stem  # a recipe is called by its scale
    first, raw_folder = f"download {name}", f"{folder}-raw"
    if session.stand_in:
        first = f"generate {name} scale={scale}"
        # `generate` refuses the default folder of the real raw data.
        raw_folder = f"{folder}-{scale}-raw" if folder.name == run.benchmark.name else raw_folder
    raw = f"--raw-dir {shlex.quote(raw_folder)}"
    return f"mlperf-suite {first} {raw} && mlperf-suite prepare {name} {raw} --data-dir {shlex.quote(str(folder))}"
