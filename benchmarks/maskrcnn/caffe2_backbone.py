"""Trunk weights under Caffe2's names: ``R-50.pkl``, from which Mask R-CNN starts according to the rules.

The file is a pickle of numpy arrays by name, at the top or in the entry ``blobs`` of a dict. Stage s of the trunk is
``res{s + 1}``, the three convolutions of a block are ``branch2a`` to ``branch2c``, and that of the shortcut is
``branch1``. Batch norms have only scale and shift, which include the statistics.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.data.atomic import written
from common.nn.backbone_file import give_weights, require_backbone
from common.nn.resnet import ResNetTrunk
from common.untrusted.pickled_arrays import load_arrays
from common.untrusted.regular_file import open_regular

BACKBONE = "R-50.pkl"
"""File name in the rules."""
BLOBS = "blobs"
"""Entry of a dict that has the arrays, if they are not at the top."""

LEFT_OUT = ("conv1_b", "fc1000_w", "fc1000_b", "pred_w", "pred_b")
"""Ignored tensors of published files: a bias of the first convolution (0 up to rounding) and the classifier."""

_PROTOCOL = 2
"""Pickle protocol, the newest one in Caffe2's time."""

_NORM_PARTS = {"weight": "s", "bias": "b"}
_STATISTICS = {"running_mean": 0.0, "running_var": 1.0}


def load_backbone(path: Path, trunk: ResNetTrunk) -> None:
    """Load the weights of a file into ``trunk``. Code in the pickle is never executed.

    Args:
        trunk: bottleneck blocks with the stride in the first 1x1 convolution and frozen batch norms without epsilon,
            as in the training of the file. Values are converted to its dtypes.

    Raises:
        CheckpointError: the file is missing, or of another architecture; the message names a tensor.
        DataError: the file cannot be read, is damaged, or has objects other than arrays.
    """
    require_backbone(path)
    with open_regular(path) as file:
        arrays = load_arrays(file.read(), str(path), inside=BLOBS)
    own = trunk.state_dict()
    names = _caffe2_names(own)
    trunk_names = {theirs: name for name, theirs in names.items()}
    state = {
        trunk_names.get(name, name): torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        for name, values in arrays.items()
        if name not in LEFT_OUT
    }
    for name, tensor in own.items():
        if name not in names:
            state[name] = torch.full_like(tensor, _STATISTICS[name.rpartition(".")[2]])
    give_weights(path, trunk, state, names)


def write_backbone(path: Path, state: Mapping[str, Tensor], epsilon: float) -> None:
    """Write the weights of a trunk. Scale and shift of batch norms then include their statistics.

    Args:
        path: file, which is replaced atomically.
        state: state of a trunk of bottleneck blocks, under torchvision's names.
        epsilon: number that its batch norms add to the variance.
    """
    blobs: dict[str, np.ndarray] = {}
    for name, theirs in _caffe2_names(state).items():
        owner, _, part = name.rpartition(".")
        value = state[name].double()
        if f"{owner}.running_var" in state:
            scale_C = state[f"{owner}.weight"].double() / (state[f"{owner}.running_var"].double() + epsilon).sqrt()
            value = scale_C if part == "weight" else value - state[f"{owner}.running_mean"].double() * scale_C
        blobs[theirs] = value.float().contiguous().numpy()
    with written(path) as temporary, open(temporary, "wb") as file:
        pickle.dump({BLOBS: blobs}, file, protocol=_PROTOCOL)


def _caffe2_names(names: Iterable[str]) -> dict[str, str]:
    """Map torchvision's names to Caffe2's for all weights of convolutions and norms, without statistics."""
    found = {}
    for name in names:
        owner, _, part = name.rpartition(".")
        if part not in _NORM_PARTS:
            continue
        if owner in ("conv1", "bn1"):
            found[name] = "conv1_w" if owner == "conv1" else f"res_conv1_bn_{_NORM_PARTS[part]}"
        elif block := re.fullmatch(r"layer(\d+)\.(\d+)\.(conv|bn|downsample\.)(\d)", owner):
            stage, index, kind, number = block.groups()
            shortcut = kind == "downsample."
            branch = "branch1" if shortcut else f"branch2{'abc'[int(number) - 1]}"
            is_norm = kind == "bn" or (shortcut and number == "1")
            suffix = f"bn_{_NORM_PARTS[part]}" if is_norm else "w"
            found[name] = f"res{int(stage) + 1}_{index}_{branch}_{suffix}"
    return found
