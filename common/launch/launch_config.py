"""How a series of experiments is launched: the ``launch`` section of the configuration."""

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
    """Shell commands of the site, run on the machine of the driver. One that fails before a run ends the job."""

    pre_job: tuple[str, ...] = ()
    pre_run: tuple[str, ...] = ()
    post_run: tuple[str, ...] = ()
    post_job: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchConfig:
    """How experiments are launched.

    Attributes:
        experiments: runs of the series; declared in ``runs.jsonl`` before the first.
        results: folder of logs; made if missing.
        container: what runs the ranks.
        image: of the container: a registry's reference, or a file for pyxis and apptainer.
        mounts: further ``HOST:CONTAINER[:ro]`` besides source, data and results, which keep their paths.
        environment: names of further variables that enter a docker container.
        clear_caches: drop the page cache of every node before each run.
        drop_caches: command that does so; it must not ask for a password.
        doctor: qualify all nodes before the first run.
        run_minutes: limit of one run; None for the job's own.
        requeue: queue the job again after an interruption, to go on with the next experiment.
        series: go on with this series; None starts one, or finds the requeued job's own.
    """

    experiments: Annotated[int, AtLeast(1, "a series has at least one")]
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
        if self.clear_caches and not self.drop_caches.strip():
            raise ConfigError("drop_caches is empty: name the command, or give launch.clear_caches=false")
        for mount in self.mounts:
            if len(mount.split(":")) not in (2, 3) or not all(mount.split(":")) or "\n" in mount:
                raise ConfigError(f"mounts: {mount!r} is not HOST:CONTAINER or HOST:CONTAINER:ro in one line")

    @classmethod
    def load(cls, tree: Mapping[str, Any]) -> LaunchConfig:
        """Build it from the composed configuration.

        Raises:
            ConfigError: unknown key, wrong type, or settings that do not go together.
        """
        section = tree.get("launch")
        if isinstance(section, Mapping) and section.get("clear_caches") in (0, 1):  # CLEAR_CACHES=1, as DGX users write
            section = {**section, "clear_caches": bool(section["clear_caches"])}
        settings: LaunchConfig = build(cls, section, "launch")
        return settings
