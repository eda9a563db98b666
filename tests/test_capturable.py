"""Test that ``Capturable`` refuses the operations that a CUDA graph cannot capture, and no others."""

import pytest
import torch

from tests.capturable import Capturable

VALUES = torch.arange(6.0)
MASK = VALUES > 2


@pytest.mark.parametrize(
    "computation",
    [
        lambda: VALUES.sum().item(),
        lambda: bool(MASK.any()),
        lambda: VALUES[MASK],
        lambda: VALUES.clone().index_put_((MASK,), torch.zeros(())),
        lambda: MASK.nonzero(),
        lambda: VALUES.long().bincount(),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: VALUES.new_tensor([1.0]),
    ],
    ids=["item", "bool", "mask read", "mask written", "nonzero", "bincount", "tensor", "new_tensor"],
)
def test_a_wait_or_a_copy_from_the_host_is_an_error(computation):
    with pytest.raises(AssertionError), Capturable():
        computation()


def test_computations_on_the_device_pass_and_give_what_they_give():
    with Capturable():
        found = torch.where(MASK, VALUES, 0.0)[torch.arange(6).flip(0)] + torch.full((6,), 1.0)
    assert found.tolist() == [6.0, 5.0, 4.0, 1.0, 1.0, 1.0]
