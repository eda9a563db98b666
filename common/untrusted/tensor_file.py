"""State dicts that others published: read without running what their pickles say, and without a second copy in memory.

Files of ``torch.save``, both of today's zip and of the older plain pickles, and safetensors. Beside tensors a training
framework's checkpoints hold objects of its own; a few are known to stand in files that people publish, and are read as
empty objects of a class that does nothing. Every other name that a pickle asks for is refused.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from common.errors import CheckpointError, ConfigError

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    safetensors.SafetensorError,
)
"""What reading a damaged file raises: older ones are plain pickles, which can end or say anything."""

SKIPPED = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "pytorch_lightning.callbacks.early_stopping.EarlyStopping",
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "_codecs.encode",
)
"""Names that checkpoints of Lightning ask for beside tensors, such as its callbacks and their best score."""
STATE_DICT = "state_dict"
"""Under which a trainer's checkpoint has the model's state."""
_ALGORITHMS = {40: "sha1", 64: "sha256"}


class Skipped:
    """What stands for an object of a name in :data:`SKIPPED`; made of anything, it keeps nothing."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> Skipped:
        """Drop all arguments."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read_state(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """The tensors of a model's state, or of what a trainer's checkpoint has under ``state_dict``.

    Args:
        path: of the file; ``.safetensors`` is read as that, everything else as of ``torch.save``.
        digest: SHA-256 or SHA-1 that it must have, in hexadecimal; None for any.

    Returns:
        Tensors on the CPU by their names. Those of zips and safetensors are mapped from the file, which is only read
        where they are.

    Raises:
        CheckpointError: the file is missing, damaged, of another digest, holds no state, or its pickle asks for
            anything but tensors; nothing of what it asks for has then been done.
        ConfigError: ``digest`` is none.
    """
    content = _content(path, "tensors", digest)
    if isinstance(content, Mapping) and isinstance(content.get(STATE_DICT), Mapping):
        content = content[STATE_DICT]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds no state of a model, but a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: holds a {type(value).__name__} under {name!r}, where a tensor is expected")
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise CheckpointError(f"{path}: {name} is no plain tensor, but {value.layout} on {value.device}")
    return dict(content)


def read_values(path: Path) -> Any:
    """What a file of ``torch.save`` holds: numbers, texts, lists, mappings and tensors in each other.

    Raises:
        CheckpointError: see :func:`read_state`.
    """
    return _content(path, "values")


def _content(path: Path, kind: str, digest: str | None = None) -> Any:
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise CheckpointError(f"{path}: not a file of {kind} that PyTorch can read: no regular file")
    try:
        if digest is not None:
            check_digest(path, digest)
        return _read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a file of {kind} that PyTorch can read: {_cause(error)}") from None


def check_digest(path: Path, digest: str) -> None:
    """Refuse a file whose SHA-256 or SHA-1, told apart by their lengths, is not ``digest``.

    A file that this process has summed is not read again, as long as its size and its time stay.

    Raises:
        CheckpointError: it is another.
        ConfigError: ``digest`` is none of the two.
        OSError: the file cannot be read.
    """
    algorithm = _ALGORITHMS.get(len(digest))
    if algorithm is None or not re.fullmatch("[0-9a-f]+", digest):
        raise ConfigError(f"digest {digest!r} of {path}: 64 (SHA-256) or 40 (SHA-1) digits of 0-9 and a-f")
    status = path.stat()
    found = _digest(path.resolve(), algorithm, status.st_size, status.st_mtime_ns)
    if found != digest:
        raise CheckpointError(
            f"{path}: its {algorithm.upper()} is {found}, and {digest} is expected: damaged, or another file; fetch it "
            "again, or change the digest that is configured"
        )


@lru_cache
def _digest(path: Path, algorithm: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _cause(error: BaseException) -> str:
    text = str(error)
    if asked := re.search(r"GLOBAL '?([\w.]+)", text):
        return (
            f"its pickle asks for {asked[1]}, which tensors have no use for, and which was not done; fetch it again, "
            "and if it stays so, do not use this file anywhere"
        )
    return (text.splitlines() or [type(error).__name__])[0]


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    stand_ins: list[Any] = [(Skipped, name) for name in SKIPPED]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
