"""Read and write the frozen base weights, in the safetensors format of Hugging Face.

A folder contains ``config.json`` and either ``model.safetensors`` or shards ``model-00001-of-00015.safetensors`` … with
the index ``model.safetensors.index.json``, which maps each tensor to its shard.

In these files, query, key and value are three tensors or, as in the base of the benchmark, one ``qkv_proj`` with rows
in that order; gate and up are two tensors. The rotation pairs the same dimensions as ours, so no rows are permuted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.data import atomic
from common.errors import CheckpointError, DataError
from common.language.architecture import LlamaArchitecture
from common.untrusted.safetensors_header import TensorLocation, read_header
from common.untrusted.strict_json import read_json_object

IGNORED = ".rotary_emb.inv_freq"
"""End of the names of tensors that older files also contain: a constant of the rotation, which is ignored."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the Hugging Face files, and the number of rows that it fills in our tensor."""

    name: str
    rows: int


@dataclass(frozen=True)
class Weight:
    """One of our tensors.

    Attributes:
        forms: alternatives in files, each a list of parts to concatenate along the rows.
    """

    name: str
    shape: tuple[int, ...]
    forms: tuple[tuple[StoredTensor, ...], ...]


def weights_of(architecture: LlamaArchitecture) -> Iterator[Weight]:
    """Yield all weights of a decoder without adapters, from the embedding to the head."""
    shape = architecture
    table = (shape.vocabulary, shape.hidden)
    yield _one("embedding.weight", table, "model.embed_tokens.weight")
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        queries, keys = shape.attention_features, shape.kv_heads * shape.head_size
        separate = tuple(
            StoredTensor(f"{theirs}.self_attn.{kind}_proj.weight", rows)
            for kind, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        fused = (StoredTensor(f"{theirs}.self_attn.qkv_proj.weight", shape.qkv_features),)
        halves = tuple(StoredTensor(f"{theirs}.mlp.{kind}_proj.weight", shape.feed_forward) for kind in ("gate", "up"))
        yield _one(f"{ours}.attention_norm.weight", (shape.hidden,), f"{theirs}.input_layernorm.weight")
        yield Weight(f"{ours}.qkv.weight", (shape.qkv_features, shape.hidden), (fused, separate))
        yield _one(f"{ours}.output.weight", (shape.hidden, queries), f"{theirs}.self_attn.o_proj.weight")
        yield _one(f"{ours}.mlp_norm.weight", (shape.hidden,), f"{theirs}.post_attention_layernorm.weight")
        yield Weight(f"{ours}.gate_up.weight", (2 * shape.feed_forward, shape.hidden), (halves,))
        yield _one(f"{ours}.down.weight", (shape.hidden, shape.feed_forward), f"{theirs}.mlp.down_proj.weight")
    yield _one("norm.weight", (shape.hidden,), "model.norm.weight")
    yield _one("head.weight", table, "lm_head.weight")


def _one(name: str, shape: tuple[int, ...], theirs: str) -> Weight:
    return Weight(name, shape, ((StoredTensor(theirs, shape[0]),),))


def config_of(architecture: LlamaArchitecture, max_positions: int, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model with these sizes; BOS is token 1 and EOS is token 2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "initializer_range": architecture.initializer_range,
        **_numbers(architecture),
    }


def disagreement(described: dict[str, Any], architecture: LlamaArchitecture) -> str | None:
    """Return the first value in a ``config.json`` that differs from ``architecture``, or None.

    Values that the file does not have are not compared. The shapes of tensors do not determine the number of heads or
    the base of the rotation, so they are not sufficient.
    """
    found = dict(described)
    rope = found.get("rope_parameters")  # transformers 5 has the rotation here; older versions have it at the top level
    if isinstance(rope, dict):
        found.setdefault("rope_theta", rope.get("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            return f"rope_type {rope['rope_type']!r}, and the model has 'default'"
    expected = {**_numbers(architecture), "tie_word_embeddings": False, "hidden_act": "silu", "rope_scaling": None}
    for name, value in expected.items():
        if name in found and found[name] != value:
            return f"{name} {found[name]!r}, and the model has {value!r}"
    return None


def _numbers(architecture: LlamaArchitecture) -> dict[str, Any]:
    return {
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.hidden,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_size,
        "intermediate_size": architecture.feed_forward,
        "rms_norm_eps": architecture.norm_epsilon,
        "rope_theta": architecture.rope_base,
    }


CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Maximum bytes per written shard; only a single larger tensor exceeds it."""
FLOATING = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Allowed dtypes of a base: names in safetensors, and in PyTorch."""
_SAMPLES, _SAMPLE_BYTES = 8, 1024


class BaseWeights:
    """Base weights in a folder. Creating the object checks the headers of the files, but reads no tensors.

    Args:
        folder: folder with the files described above.

    Raises:
        CheckpointError: a file is missing, truncated or damaged; a tensor is missing, unknown, has another shape, or
            is not floating point; or ``config.json`` describes another model.
    """

    def __init__(self, folder: Path, architecture: LlamaArchitecture) -> None:
        self.folder = folder
        self.architecture = architecture
        self._stored = _stored_tensors(folder)
        _check_config(folder / CONFIG, architecture)
        self._weights = [(weight, _check(folder, weight, self._stored)) for weight in weights_of(architecture)]
        expected = {part.name for _, parts in self._weights for part in parts}
        for name, stored in self._stored.items():
            if name not in expected and not name.endswith(IGNORED):
                raise CheckpointError(f"{stored.file}: the model has no tensor {name}: it is the base of another model")

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(stored.end - stored.start for stored in self._stored.values())

    def tensors(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield names as in :class:`common.language.network.Decoder`, and tensors in host memory, in the files' dtype.

        The order is embedding, layers, head. Each tensor is mapped into memory, or concatenated from its parts, only
        when the caller requests it.

        Args:
            wanted: names of the tensors to read; None for all.

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
        """Yield :meth:`tensors` on every rank of ``group``; its first rank reads and broadcasts them.

        Collective: every rank must consume all tensors.

        Args:
            wanted: names of the tensors to read.
            group: ranks of a node; None for a single rank, where tensors stay in host memory in the dtype of the files.
            device: device of the tensors, which the group communicates on.
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
            dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=group)  # every backend supports uint8
            yield weight.name, tensor

    def digest(self) -> str:
        """Return a SHA-256 that identifies the base: names, dtypes, shapes, and 8 KiB of each tensor.

        It depends on the dtype and on whether QKV is fused, but not on how tensors are distributed over files.

        Raises:
            CheckpointError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for name in sorted(part.name for _, parts in self._weights for part in parts):
            stored = self._stored[name]
            digest.update(f"{name} {stored.dtype} {list(stored.shape)}\n".encode())
            last = max(stored.start, stored.end - _SAMPLE_BYTES)
            try:
                with open(stored.file, "rb") as file:
                    for sample in range(_SAMPLES):
                        file.seek(stored.start + (last - stored.start) * sample // (_SAMPLES - 1))
                        digest.update(file.read(min(_SAMPLE_BYTES, stored.end - stored.start)))
            except OSError as error:
                raise CheckpointError(f"{stored.file} cannot be read: {error}") from error
        return digest.hexdigest()

    def _read(self, name: str) -> Tensor:
        path = self._stored[name].file
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error


def save_base(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    architecture: LlamaArchitecture,
    max_positions: int,
    fused: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a base that :class:`BaseWeights` can read, and transformers too if QKV is not fused.

    Args:
        tensors: names as in our decoder, and tensors of one floating-point dtype, in any order.
        max_positions: maximum row length, for ``config.json``.
        fused: whether QKV is one tensor per layer, as in the base of the benchmark, or three.
        shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
        CheckpointError: a tensor is missing or unknown, or has a wrong shape or dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    expected = {weight.name: weight for weight in weights_of(architecture)}
    shards: list[dict[str, str]] = []  # dtype of each tensor by name, for each file
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
        parts = weight.forms[0 if fused else -1]
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
        file_of = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        atomic.write_text(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": file_of}))
    atomic.write_text(folder / CONFIG, _json(config_of(architecture, max_positions, dtypes.pop())))


def files_of(folder: Path) -> list[Path]:
    """Return the paths of all files of the base in ``folder``: configuration, index, shards.

    Raises:
        CheckpointError: the folder has no base, or the index is damaged.
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


def _stored_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Return file and offsets of every tensor of the base, by name."""
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


def _check_config(path: Path, architecture: LlamaArchitecture) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: it says which model the base is")
    try:
        described = read_json_object(path)
    except DataError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
    if difference := disagreement(described, architecture):
        raise CheckpointError(f"{path}: {difference}: it is the base of another model")


def _check(folder: Path, weight: Weight, stored_by_name: dict[str, TensorLocation]) -> tuple[StoredTensor, ...]:
    """Check the tensors of ``weight`` in the files; return the parts that it is stored in."""
    parts = next((form for form in weight.forms if any(part.name in stored_by_name for part in form)), weight.forms[-1])
    for part in parts:
        stored = stored_by_name.get(part.name)
        if stored is None:
            file = SINGLE if not (folder / INDEX).is_file() else INDEX
            raise CheckpointError(f"{folder / file}: tensor {part.name} is missing")
        if stored.dtype not in FLOATING:
            allowed = ", ".join(FLOATING)
            raise CheckpointError(f"{stored.file}: tensor {part.name} has dtype {stored.dtype}; a base has {allowed}")
        if stored.shape != (expected := (part.rows, *weight.shape[1:])):
            raise CheckpointError(
                f"{stored.file}: tensor {part.name} has shape {list(stored.shape)}, and the model needs "
                f"{list(expected)}: it is the base of another model"
            )
    return parts


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
