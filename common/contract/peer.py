"""Other training software to compare a workload with; ``bench.only=peer`` times it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config.schema import RunConfig
from common.data.batches import Batch


@dataclass(frozen=True)
class Peer:
    """The same training in other software, at the recipe's batch size on one device.

    The module named in ``Workload.peers`` defines ``PEERS``, a sequence of peers. It may import packages that the suite
    does not depend on, but only inside ``start``.

    Attributes:
        name: the software and its settings.
        start: builds the training for a recipe, a micro-batch of the workload and a device. It returns a function that
            runs one iteration over ``run.micro_batch`` samples.
    """

    name: str
    start: Callable[[RunConfig, Batch, torch.device], Callable[[], object]]
