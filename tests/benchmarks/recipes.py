"""Configurations and workloads of recipes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.contract.workload import Workload
from common.distributed.layout import Layout

Built = TypeVar("Built", bound=Workload)


def recipes_of(
    benchmark: str, workload: type[Built]
) -> tuple[Callable[..., tuple[RunConfig, SessionConfig]], Callable[..., Built]]:
    """Return ``loaded`` and ``built``.

    ``loaded(*overrides)`` loads a configuration. ``built(*overrides, seed=3)`` returns the workload of the ``test``
    recipe on one rank.
    """

    def loaded(*overrides: str) -> tuple[RunConfig, SessionConfig]:
        return cli.load(compose([f"benchmark={benchmark}", "device=cpu", *overrides]))

    def built(*overrides: str, seed: int = 3) -> Built:
        run, _ = loaded("scale=test", *overrides)
        return workload(run, Layout(run.layout, seed=seed))

    return loaded, built
