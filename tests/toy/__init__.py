"""A workload with steps of a millisecond: the example of docs/adding_a_benchmark.md, used by tests of ``common``.

It has the name of CosmoFlow, a benchmark of MLPerf HPC that the suite does not train, because the rules accept only
names of benchmarks. Its task is similar: estimate four numbers from a volume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.config.workload_files import WorkloadFiles
from common.contract.workload import Workload
from common.distributed.rank_info import RankInfo
from common.run.trainer import Trainer

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
"""The only rank of a job, without a launcher."""

NAME = "cosmoflow"
WORKLOAD = "tests.toy.workload:CosmoFlow"

PICTURES = "toy_pictures"
"""Value of ``benchmark`` for the example that is scored offline by two metrics; the rules have another name for it."""
PICTURES_NAME = "stable_diffusion"
PICTURES_WORKLOAD = "tests.toy.pictures:Pictures"


def register(pictures: bool = True) -> None:
    """Register the workload in this process, as a line in ``WORKLOADS`` and files in ``configs/`` would.

    ``pictures`` also replaces the suite's workload ``PICTURES_NAME`` by the example that is scored offline.
    """
    WORKLOADS[NAME] = WORKLOAD
    if pictures:
        WORKLOADS[PICTURES_NAME] = PICTURES_WORKLOAD
    source = WorkloadFiles("tests.toy", f"file://{Path(__file__).parent / 'configs'}")
    for group in ("benchmark", *(f"{kind}/{name}" for kind in ("hparams", "recipe") for name in (NAME, PICTURES))):
        for name in source.list(group, ObjectType.CONFIG):
            found = source.load_config(f"{group}/{name}")
            ConfigStore.instance().store(name, found.config, group, found.header["package"], provider=source.provider)


@contextlib.contextmanager
def known(pictures: bool = True) -> Iterator[None]:
    """Register the workload in this process within the context; ``pictures`` is that of :func:`register`."""
    before = dict(WORKLOADS)
    register(pictures)
    try:
        yield
    finally:
        WORKLOADS.clear()
        WORKLOADS.update(before)


def trainer(arguments: Sequence[str], workload: type[Workload]) -> Trainer:
    """The trainer of a run in this process alone, on the CPU; ``arguments`` are overrides."""
    tree = compose(arguments)
    run, session = cli.load(tree)
    return Trainer(workload, run, session, ALONE, torch.device("cpu"), tree=tree)


def entry(arguments: Sequence[str]) -> str:
    """Return the module whose command line has the workload in ``arguments``."""
    toys = {f"benchmark={name}" for name in (NAME, PICTURES)}
    return "tests.toy" if toys & set(arguments) else "common.cli"
