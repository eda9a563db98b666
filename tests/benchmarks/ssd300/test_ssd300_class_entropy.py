"""The reference of the class entropies against PyTorch's cross-entropy of rows that are gathered one by one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.ssd300.ops.class_entropy.reference import class_entropy_reference
from benchmarks.ssd300.ops.head_results import HeadChannels


def test_entropies_and_offsets_are_those_of_each_default_box():
    random = torch.Generator().manual_seed(0)
    channels = [HeadChannels(2, 5), HeadChannels(3, 5)]
    results = [
        torch.randn((2, head.logits + head.offsets + 3, side, side), generator=random, dtype=torch.float64)
        for head, side in zip(channels, (2, 1), strict=True)
    ]
    classes = torch.randint(5, (2, 2 * 4 + 3), generator=random)
    entropy, offsets = class_entropy_reference(channels, results, classes)
    for picture in range(2):
        box = 0
        for head, result in zip(channels, results, strict=True):
            for row in range(result.shape[2]):
                for column in range(result.shape[3]):
                    cell = result[picture, :, row, column]
                    for kind in range(head.kinds):
                        logits = cell[kind * 5 : (kind + 1) * 5]
                        expected = F.cross_entropy(logits[None], classes[picture, box, None])
                        torch.testing.assert_close(entropy[picture, box], expected)
                        first = head.kinds * 5 + kind * 4
                        assert torch.equal(offsets[picture, box], cell[first : first + 4])
                        box += 1


def test_half_precision_is_computed_in_fp32():
    results = [torch.randn((2, 4 * 84, 3, 3), generator=torch.Generator().manual_seed(0)).half()]
    classes = torch.zeros((2, 36), dtype=torch.int64)
    found, offsets = class_entropy_reference([HeadChannels(4, 80)], results, classes)
    expected, _ = class_entropy_reference([HeadChannels(4, 80)], [results[0].double()], classes)
    assert (found.dtype, offsets.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
