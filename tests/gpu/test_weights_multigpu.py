"""Test the transfer of weights from training GPUs to evaluation GPUs, while training already changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.common.distributed.test_weights import published_weights_arrive

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize(("training_ranks", "evaluation_ranks", "senders"), [(1, 1, 1), (2, 2, 2)])
def test_every_evaluation_gpu_receives_the_published_weights(
    training_ranks: int, evaluation_ranks: int, senders: int, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < training_ranks + evaluation_ranks:
        pytest.skip(f"needs {training_ranks + evaluation_ranks} CUDA devices")
    published_weights_arrive(training_ranks, evaluation_ranks, senders, tmp_path, "cuda")
