"""Optional libraries: whether they are installed, and the one handle that cuDNN asks for."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch

CUDNN_FRONTEND = "nvidia-cudnn-frontend"
FLASH_ATTENTION_4 = "flash-attn-4"


def missing(package: str) -> str | None:
    """Why ``package`` can't be used: it isn't installed. None if it is; nothing of it is imported."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return None


def no_transformer_engine() -> str | None:
    """Why Transformer Engine can't be used from PyTorch; None if it can. Nothing of it is imported."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        return "transformer-engine is not installed"
    folder = Path(spec.submodule_search_locations[0])
    # in the registry's wheels, in a build from source, in an editable one
    for place in (folder / "wheel_lib", folder, folder.parent):
        if any(place.glob("transformer_engine_torch*.so")):
            return None
    return "transformer-engine is installed without its PyTorch extension, transformer-engine-torch"


@functools.cache
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def cudnn_handle(device: torch.device) -> Any:
    """The process's cuDNN handle of a device, on its current stream."""
    import cudnn

    handle = _cudnn_handle(device)
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    return handle
