"""Whether ``data_dir`` holds data of the benchmark at all, asked before a run is opened; no sample is looked at."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from common.config.schema import RunConfig, SessionConfig
from common.data import manifest
from common.errors import DataError


def require_prepared(run: RunConfig, session: SessionConfig) -> None:
    """Look whether the folder is there and its manifest is of the format that the workload reads, if it reads one.

    Raises:
        DataError: it is not; the message has the commands that make the data.
    """
    folder, expected = session.data_dir, run.declaration.data_format
    if expected is None:
        return
    if not os.path.isdir(folder):  # False, too, where one may not look
        raise DataError(f"data_dir={folder} does not exist; make it: {_commands(run, session, folder)}")
    path = folder / manifest.NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["format"]
    except FileNotFoundError as error:
        raise DataError(
            f"data_dir={folder} holds no completely prepared data, {path} is missing; "
            f"make them: {_commands(run, session, folder)}"
        ) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(
            f"data_dir={folder}: {path} cannot be read ({type(error).__name__}: {error}); delete it and make the data "
            f"again: {_commands(run, session, folder)}"
        ) from error
    if found != expected:
        whole = folder.absolute()
        other = whole.parent / f"{whole.name}-{run.benchmark.name}"
        raise DataError(
            f"data_dir={folder} was prepared for another benchmark: its format is {found}, {run.benchmark.name} reads "
            f"{expected}; give data_dir another folder, made by: {_commands(run, session, other)}"
        )


def _commands(run: RunConfig, session: SessionConfig, folder: Path) -> str:
    """What makes the recipe's data in ``folder``: from a stand-in where the recipe is for one."""
    name, raw = f"benchmark={run.benchmark.name}", f"--raw-dir {shlex.quote(f'{folder}-raw')}"
    # A recipe is called by its scale.
    first = f"generate {name} scale={Path(run.config_file).stem}" if session.stand_in else f"download {name}"
    return f"mlperf-suite {first} {raw} && mlperf-suite prepare {name} {raw} --data-dir {shlex.quote(str(folder))}"
