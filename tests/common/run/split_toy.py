"""``mlperf-suite`` whose toy has its hidden layer split over ``tp``; :mod:`tests.launch` starts its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import WORKLOADS
from common import cli
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.distributed.tensor_split import TensorSplit
from common.optim.optimizer import ParameterGroup
from tests import toy
from tests.toy.workload import Toy


class SumOverRanks(torch.autograd.Function):
    """Sum of a layer's partial results over its ranks. The gradient is the same on all ranks."""

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
    """The toy's network, whose hidden units are split over the ranks."""

    def __init__(self, whole: nn.Module, splits: Mapping[str, TensorSplit], group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.hidden, self.output, self.group = whole.hidden, whole.output, group
        for name, split in splits.items():
            layer, _, kind = name.partition(".")
            setattr(getattr(self, layer), kind, nn.Parameter(split.local_of(self.get_parameter(name).detach())))

    def forward(self, volume_BV: Tensor) -> Tensor:
        units = nn.functional.leaky_relu(self.hidden(volume_BV), 0.3)
        return SumOverRanks.apply(units @ self.output.weight.T, self.group) + self.output.bias


class SplitToy(Toy):
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
    toy.register()
    WORKLOADS[toy.NAME] = "tests.common.run.split_toy:SplitToy"
    cli.main()
