"""Untrusted files of tensors, read without running code that they name and without a second copy in memory.

It reads files of ``torch.save``, both zip files and the older plain pickles, and safetensors. Checkpoints of training
frameworks also have other objects. A few that occur in published files are known and become empty placeholders; every
other name in a pickle is refused.

PyTorch's ``weights_only`` prevents a pickle from calling other functions. This module adds bounds: the pickle is
scanned before (:mod:`common.untrusted.pickle_scan`), nothing in a zip may be compressed, and values must not be
nested too deep or have tensors that are larger than their storage.
"""

from __future__ import annotations

import hashlib
import mmap
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from common.errors import CheckpointError, ConfigError, DataError
from common.untrusted.archives import bounded_zip
from common.untrusted.pickle_scan import Excessive, Record, scan
from common.untrusted.regular_file import open_regular
from common.untrusted.safetensors_header import read_header

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
"""Exceptions from reading a damaged file. Older files are plain pickles, whose damage can raise almost anything."""

ENCODE = "_codecs.encode"
SKIPPED = (
    "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
    "pytorch_lightning.callbacks.early_stopping.EarlyStopping",
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    ENCODE,
)
"""Names in checkpoints of Lightning that are not tensors, such as its callbacks and their best score."""
COPYING = ("collections.Counter", "builtins.set", "builtins.bytearray", "torch._utils._rebuild_qtensor")
"""Names that PyTorch allows but that can expand a little data to much memory. No file of tensors needs them."""
ENCODED = 4096
"""Largest number of characters for ``encode``, which Lightning's pickles use for numbers of 8 bytes."""
PICKLE_BYTES = 64 * 2**20
"""Largest pickle in a zip, in bytes. That of a state of 10,000 tensors has 1 MB."""
DEPTH, VALUES = 32, 2_000_000
"""Largest nesting depth of the values of a file, and largest number of values, counting shared ones each time."""
REPEATED = 64 * 2**20
"""Largest total of bytes by which tensors exceed their storages: a buffer of positions may be an expanded tensor."""
STATE_DICT = "state_dict"
"""Key of the model's state in a trainer's checkpoint."""
_LEGACY_PICKLES = 5
"""Number of pickles in torch.save's older format: magic number, version, machine, the values, and storage names."""
_ALGORITHMS = {40: "sha1", 64: "sha256"}


