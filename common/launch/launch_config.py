"""The ``launch`` section of the configuration: how a series of experiments is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from common.config.loading import build
from common.config.ranges import AtLeast
from common.errors import ConfigError

Container = Literal["none", "pyxis", "apptainer", "docker"]


@dataclass(frozen=True)
class Hooks:
    """Site-specific shell commands, run on the driver's machine; if one before a job or run fails, the job ends."""

    pre_job: tuple[str, ...] = ()
    pre_run: tuple[str, ...] = ()
    post_run: tuple[str, ...] = ()
    post_job: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchConfig:
    """Options for launching a series of experiments.

    Attributes:
        experiments: number of runs in the series; ``runs.jsonl`` declares it before the first run.
        instances: number of instances of a throughput run. They train at the same time, each on the scale's nodes.
        results: folder for logs; created if missing.
        image: container image: a registry reference, or a file for pyxis and apptainer.
        mounts: additional mounts, ``HOST:CONTAINER[:ro]``. Source, data and results are always mounted at their paths.
        environment: names of additional variables to pass into a docker container.
        clear_caches: drop the page cache of every node before each run.
        drop_caches: command that drops the page cache; it must not ask for a password.
        doctor: check all nodes with `doctor` before the first run.
        run_minutes: time limit of one run; None leaves only the job's limit.
        requeue: requeue the job after an interruption; it continues with the next experiment.
        series: name of the series to continue; None starts a new one, or continues that of the requeued job.
    """

    experiments: Annotated[int, AtLeast(1, "a series has at least one")]
    instances: Annotated[int, AtLeast(1)]
    results: Path
    container: Container
    image: str | None
    mounts: tuple[str, ...]
    environment: tuple[str, ...]
    clear_caches: bool
    drop_caches: str
    doctor: bool
    run_minutes: Annotated[int, AtLeast(1)] | None
    requeue: bool
    series: str | None
    hooks: Hooks

    def __post_init__(self) -> None:
        if self.container != "none" and not self.image:
            raise ConfigError(f"container={self.container} needs launch.image, the image to run")
        if self.experiments > 1 and self.instances > 1:
            raise ConfigError(
                f"experiments={self.experiments} with launch.instances={self.instances}: experiments run one after the "
                "other, and instances at the same time: leave one of the two out"
            )
        if self.clear_caches and not self.drop_caches.strip():
            raise ConfigError("drop_caches is empty: name the command, or give launch.clear_caches=false")
        for mount in self.mounts:
            paths = mount.removesuffix(":ro").split(":")
            if len(paths) != 2 or not all(path.startswith("/") for path in paths) or "\n" in mount:
                raise ConfigError(
                    f"mounts: {mount!r} is not HOST:CONTAINER or HOST:CONTAINER:ro in one line, with absolute paths"
                )

    @classmethod
    def load(cls, tree: Mapping[str, Any]) -> LaunchConfig:
        """Build the options from the composed configuration.

        Raises:
            ConfigError: a key is unknown, a type is wrong, or settings contradict each other.
        """
        section = tree.get("launch")
        if isinstance(section, Mapping) and section.get("clear_caches") in (0, 1):  # CLEAR_CACHES=1, as DGX users write
            section = {**section, "clear_caches": bool(section["clear_caches"])}
        settings: LaunchConfig = build(cls, section, "launch")
        return settings
