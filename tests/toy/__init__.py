"""A workload with steps of a millisecond: the example of docs/adding_a_benchmark.md, used by tests of ``common``.

The rules accept only benchmarks of MLCommons, so the workload is registered under the rules of CosmoFlow, and its logs
have the name of that benchmark. Its task is similar: estimate four numbers from a volume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType

from benchmarks import WORKLOADS
from common import cli
from common.config import yaml_files
from common.config.composition import compose
from common.config.workload_files import WorkloadFiles
from common.contract.workload import Workload
from common.distributed.rank_info import RankInfo
from common.mlperf.rules import BENCHMARKS
from common.mlperf.schedules import SCHEDULES
from common.run.trainer import Trainer

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
"""The only rank of a job, without a launcher."""

NAME = "toy"
WORKLOAD = "tests.toy.workload:Toy"
RULES_OF = "cosmoflow"
"""Benchmark whose rules and evaluation schedule the workload has, and whose name its logs have."""

PICTURES = "toy_pictures"
"""Value of ``benchmark`` for the example that is scored offline by two metrics; the rules have another name for it."""
PICTURES_NAME = "stable_diffusion"
PICTURES_WORKLOAD = "tests.toy.pictures:Pictures"


def register(pictures: bool = True) -> None:
    """Register the workload in this process, as lines in the tables and files in ``configs/`` would.

    ``pictures`` also replaces the suite's workload ``PICTURES_NAME`` by the example that is scored offline.
    """
    WORKLOADS[NAME] = WORKLOAD
    folder = Path(__file__).parent / "configs"
    yaml_files.FOLDERS.append(folder)
    BENCHMARKS[NAME], SCHEDULES[NAME] = BENCHMARKS[RULES_OF], SCHEDULES[RULES_OF]
    if pictures:
        WORKLOADS[PICTURES_NAME] = PICTURES_WORKLOAD
    source = WorkloadFiles("tests.toy", f"file://{folder}")
    for group in ("benchmark", *(f"{kind}/{name}" for kind in ("hparams", "recipe") for name in (NAME, PICTURES))):
        for name in source.list(group, ObjectType.CONFIG):
            found = source.load_config(f"{group}/{name}")
            ConfigStore.instance().store(name, found.config, group, found.header["package"], provider=source.provider)


@contextlib.contextmanager
def known(pictures: bool = True) -> Iterator[None]:
    """Register the workload in this process within the context; ``pictures`` is that of :func:`register`."""
    folders = mock.patch.object(yaml_files, "FOLDERS", [*yaml_files.FOLDERS])
    with folders, mock.patch.dict(WORKLOADS), mock.patch.dict(BENCHMARKS), mock.patch.dict(SCHEDULES):
        register(pictures)
        yield


def trainer(arguments: Sequence[str], workload: type[Workload]) -> Trainer:
    """The trainer of a run in this process alone, on the CPU; ``arguments`` are overrides."""
    tree = compose(arguments)
    run, session = cli.load(tree)
    return Trainer(workload, run, session, ALONE, torch.device("cpu"), tree=tree)


def entry(arguments: Sequence[str]) -> str:
    """Return the module whose command line has the workload in ``arguments``."""
    toys = {f"benchmark={name}" for name in (NAME, PICTURES)}
    return "tests.toy" if toys & set(arguments) else "common.cli"
