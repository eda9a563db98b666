"""Files of tensors that anybody may have written: nothing that they name is run, and no second copy is made.

Files of ``torch.save``, both of today's zip and of the older plain pickles, and safetensors. Beside tensors a training
framework's checkpoints hold objects of its own; a few are known to stand in files that people publish, and are read as
empty objects of a class that does nothing. Every other name that a pickle asks for is refused.

PyTorch's ``weights_only`` keeps a pickle from calling other functions. Here its bounds are added: the pickle is scanned
before (:mod:`common.untrusted.pickle_scan`), nothing in a zip may be compressed, and what was read may not be nested
without end or have tensors that are larger than their storage.
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
"""What reading a damaged file raises: older ones are plain pickles, which can end or say anything."""

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
"""Names that checkpoints of Lightning ask for beside tensors, such as its callbacks and their best score."""
COPYING = ("collections.Counter", "builtins.set", "builtins.bytearray", "torch._utils._rebuild_qtensor")
"""Names that PyTorch admits, that make much memory of little, and that no file of tensors needs."""
ENCODED = 4096
"""Characters that ``encode`` may be given: Lightning's pickles have numbers of 8 bytes so."""
PICKLE_BYTES = 64 * 2**20
"""Of the pickle in a zip. That of a state of 10,000 tensors has 1 MB."""
DEPTH, VALUES = 32, 2_000_000
"""How deep the values of a file may be nested, and how many there may be, shared ones counted each time."""
REPEATED = 64 * 2**20
"""Bytes by which tensors may be larger than their storages, in sum: a buffer of positions may be an expanded one."""
STATE_DICT = "state_dict"
"""Under which a trainer's checkpoint has the model's state."""
_LEGACY_PICKLES = 5
"""Of torch.save's older form: magic number, version, machine, the values, and the names of the storages behind them."""
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


def read_values(path: Path, kind: str = "values") -> Any:
    """Return what a file of ``torch.save`` holds: numbers, texts, lists, mappings and tensors in each other.

    Args:
        path: of the file.
        kind: what it should hold, for messages.

    Raises:
        CheckpointError: see :func:`read_state`.
    """
    return _content(path, kind)


def _content(path: Path, kind: str, digest: str | None = None) -> Any:
    try:
        with open_regular(path) as file:
            if digest is not None:
                check_digest(path, digest)
            if path.suffix == ".safetensors":
                return _safetensors(path, kind)
            zipped = _check(file)
        content = _read(path, zipped)
    except DataError as error:
        reason = str(error).removeprefix(f"{path}: ")
        text = (
            f"{path}: not a file of {kind} that PyTorch can read: {reason}" if path.exists() else f"{path} is missing"
        )
        raise CheckpointError(text) from None
    except Excessive as error:
        raise CheckpointError(f"{path}: not a file of {kind} that PyTorch can read: {error}; fetch it again") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a file of {kind} that PyTorch can read: {_cause(error)}") from None
    _check_values(path, content)
    return content


def _safetensors(path: Path, kind: str) -> dict[str, Tensor]:
    try:
        read_header(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: not a file of {kind} that PyTorch can read: {error}") from None
    return safetensors.torch.load_file(path)


def _check(file: BinaryIO) -> bool:
    """Refuse a file of ``torch.save`` whose pickles are damaged or excessive; whether it is a zip.

    Raises:
        Excessive: something in it exceeds a bound.
        BadZipFile, OSError, ValueError: it is a damaged zip.
    """
    if file.read(4) != b"PK\3\4":  # as torch.load tells them apart
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
    """Refuse values that are nested without end, and tensors that are larger than what the file holds of them.

    Raises:
        CheckpointError: there are such values.
    """
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
    """Bytes by which a tensor is larger than its storage, as expanded ones are."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return 0
    return max(0, tensor.numel() * tensor.element_size() - tensor.untyped_storage().nbytes())


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
        return _asks_for(asked[1])
    return (text.splitlines() or [type(error).__name__])[0]


def _asks_for(name: str) -> str:
    return (
        f"its pickle asks for {name}, which tensors have no use for, and which was not done; fetch it again, "
        "and if it stays so, do not use this file anywhere"
    )


def _read(path: Path, zipped: bool) -> Any:
    stand_ins: list[Any] = [(Skipped, name) for name in SKIPPED]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
