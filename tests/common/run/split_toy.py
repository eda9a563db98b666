"""``mlperf-suite`` whose toy has its hidden layer split over ``tp``: argument 1 is the number of ranks to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import WORKLOADS
from common import cli
from common.config.schema import RunConfig
from common.distributed.launcher import relaunch
from common.distributed.layout import Layout
from common.distributed.tensor_split import TensorSplit
from common.optim.optimizer import ParameterGroup
from tests import toy
from tests.toy.workload import CosmoFlow


class SumOverRanks(torch.autograd.Function):
    """What all ranks of a layer compute, from what each of them adds."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        whole = part.clone()
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SplitRegression(nn.Module):
    """The toy's network, of whose hidden layer a rank has some units."""

    def __init__(self, whole: nn.Module, splits: Mapping[str, TensorSplit], group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.hidden, self.output, self.group = whole.hidden, whole.output, group
        for name, split in splits.items():
            layer, _, kind = name.partition(".")
            setattr(getattr(self, layer), kind, nn.Parameter(split.local_of(self.get_parameter(name).detach())))

    def forward(self, volume_BV: Tensor) -> Tensor:
        units = nn.functional.leaky_relu(self.hidden(volume_BV), 0.3)
        return SumOverRanks.apply(units @ self.output.weight.T, self.group) + self.output.bias


class SplitToy(CosmoFlow):
    """The toy on ranks that share a layer."""

    axes: ClassVar[Mapping[str, str]] = {"dp": "are data-parallel", "tp": "share a layer"}

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.model = SplitRegression(self.model, self.tensor_splits(), layout.group("tp"))

    def parameter_groups(self) -> list[ParameterGroup]:
        named = dict(self.model.named_parameters())
        bias = {"output.bias": named.pop("output.bias")}
        return [ParameterGroup(named), ParameterGroup(bias, replicated_over=("tp",))]

    def tensor_splits(self) -> dict[str, TensorSplit]:
        width, voxels, parameters = self.own.model.width, self.own.facts.size**3, self.own.facts.parameters
        return {
            "hidden.weight": TensorSplit.over_tp(self.layout, (width, voxels)),
            "hidden.bias": TensorSplit.over_tp(self.layout, (width,)),
            "output.weight": TensorSplit.over_tp(self.layout, (parameters, width), 1),
        }


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(relaunch(int(sys.argv[1]), sys.argv[2:], command=(sys.executable, "-m", "tests.common.run.split_toy")))
    toy.register()
    WORKLOADS[toy.NAME] = "tests.common.run.split_toy:SplitToy"
    cli.main()
