"""Format of a sample in a prepared file: a row of 4-byte words, little-endian, without a header.

Word 0 is the label (int32), words 1 to 13 are the dense features, then come the ids (int32) of all tables in their
order, ``hotness`` ids for each. B samples, L ids of a sample, D dense features, W words of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DENSE = 13
"""Dense features of a sample."""
CATEGORICAL = 26
"""Categorical features of a sample, each with a table."""
DAYS = 24
"""Days of the log; all but the last are for training."""
WORD = 4
"""Bytes of a word."""
IDS = 1 + DENSE
"""Index of the first word with an id."""


@dataclass(frozen=True)
class SampleFormat:
    """Properties that differ between the prepared formats.

    Attributes:
        name: name with version, as in the manifest.
        logarithms: dense features are float32 logarithms, ready to use; otherwise int32 counts, not negative, of
            which :meth:`decode` computes ln(x + 1).
        train_file, eval_file: names of the two files.
        command: command that prepares the data, for messages.
        checksums: file name to published MD5; empty if none are published.
    """

    name: str
    logarithms: bool
    train_file: str
    eval_file: str
    command: str
    checksums: Mapping[str, str] = field(default_factory=dict)

    def decode(self, words_BW: Tensor) -> dict[str, Tensor]:
        """Split rows into tensors, on their device and in new memory.

        Args:
            words_BW: int32, rows as in the file.

        Returns:
            ``label`` (B,) float32, ``dense`` (B, D) float32, ``ids`` (B, L) int32.
        """
        words_BD = words_BW[:, 1:IDS]
        dense_BD = words_BD.view(torch.float32) if self.logarithms else torch.log1p(words_BD.float())
        return {
            "label": words_BW[:, 0].float(),
            "dense": dense_BD.clone(memory_format=torch.contiguous_format),
            "ids": words_BW[:, IDS:].clone(memory_format=torch.contiguous_format),
        }

    def fault_of(self, words_ND: NDArray[np.int32]) -> str:
        """Return what is wrong with dense features, given as words of rows in the file; an empty text if nothing."""
        if self.logarithms:
            return "" if np.isfinite(words_ND.view(np.float32)).all() else "that are not finite"
        return "below 0" if words_ND.min(initial=0) < 0 else ""
