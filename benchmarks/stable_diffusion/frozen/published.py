"""Reading and writing of the frozen networks in the formats of the published files.

=========================== ======================================================== =====================
file                        tensors that we use                                      tensors that we ignore
=========================== ======================================================== =====================
512-base-ema.ckpt           ``first_stage_model.*``, ``cond_stage_model.model.*``    the U-Net, schedules
open_clip_pytorch_model.bin the text tower without prefix, ``visual.*``              ``logit_scale``
pt_inception-2015-12-05.pth Inception without prefix                                 ``fc.*``, the classifier
=========================== ======================================================== =====================

Each may also be a safetensors file with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.vae import AutoencoderKL
from common.data.atomic import written
from common.errors import CheckpointError
from common.untrusted.tensor_file import STATE_DICT, read_state

VAE_PREFIX = "first_stage_model."
TEXT_PREFIX = "cond_stage_model.model."
VISION_PREFIX = "visual."
TEMPERATURE = "logit_scale"
"""Name of a scalar that only the training of CLIP uses."""
CLASSES = 1008
"""Number of classes of the published Inception's classifier."""
_COUNTER = "num_batches_tracked"
_START_TEMPERATURE = math.log(1 / 0.07)


def load_vae(path: Path, digest: str | None, network: AutoencoderKL) -> None:
    """Load the autoencoder from a checkpoint of Stable Diffusion; arguments and errors as in :func:`load_text`."""
    state = read_state(path, digest)
    _fill(path, state, VAE_PREFIX, network, "autoencoder", left_out=("loss.",))


def load_text(path: Path, digest: str | None, network: TextTower) -> None:
    """Load the text tower from a checkpoint of Stable Diffusion or a file of OpenCLIP.

    Args:
        digest: expected SHA-256 or SHA-1, in hexadecimal; None accepts any.
        network: network that receives the values, on any device; they are converted to its dtype.

    Raises:
        CheckpointError: the file is missing, damaged or malicious, has another digest, or contains other tensors than
            the network; the message names file and tensor.
    """
    state = read_state(path, digest)
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in state) else ""
    left_out = ("attn_mask", TEMPERATURE, *((VISION_PREFIX,) if not prefix else ()))
    _fill(path, state, prefix, network, "text tower", left_out)


def load_vision(path: Path, digest: str | None, network: VisionTower) -> None:
    """Load the vision tower from a file of OpenCLIP; arguments and errors as in :func:`load_text`."""
    _fill(path, read_state(path, digest), VISION_PREFIX, network, "vision tower", left_out=())


def load_inception(path: Path, digest: str | None, network: Inception) -> None:
    """Load FID's Inception; arguments and errors as in :func:`load_text`.

    The file's classifier of 1,008 classes (``fc``) is ignored, because the features come before it.
    """
    _fill(path, read_state(path, digest), "", network, "Inception network", left_out=("fc.",))


def save_stable_diffusion(path: Path, vae: AutoencoderKL, text: TextTower) -> None:
    """Write both networks as a checkpoint of Stable Diffusion without a U-Net."""
    state = _named(VAE_PREFIX, vae) | _named(TEXT_PREFIX, text) | {TEXT_PREFIX + TEMPERATURE: _temperature()}
    _save(path, state, trainer=True)


def save_clip(path: Path, text: TextTower, vision: VisionTower) -> None:
    """Write both towers as a file of OpenCLIP."""
    _save(path, _named("", text) | _named(VISION_PREFIX, vision) | {TEMPERATURE: _temperature()})


def save_inception(path: Path, network: Inception) -> None:
    """Write ``network`` with a classifier of zeros."""
    weight = next(network.parameters())
    classifier = {"fc.weight": weight.new_zeros(CLASSES, network.out), "fc.bias": weight.new_zeros(CLASSES)}
    _save(path, _named("", network) | {name: tensor.cpu() for name, tensor in classifier.items()})


def _fill(
    path: Path, state: Mapping[str, Tensor], prefix: str, network: nn.Module, kind: str, left_out: Sequence[str]
) -> None:
    given = {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    given = {own: name for own, name in given.items() if not own.startswith(tuple(left_out)) and _is_weight(own)}
    own = {name: tensor for name, tensor in network.state_dict().items() if _is_weight(name)}
    missing = [name for name in own if name not in given]
    if len(missing) == len(own):
        raise CheckpointError(f"{path}: holds no {kind}: no tensor is named as its {prefix}{missing[0]}")
    if missing:
        raise CheckpointError(
            f"{path}: tensor {prefix}{missing[0]} is missing, with {len(missing) - 1} others: another {kind} than "
            "configured"
        )
    for name, file_name in given.items():
        if name not in own:
            raise CheckpointError(f"{path}: the configured {kind} has no tensor {file_name}, which the file has")
        if state[file_name].shape != own[name].shape:
            raise CheckpointError(
                f"{path}: tensor {file_name} is {tuple(state[file_name].shape)}, the configured {kind} has "
                f"{tuple(own[name].shape)}"
            )
        if not state[file_name].is_floating_point():
            raise CheckpointError(
                f"{path}: tensor {file_name} is {state[file_name].dtype}, and weights are floating-point"
            )
    for name, file_name in given.items():
        own[name].copy_(state[file_name])
        if not own[name].isfinite().all():
            count = int((~own[name].isfinite()).sum())
            raise CheckpointError(
                f"{path}: tensor {file_name} has {count} of {own[name].numel()} values that are not finite in "
                f"{own[name].dtype}"
            )


def _is_weight(name: str) -> bool:
    return not name.endswith(_COUNTER)


def _named(prefix: str, network: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}


def _temperature() -> Tensor:
    return torch.tensor(_START_TEMPERATURE)


def _save(path: Path, state: dict[str, Tensor], trainer: bool = False) -> None:
    """Write tensors with ``torch.save``, or with safetensors if the suffix is ``.safetensors``."""
    with written(path) as partial:
        if path.suffix == ".safetensors":
            safetensors.torch.save_file(state, partial)
        else:
            torch.save({STATE_DICT: state} if trainer else state, partial)
