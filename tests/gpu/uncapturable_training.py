"""``mlperf-suite`` whose ResNet-50 reads its loss on the host, which cannot be captured."""

from __future__ import annotations

from benchmarks.resnet.workload import ResNet
from common import cli
from common.data.batches import Batch
from common.step.train_step import Losses

_loss = ResNet.loss


def loss_read_on_the_host(workload: ResNet, micro_batch: Batch) -> Losses:
    """Return the loss after waiting for its value."""
    losses = _loss(workload, micro_batch)
    losses.total.item()
    return losses


if __name__ == "__main__":
    ResNet.loss = loss_read_on_the_host  # type: ignore[method-assign]
    cli.main()
