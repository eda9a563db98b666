"""A trunk's weights out of a file of torchvision's: a state dict, such as ``resnext50_32x4d-7cdf4587.pth``."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from torch import Tensor

from common.errors import CheckpointError
from common.nn.resnet import IMAGE_CHANNELS, ResNetTrunk
from common.untrusted.tensor_file import read_state


def load_backbone(path: Path, trunk: ResNetTrunk) -> None:
    """Give ``trunk`` the weights, and the batch norms' statistics, of a file.

    The file's classifier (``fc``), counters of batches, and stages that the trunk ends before are left out. Values are
    converted to the dtypes of the trunk. A name such as ``resnet34-333f7ec4.pth`` says how the SHA-256 begins.

    Raises:
        CheckpointError: the file is missing, unreadable, not what its name says, or of another architecture; the
            message names a tensor.
    """
    state = {name: tensor for name, tensor in _read(path).items() if not _left_out(name, len(trunk.shape.layers))}
    own = trunk.state_dict()
    if missing := [name for name in own if name not in state]:
        raise CheckpointError(
            f"{path}: tensor {missing[0]} is missing, with {len(missing) - 1} others: a backbone of another "
            f"architecture than {_describe(trunk)}"
        )
    for name, tensor in state.items():
        if name not in own:
            raise CheckpointError(
                f"{path}: the network has no tensor {name}: a backbone of another architecture than {_describe(trunk)}"
            )
        _check(path, name, tensor, own[name], trunk)
    trunk.load_state_dict(state)


def _check_digest(path: Path) -> None:
    """Refuse a file whose SHA-256 does not begin as its name, if that is one of torchvision's, says."""
    named = re.search(r"-([0-9a-f]{8,64})$", path.stem)
    if named is None:
        return
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.startswith(named[1]):
        raise CheckpointError(
            f"{path}: its SHA-256 is {found}, but by its name begins with {named[1]}: damaged, or other weights; fetch "
            "it again"
        )


def _left_out(name: str, stages: int) -> bool:
    if name.startswith("fc.") or name.endswith(".num_batches_tracked"):
        return True
    stage = re.match(r"layer(\d+)\.", name)
    return stage is not None and int(stage[1]) > stages


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such backbone file; `download` or `generate` makes one")
    if path.is_file():
        _check_digest(path)
    return read_state(path)


def _check(path: Path, name: str, tensor: Tensor, own: Tensor, trunk: ResNetTrunk) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{path}: {name} is {tensor.dtype}, and weights are floating-point tensors")
    expected = tuple(own.shape)
    if name == "conv1.weight":  # the trunk pads it
        expected = (expected[0], IMAGE_CHANNELS, *expected[2:])
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{path}: tensor {name} is {tuple(tensor.shape)}, the network has {expected}: a backbone of another "
            f"architecture than {_describe(trunk)}"
        )
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{path}: tensor {name} has {count} of {tensor.numel()} values that are not finite: no run starts from it"
        )


def _describe(trunk: ResNetTrunk) -> str:
    shape = trunk.shape
    blocks = "bottleneck" if shape.bottleneck else "basic"
    return f"the {blocks} blocks {shape.layers} of width {shape.width} and {shape.groups} groups that are configured"
