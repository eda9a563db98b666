"""``mlperf-suite`` on two ranks, of which rank 1 skips the all-reduce of one step's report. Argument 1 is the step."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common import cli
from common.distributed.launcher import relaunch
from common.step import train_step
from common.step.graphs import WARM_UP_ITERATIONS
from tests import toy

_real = train_step.dist


class _Skipping:
    """``torch.distributed`` for :mod:`common.step.train_step`, whose only collective is the report's."""

    def __init__(self, left_out: int) -> None:
        self.left_out = left_out
        self.reports = 0

    def __getattr__(self, name: str) -> Any:
        if name == "all_reduce":
            self.reports += 1
            if os.environ["RANK"] == "1" and self.reports == WARM_UP_ITERATIONS + self.left_out:
                return _leave_out
        return getattr(_real, name)


class _Done:
    """Finished work, as an asynchronous collective returns it."""

    def wait(self) -> bool:
        """Return at once."""
        return True


def _leave_out(tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> _Done:
    """Replace the all-reduce on rank 1; sends and receives nothing."""
    return _Done()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        command = (sys.executable, "-m", "tests.skip_a_collective", sys.argv[1])
        sys.exit(relaunch(2, sys.argv[2:], command=command))
    toy.register()
    train_step.dist = _Skipping(int(sys.argv.pop(1)))
    cli.main()
