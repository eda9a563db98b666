"""What users would train with instead of a workload, to be timed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config.schema import RunConfig
from common.data.batches import Batch


@dataclass(frozen=True)
class Peer:
    """The same training with other software, at the recipe's batch on one device.

    A workload's module ``peer`` has its ``PEERS``. It may import packages that the suite does not depend on, inside
    ``start``.

    Attributes:
        name: software and settings.
        start: builds it for (the recipe, a micro-batch of the workload, a device) and returns what runs an iteration
            over ``run.micro_batch`` samples.
    """

    name: str
    start: Callable[[RunConfig, Batch, torch.device], Callable[[], object]]
