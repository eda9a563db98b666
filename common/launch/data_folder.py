"""Check before a run starts that ``data_dir`` holds the data of the recipe, without reading any sample."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from common.config.schema import CUSTOM, RunConfig, SessionConfig
from common.data import manifest
from common.data.sources import is_adopted
from common.data.staging import SHARDS
from common.errors import DataError


def refuse_custom(run: RunConfig, session: SessionConfig) -> None:
    """Refuse custom data in the closed division, before anything is built.

    A missing or wrong manifest is no error here; :func:`require_prepared` reports it.

    Raises:
        DataError: the division is closed, and the manifest marks the data as custom.
    """
    if run.declaration.data_format is None:
        return
    try:
        found = manifest.read_alone(session.data_dir, run.declaration.data_format, "")
    except DataError:
        return
    _refuse_custom(run, session, found.custom)


def require_prepared(run: RunConfig, session: SessionConfig) -> RunConfig:
    """Compare the manifest of ``data_dir`` with the recipe's format and sample counts, if the workload has a manifest.

    Manifests of text data count documents and tokens, so only their format and origin are compared.

    Returns:
        ``run``; its ``data_set`` becomes ``custom`` if the manifest marks the data as custom.

    Raises:
        DataError: the folder or its manifest is missing (the message has the commands that prepare the data), the
            folder holds the data of another recipe, or the division is closed and the data are custom.
    """
    if (session.data_dir / SHARDS).exists():
        raise DataError(
            f"data_dir={session.data_dir} has the part of a data set that a run has staged for one node; give the "
            "folder of the whole set"
        )
    if run.declaration.data_format is None:
        return run
    if _is_unprepared(run, session.data_dir):
        return run  # the reader counts the samples when it opens them
    found = manifest.read_alone(session.data_dir, run.declaration.data_format, _remedy(run, session))
    _refuse_custom(run, session, found.custom)
    train_samples = found.counts.get("train_samples", run.train_samples)
    if run.declaration.train_samples is not None:  # an epoch uses only some samples of the folder
        train_samples = min(train_samples, run.train_samples)
    eval_samples = found.counts.get("eval_samples", run.benchmark.eval_samples)
    require_samples(run, session.data_dir, train_samples, eval_samples, found.synthetic)
    return replace(run, benchmark=replace(run.benchmark, data_set=CUSTOM)) if found.custom else run


def require_samples(run: RunConfig, data_dir: Path, train_samples: int, eval_samples: int, synthetic: bool) -> None:
    """Compare the sample counts and the origin of the data in ``data_dir`` with the recipe.

    Args:
        synthetic: whether the data are synthetic.

    Raises:
        DataError: a number of samples differs, or only one of data and recipe is synthetic.
    """
    expected = run.benchmark
    if _is_unprepared(run, data_dir):
        synthetic = expected.synthetic  # the folder has no manifest that states it
    if (train_samples, eval_samples, synthetic) != (run.train_samples, expected.eval_samples, expected.synthetic):
        raise DataError(
            f"{data_dir}: holds {train_samples} training and {eval_samples} evaluation samples"
            f"{' of synthetic data' if synthetic else ''}, but the recipe is for {run.train_samples} and "
            f"{expected.eval_samples} of {expected.data_set} data; give the data_dir that belongs to this recipe"
        )


def _is_unprepared(run: RunConfig, data_dir: Path) -> bool:
    """Return whether another tool wrote ``data_dir`` and training reads its format directly."""
    reads = run.declaration.reads_unprepared
    return reads is not None and reads(data_dir)


def _refuse_custom(run: RunConfig, session: SessionConfig, custom: str) -> None:
    if custom and session.submission.division == "closed" and not run.benchmark.synthetic:
        raise DataError(
            f"{session.data_dir}: {custom}: these are not the data of {run.benchmark.name}, which the closed division "
            f"needs; train in the open one with submission.division=open, or {_remedy(run, session)}"
        )


def _remedy(run: RunConfig, session: SessionConfig) -> str:
    return f"give another data_dir, or make it: {_commands(run, session)}"


def _commands(run: RunConfig, session: SessionConfig) -> str:
    """Return the commands that make the recipe's data, from synthetic raw data if the recipe is for those."""
    name, folder = f"benchmark={run.benchmark.name}", session.data_dir
    if (folder / manifest.NAME).exists():  # keep the other data, and use a new folder next to it
        whole = folder.absolute()
        folder = whole.parent / f"{whole.name}-{run.benchmark.name}"
    scale = run.recipe.rpartition("/")[2]
    first, raw_folder = f"download {name}", f"{folder}-raw"
    if session.synthetic and run.benchmark.synthetic:
        first = f"generate {name} scale={scale}"
        # `generate` refuses the default folder of the real raw data.
        raw_folder = f"{folder}-{scale}-raw" if folder.name == run.benchmark.name else raw_folder
    raw = shlex.quote(raw_folder)
    source = "--adopt" if is_adopted(run.benchmark.name) and not session.synthetic else "--raw-dir"
    return (
        f"mlperf-suite {first} --raw-dir {raw} && "
        f"mlperf-suite prepare {name} {source} {raw} --data-dir {shlex.quote(str(folder))}"
    )
