"""The frozen base weights: Hugging Face's safetensors, read one tensor at a time, and written in the same format.

A folder holds ``config.json`` and either ``model.safetensors`` or shards ``model-00001-of-00015.safetensors`` … with
``model.safetensors.index.json``, which says where each tensor is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.llama2_70b_lora import hugging_face
from benchmarks.llama2_70b_lora.hugging_face import Part, Weight
from common.data import atomic
from common.errors import CheckpointError, DataError
from common.nn.decoder import DecoderArchitecture
from common.untrusted.safetensors_header import TensorPlace, read_header
from common.untrusted.strict_json import read_json_object

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Of a shard that is written; only a larger tensor makes a larger one."""
FLOATING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Dtypes that a base may have: their names in safetensors and in PyTorch."""
_SAMPLES, _SAMPLE_BYTES = 8, 1024


class BaseWeights:
    """The weights in ``folder``, checked by the files' headers; no tensor is read before it is wanted.

    Args:
        folder: see above.
        architecture: the model that they have to be of.

    Raises:
        CheckpointError: a file is missing, cut off or damaged; a tensor is missing, too many, of another shape, or not
            floating point; or ``config.json`` describes another model.
    """

    def __init__(self, folder: Path, architecture: DecoderArchitecture) -> None:
        self.folder = folder
        self.architecture = architecture
        self._places = _places(folder)
        _check_config(folder / CONFIG, architecture)
        self._weights = [
            (weight, _check(folder, weight, self._places)) for weight in hugging_face.weights(architecture)
        ]
        expected = {part.name for _, parts in self._weights for part in parts}
        for name, place in self._places.items():
            if name not in expected and not name.endswith(hugging_face.IGNORED):
                raise CheckpointError(f"{place.file}: the model has no tensor {name}: it is the base of another model")

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(place.end - place.start for place in self._places.values())

    def tensors(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Names as :class:`common.nn.decoder.Decoder` has them, and tensors in host memory, in the files' dtypes.

        They come from the embedding through the layers to the head. Each is mapped into memory, or put together from
        its parts; whoever takes them one at a time never has two in memory. Where some are ``wanted``, the others are
        not read.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for weight, parts in self._weights:
            if wanted is not None and weight.name not in wanted:
                continue
            pieces = [self._read(part.name) for part in parts]
            yield weight.name, pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def tensors_of_node(
        self, wanted: Container[str], group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """:meth:`tensors` on every rank of ``group``, whose first reads them. Collective; every rank takes all.

        Args:
            wanted: names of the tensors that are; the others are not read.
            group: the ranks of a node; None for this rank alone.
            device: where tensors go, and what the group communicates on.
            dtype: of the tensors.
        """
        if group is None:
            yield from self.tensors(wanted)
            return
        source, reading = dist.get_global_rank(group, 0), dist.get_rank(group) == 0
        read = self.tensors(wanted) if reading else None
        for weight in (weight for weight, _ in self._weights if weight.name in wanted):
            if read is not None:
                tensor = next(read)[1].to(device, dtype).contiguous()
            else:
                tensor = torch.empty(weight.shape, dtype=dtype, device=device)
            dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)  # every backend carries bytes
            yield weight.name, tensor

    def digest(self) -> str:
        """SHA-256 of what tells this base from others: names, dtypes, shapes, and 8 KiB of each tensor.

        It does not depend on how tensors are dealt to files; it does on dtype, and on whether QKV is fused.

        Raises:
            CheckpointError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for name in sorted(part.name for _, parts in self._weights for part in parts):
            place = self._places[name]
            digest.update(f"{name} {place.dtype} {list(place.shape)}\n".encode())
            last = max(place.start, place.end - _SAMPLE_BYTES)
            try:
                with open(place.file, "rb") as file:
                    for sample in range(_SAMPLES):
                        file.seek(place.start + (last - place.start) * sample // (_SAMPLES - 1))
                        digest.update(file.read(min(_SAMPLE_BYTES, place.end - place.start)))
            except OSError as error:
                raise CheckpointError(f"{place.file} cannot be read: {error}") from error
        return digest.hexdigest()

    def _read(self, name: str) -> Tensor:
        path = self._places[name].file
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error


def save_base(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    architecture: DecoderArchitecture,
    max_positions: int,
    fused: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a base that :class:`BaseWeights`, and transformers where QKV is not fused, can read.

    Args:
        folder: made if need be.
        tensors: names as our decoder has them, and tensors of one floating dtype, in any order.
        architecture: of the decoder.
        max_positions: for ``config.json``: the longest row that the base is for.
        fused: whether QKV is one tensor of a layer, as in the benchmark's base, or three.
        shard_bytes: of the largest file, unless a single tensor is larger.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has another shape or dtype than it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    expected = {weight.name: weight for weight in hugging_face.weights(architecture)}
    shards: list[dict[str, str]] = []  # names and dtypes of each file
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.partial", metadata={"format": "pt"})
        shards.append({name: str(tensor.dtype).removeprefix("torch.") for name, tensor in pending.items()})
        pending.clear()

    total = 0
    for name, tensor in tensors:
        weight = expected.pop(name, None)
        if weight is None or tuple(tensor.shape) != weight.shape:
            raise CheckpointError(
                f"{folder}: {name} {list(tensor.shape)} is no tensor of the base; "
                f"{'there is none of that name' if weight is None else f'it has shape {list(weight.shape)}'}"
            )
        parts = weight.ways[0 if fused else -1]
        for part, piece in zip(parts, tensor.detach().cpu().split([part.rows for part in parts]), strict=True):
            size = piece.numel() * piece.element_size()
            if pending and sum(held.numel() * held.element_size() for held in pending.values()) + size > shard_bytes:
                flush()
            pending[part.name] = piece.clone(memory_format=torch.contiguous_format)
            total += size
    if expected:
        raise CheckpointError(f"{folder}: {', '.join(expected)} were not given")
    flush()
    dtypes = {dtype for shard in shards for dtype in shard.values()}
    if len(dtypes) != 1 or not dtypes <= set(FLOATING.values()):
        raise CheckpointError(f"{folder}: a base has one dtype of {', '.join(FLOATING.values())}, not {sorted(dtypes)}")
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    for number, name in enumerate(names):
        (folder / f"{number}.partial").replace(folder / name)
    if len(names) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        atomic.write_text(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": places}))
    atomic.write_text(folder / CONFIG, _json(hugging_face.config(architecture, max_positions, dtypes.pop())))


def files_of(folder: Path) -> list[Path]:
    """The files that make up the base in ``folder``: configuration, index, shards.

    Raises:
        CheckpointError: there is none, or the index is damaged.
    """
    if (folder / INDEX).is_file():
        shards = sorted(set(_index(folder / INDEX).values()))
        return [folder / name for name in (CONFIG, INDEX, *shards)]
    if (folder / SINGLE).is_file():
        return [folder / CONFIG, folder / SINGLE]
    raise CheckpointError(
        f"{folder} holds no base weights: neither {INDEX} nor {SINGLE}; "
        "'mlperf-suite download benchmark=llama2_70b_lora' says where they are"
    )


def _places(folder: Path) -> dict[str, TensorPlace]:
    """Where every tensor of the base is."""
    shards = [path for path in files_of(folder) if path.suffix == ".safetensors"]
    if not (folder / INDEX).is_file():
        return read_header(shards[0])
    index = _index(folder / INDEX)
    if missing := [path for path in shards if not path.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        lost = next(name for name, file in index.items() if file == missing[0].name)
        raise CheckpointError(f"{missing[0]}{more} is missing though {INDEX} names it, for {lost} among others")
    headers = {path.name: read_header(path) for path in shards}
    for name, file in index.items():
        if name not in headers[file]:
            raise CheckpointError(f"{folder / file}: tensor {name} is missing though {INDEX} names it there")
    return {name: headers[file][name] for name, file in index.items()}


def _index(path: Path) -> dict[str, str]:
    try:
        found = read_json_object(path)["weight_map"]
        if not found:
            raise ValueError("it names no tensor")
        for file in set(found.values()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{file!r} is no shard in the same folder")
        return dict(found)
    except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); fetch it again") from error


def _check_config(path: Path, architecture: DecoderArchitecture) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: it says which model the base is")
    try:
        described = read_json_object(path)
    except DataError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
    if difference := hugging_face.disagreement(described, architecture):
        raise CheckpointError(f"{path}: {difference}: it is the base of another model")


def _check(folder: Path, weight: Weight, places: dict[str, TensorPlace]) -> tuple[Part, ...]:
    """The parts that the files hold ``weight`` in."""
    parts = next((way for way in weight.ways if any(part.name in places for part in way)), weight.ways[-1])
    for part in parts:
        place = places.get(part.name)
        if place is None:
            file = SINGLE if not (folder / INDEX).is_file() else INDEX
            raise CheckpointError(f"{folder / file}: tensor {part.name} is missing")
        if place.dtype not in FLOATING:
            allowed = ", ".join(FLOATING)
            raise CheckpointError(f"{place.file}: tensor {part.name} has dtype {place.dtype}; a base has {allowed}")
        if place.shape != (expected := (part.rows, *weight.shape[1:])):
            raise CheckpointError(
                f"{place.file}: tensor {part.name} has shape {list(place.shape)}, and the model needs "
                f"{list(expected)}: it is the base of another model"
            )
    return parts


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
