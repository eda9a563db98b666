"""Files of pretrained ResNet weights, such as torchvision's ``resnext50_32x4d-7cdf4587.pth``.

For synthetic data, the weights are random, with batch norm statistics that fit the synthetic images.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.data.atomic import written
from common.errors import CheckpointError
from common.nn.resnet import IMAGE_CHANNELS, ResNetShape, ResNetTrunk, draw_weights
from common.untrusted.tensor_file import read_state


def load_backbone(path: Path, trunk: ResNetTrunk) -> None:
    """Load the weights and batch norm statistics of ``trunk`` from a file.

    The classifier (``fc``), ``num_batches_tracked`` and the stages that the trunk does not have are ignored. Values
    are converted to the dtypes of the trunk. If the file name ends like ``resnet34-333f7ec4.pth``, the SHA-256 must
    begin with these digits.

    Raises:
        CheckpointError: the file is missing, unreadable or damaged, or belongs to another architecture. The message
            names the tensor.
    """
    require_backbone(path)
    _check_digest(path)
    state = {name: tensor for name, tensor in read_state(path).items() if not _left_out(name, len(trunk.shape.layers))}
    give_weights(path, trunk, state)


def require_backbone(path: Path) -> None:
    """Check that ``path`` exists.

    Raises:
        CheckpointError: it does not exist.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such backbone file; `download` or `generate` makes one")


def give_weights(
    path: Path, trunk: ResNetTrunk, state: Mapping[str, Tensor], names: Mapping[str, str] | None = None
) -> None:
    """Load ``state`` into ``trunk``, after a check of all tensors.

    Args:
        path: the file that ``state`` was read from, for messages.
        trunk: the values are converted to its dtypes.
        state: tensors by the names that the trunk uses.
        names: maps a name in the trunk to the name in the file where they differ, for messages.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or not floating-point and finite. The trunk
            is unchanged in this case.
    """
    own = trunk.state_dict()
    names = {name: name for name in [*own, *state]} | dict(names or {})
    if missing := [name for name in own if name not in state]:
        raise CheckpointError(
            f"{path}: tensor {names[missing[0]]} is missing, with {len(missing) - 1} others: a backbone of another "
            f"architecture than {_describe(trunk)}"
        )
    for name, tensor in state.items():
        if name not in own:
            raise CheckpointError(
                f"{path}: the network has no tensor {name}: a backbone of another architecture than {_describe(trunk)}"
            )
        _check(f"{path}: tensor {names[name]}", name, tensor, own[name], trunk)
    trunk.load_state_dict(state)


def _check_digest(path: Path) -> None:
    """Raise a CheckpointError if the file name contains a SHA-256 prefix that differs from the content's digest."""
    if not path.is_file():
        return
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


def _check(what: str, name: str, tensor: Tensor, own: Tensor, trunk: ResNetTrunk) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{what} is {tensor.dtype}, and weights are floating-point tensors")
    expected = tuple(own.shape)
    if name == "conv1.weight":  # the trunk pads its input channels when it loads the state
        expected = (expected[0], IMAGE_CHANNELS, *expected[2:])
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{what} is {tuple(tensor.shape)}, the network has {expected}: a backbone of another "
            f"architecture than {_describe(trunk)}"
        )
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{what} has {count} of {tensor.numel()} values that are not finite: no run starts from it"
        )


def _describe(trunk: ResNetTrunk) -> str:
    shape = trunk.shape
    blocks = "bottleneck" if shape.bottleneck else "basic"
    return f"the {blocks} blocks {shape.layers} of width {shape.width} and {shape.groups} groups that are configured"


def fitted_backbone(shape: ResNetShape, image_NCHW: Tensor, seed: int) -> dict[str, Tensor]:
    """Return a trunk's state dict with torchvision's names, without a classifier.

    The running statistics are those of ``image_NCHW``, so evaluation mode normalises these images as training does:
    every batch norm produces mean 0 and variance 1.

    Args:
        shape: shape with a trained norm of momentum 1, so that the running statistics are those of ``image_NCHW``
            alone.
        image_NCHW: normalised images.
    """
    trunk = ResNetTrunk(shape)
    draw_weights(trunk, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        trunk.train().features(image_NCHW)
    return {name: tensor.detach().contiguous() for name, tensor in trunk.state_dict().items()}


def write_backbone(path: Path, state: dict[str, Tensor]) -> None:
    """Write ``state`` in the format of torchvision's weight files."""
    with written(path) as beside:
        torch.save(state, beside)