class Skipped:
    """Placeholder for unpickled objects that are ignored (their names are in :data:`SKIPPED`).

    Accepts any arguments and stores none of them.
    """

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> Skipped:
        """Create a placeholder; ignore all arguments."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read_state(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a model's state, or of the entry ``state_dict`` of a trainer's checkpoint.

    Args:
        path: file with the suffix ``.safetensors``, or any file of ``torch.save``.
        digest: expected SHA-256 or SHA-1 of the file, in hexadecimal; None for no check.

    Returns:
        Tensors on the CPU by name. Those of zips and safetensors are memory-mapped, so only the parts that are used
            are read.

    Raises:
        CheckpointError: the file is missing, damaged, has another digest or no state, or its pickle requests anything
            but tensors; nothing that it requests is executed.
        ConfigError: ``digest`` is neither a SHA-256 nor a SHA-1.
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


def read_values(path: Path, kind: str = "values", digest: str | None = None) -> Any:
    """Return the content of a file of ``torch.save``: nested numbers, texts, lists, mappings and tensors.

    Args:
        kind: description of the expected content, for messages.
        digest: as of :func:`read_state`.

    Raises:
        CheckpointError: the file is missing, damaged or has another digest, or its pickle requests anything else;
            nothing is executed.
    """
    return _content(path, kind, digest)


def _content(path: Path, kind: str, digest: str | None = None) -> Any:
    unreadable = f"{path}: not a file of {kind} that PyTorch can read"
    try:
        with open_regular(path) as file:
            if digest is not None:
                check_digest(path, digest)
            if path.suffix == ".safetensors":
                return _safetensors(path, unreadable)
            zipped = _check(file)
        content = _read(path, zipped)
    except DataError as error:
        if not path.exists():
            raise CheckpointError(f"{path} is missing") from None
        raise CheckpointError(f"{unreadable}: {str(error).removeprefix(f'{path}: ')}") from None
    except Excessive as error:
        raise CheckpointError(f"{unreadable}: {error}; fetch it again") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{unreadable}: {_cause(error)}") from None
    _check_values(path, content)
    return content


def _safetensors(path: Path, unreadable: str) -> dict[str, Tensor]:
    try:
        read_header(path)
    except CheckpointError as error:
        raise CheckpointError(f"{unreadable}: {error}") from None
    return safetensors.torch.load_file(path)


def _check(file: BinaryIO) -> bool:
    """Refuse a file of ``torch.save`` whose pickles are damaged or excessive; return whether it is a zip.

    Raises:
        Excessive: something in it exceeds a bound.
        BadZipFile, OSError, ValueError: it is a damaged zip.
    """
    if file.read(4) != b"PK\3\4":  # torch.load uses the same test
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            position = 0
            for _ in range(_LEGACY_PICKLES):
                if content[position : position + 1] != b"\x80":
                    raise Excessive("it begins neither as a zip nor as a pickle of torch.save")
                position = scan(content, position, named=_named, called=_called)
        return False
    archive = bounded_zip(file)
    size = file.seek(0, 2)
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise Excessive(f"its part {member.filename[-80:]!r} is compressed, which torch.save never does")
        if member.file_size > size:
            raise Excessive(f"its part {member.filename[-80:]!r} is larger than the file")
        if member.filename.endswith("/data.pkl"):
            if member.file_size > PICKLE_BYTES:
                raise Excessive(f"its pickle has {member.file_size:,} bytes, and at most {PICKLE_BYTES:,} are read")
            scan(archive.read(member), named=_named, called=_called)
    return True


def _named(name: str) -> None:
    if name in COPYING:
        raise Excessive(_asks_for(name))


def _called(name: str, arguments: tuple[Record, ...]) -> None:
    if name == ENCODE and not all(type(text) is float and text <= ENCODED for text in arguments):
        raise Excessive(f"its pickle asks for {name} of more than {ENCODED:,} characters")


def _check_values(path: Path, content: object) -> None:
    """Raise CheckpointError for values that are nested too deep, and tensors much larger than their storages."""
    left, repeated, level = VALUES, 0, [content]
    for _ in range(DEPTH):
        inner: list[object] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
                inner += value
            elif isinstance(value, Tensor):
                repeated += _repeated(value)
            if len(inner) > left:
                raise CheckpointError(f"{path}: holds more than {VALUES:,} values; fetch it again")
            if repeated > REPEATED:
                raise CheckpointError(
                    f"{path}: has tensors of {repeated:,} bytes more than their storage; fetch it again"
                )
        left -= len(inner)
        level = inner
        if not level:
            return
    raise CheckpointError(f"{path}: its values are nested more than {DEPTH} deep; fetch it again")


def _repeated(tensor: Tensor) -> int:
    """Return the bytes by which a tensor is larger than its storage, as expanded ones are."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return 0
    return max(0, tensor.numel() * tensor.element_size() - tensor.untyped_storage().nbytes())


def check_digest(path: Path, digest: str) -> None:
    """Check that the SHA-256 or SHA-1 of a file is ``digest``, whose length determines the algorithm.

    The result is cached in this process until the size or modification time of the file changes.

    Raises:
        CheckpointError: the digest differs.
        ConfigError: ``digest`` is neither a SHA-256 nor a SHA-1.
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
        return _asks_for(asked[1])
    return (text.splitlines() or [type(error).__name__])[0]


def _asks_for(name: str) -> str:
    return (
        f"its pickle asks for {name}, which tensors have no use for, and which was not done; fetch it again, "
        "and if it stays so, do not use this file anywhere"
    )


def _read(path: Path, zipped: bool) -> Any:
    placeholders: list[Any] = [(Skipped, name) for name in SKIPPED]
    with torch.serialization.safe_globals(placeholders):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
