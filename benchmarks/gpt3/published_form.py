"""Format of the published checkpoint: a folder of Zarr arrays, one per tensor and kind, with stacked layers.

``common.pt`` in the same folder contains the number of optimizer steps. The bfloat16 archive of MLCommons lacks this
file; there, the number is in the name of the folder, ``ckpt4000-consumed_samples=0``.

Two naming schemes exist: that of the reference implementation, whose weights start with ``language_model.``, and that
of NVIDIA's submission to round 4.1, with renamed folders. A checkpoint in bfloat16 has separate arrays of fp32 masters;
in a checkpoint in fp32, the weights are the masters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpt3.config import GptArchitecture
from common.data.raw_layout import find_file, packed_hint
from common.errors import CheckpointError, DataError
from common.formats.zarr import METADATA, ZarrArray
from common.untrusted.strict_json import read_json_object
from common.untrusted.tensor_file import read_values

COMMON, SETTINGS = "common.pt", "metadata.json"
ARCHIVES = ("checkpoint_nemo_bf16.tar", "checkpoint_megatron_fp32.tar")
"""Archives of the bfloat16 and the fp32 checkpoint from MLCommons."""
SCRIPTS = "https://github.com/mlcommons/training/tree/master/retired_benchmarks/gpt3/megatron-lm/scripts"
WEIGHTS, MASTERS = "weights", "masters"
MOMENTS = ("exp_avg", "exp_avg_sq")
ANY_ROWS = ("embedding.weight", "positions.weight")
"""Tables that may have more rows than the network has words or positions; the additional rows are ignored."""
_LAYER = re.compile(r"^layers\.(\d+)\.")
_STEPS = ("step", "common_step")
_PUBLISHED_FOLDER = re.compile(r"ckpt(\d+)-consumed_samples=\d+")
"""Folder name of the bfloat16 checkpoint from MLCommons; the group is the number of optimizer steps."""
_OPTIMIZERS = ("optimizer", "optimizer_states")


@dataclass(frozen=True)
class Naming:
    """Naming scheme of the folders of arrays.

    Attributes:
        whose: origin of the scheme, in words.
        model: prefix of the names of all weights.
        masters: additional prefix of fp32 masters.
        names: maps our parameter names, without the layer number, to names in the checkpoint.
    """

    whose: str
    model: str
    masters: str
    names: Mapping[str, str]

    def folder(self, kind: str, pattern: str) -> str:
        """Return the folder name of the array of a kind (weights, masters or a moment) for a parameter."""
        before = {WEIGHTS: "", MASTERS: self.masters} | {moment: f"optimizer.state.{moment}." for moment in MOMENTS}
        return f"{before[kind]}{self.model}{self.names[pattern]}"


def _both(ours: str, theirs: str, separator: str = ".") -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}{separator}{kind}" for kind in ("weight", "bias")}


_EMBEDDINGS = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
}
NAMINGS: dict[str, Naming] = {
    "reference": Naming(
        "the reference's",
        "language_model.",
        "optimizer.state.fp32_from_fp16.",
        {
            **_EMBEDDINGS,
            **_both("layers.attention_norm", "encoder.layers.input_layernorm"),
            **_both("layers.qkv", "encoder.layers.self_attention.query_key_value"),
            **_both("layers.output", "encoder.layers.self_attention.dense"),
            **_both("layers.mlp_norm", "encoder.layers.post_attention_layernorm"),
            **_both("layers.up", "encoder.layers.mlp.dense_h_to_4h"),
            **_both("layers.down", "encoder.layers.mlp.dense_4h_to_h"),
            **_both("norm", "encoder.final_layernorm"),
        },
    ),
    "nvidia": Naming(
        "NVIDIA's of round 4.1",
        "model.",
        "optimizer.state.fp32_param.",
        {
            **_EMBEDDINGS,
            **_both("layers.attention_norm", "decoder.layers.self_attention.layernorm_qkv.layer_norm", "_"),
            **_both("layers.qkv", "decoder.layers.self_attention.layernorm_qkv"),
            **_both("layers.output", "decoder.layers.self_attention.proj"),
            **_both("layers.mlp_norm", "decoder.layers.layernorm_mlp.layer_norm", "_"),
            **_both("layers.up", "decoder.layers.layernorm_mlp.fc1", "_"),
            **_both("layers.down", "decoder.layers.layernorm_mlp.fc2", "_"),
            **_both("norm", "decoder.final_layernorm"),
        },
    ),
}


def pattern_of(name: str) -> tuple[str, int | None]:
    """Split the name of one of our parameters into the name without the layer number, and that number."""
    found = _LAYER.match(name)
    return (name, None) if found is None else (f"layers.{name[found.end() :]}", int(found[1]))


def shapes(architecture: GptArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name without the layer number, without padding of the vocabulary.

    The rows of ``qkv`` have the same order here and in the checkpoint: query, key and value of the first head, then of
    the next.
    """
    hidden, features = architecture.hidden, architecture.feed_forward
    products = {
        "qkv": (3 * hidden, hidden),
        "output": (hidden, hidden),
        "up": (features, hidden),
        "down": (hidden, features),
    }
    found: dict[str, tuple[int, ...]] = {
        "embedding.weight": (architecture.vocabulary, hidden),
        "positions.weight": (architecture.positions, hidden),
    }
    for name, shape in products.items():
        found |= {f"layers.{name}.weight": shape, f"layers.{name}.bias": shape[:1]}
    for name in ("layers.attention_norm", "layers.mlp_norm", "norm"):
        found |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return found


class PublishedCheckpoint:
    """A published checkpoint. Creating the object checks the metadata of its arrays, but reads no values.

    Args:
        folder: folder of the checkpoint's arrays, or a folder above it.
        kinds: kinds of values to open: ``weights``, or ``masters`` and moments.

    Attributes:
        folder: folder of the checkpoint's arrays.
        naming: naming scheme of this checkpoint.
        arrays: arrays by kind, and by parameter name without the layer number.

    Raises:
        CheckpointError: an array is missing or damaged, the checkpoint belongs to another network, or two folders
            below ``folder`` have a checkpoint.
    """

    def __init__(self, folder: Path, architecture: GptArchitecture, kinds: Sequence[str]) -> None:
        self.architecture = architecture
        self.folder, self.naming = _recognised(folder)
        self._check_settings()
        self.arrays: dict[str, dict[str, ZarrArray]] = {}
        weights = ZarrArray.open(self._path(WEIGHTS, "norm.weight"))
        for kind in kinds:
            stored = WEIGHTS if kind == MASTERS and weights.dtype == torch.float32 else kind
            self.arrays[kind] = {pattern: self._opened(stored, pattern) for pattern in self.naming.names}

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the checkpoint.

        Raises:
            CheckpointError: ``common.pt`` is damaged or lacks the number; or the file is missing, and the name of the
                folder does not contain the number either.
        """
        path = self.folder / COMMON
        if not path.exists():
            if (named := _PUBLISHED_FOLDER.fullmatch(self.folder.resolve().name)) is not None:
                return int(named[1])
            raise CheckpointError(
                f"{path} is missing, which says how many updates made the checkpoint. MLCommons' {ARCHIVES[0]} lacks "
                "it: give the folder its name back, ckpt4000-consumed_samples=0, or make the file with 'python "
                f"json_to_torch.py -i common_bf16.json -o {path}' (both from {SCRIPTS})"
            )
        try:
            found = set(_steps(read_values(path), False))
        except (ValueError, OverflowError, RuntimeError) as error:  # a step that is not a number, or endless nesting
            raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
        if len(found) != 1:
            problem = (
                f"says different steps of Adam, {sorted(found)}" if found else "does not say at which step Adam is"
            )
            raise CheckpointError(f"{path}: {problem}; fetch it again")
        return found.pop()

    def _check_settings(self) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            raise CheckpointError(f"{path} is missing; fetch it again")
        try:
            backend = read_json_object(path)["sharded_backend"]
        except (DataError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); fetch it again") from error
        if backend != "zarr":
            raise CheckpointError(f"{path}: its tensors are of the form {backend!r}, and 'zarr' can be read")

    def _path(self, kind: str, pattern: str) -> Path:
        return self.folder / self.naming.folder(kind, pattern)

    def _opened(self, kind: str, pattern: str) -> ZarrArray:
        array = ZarrArray.open(self._path(kind, pattern))
        expected = shapes(self.architecture)[pattern]
        if pattern.startswith("layers."):
            expected = (self.architecture.layers, *expected)
        found = array.shape
        rows = ANY_ROWS.count(pattern) and len(found) == len(expected) and found[0] >= expected[0]
        if not array.dtype.is_floating_point or found != ((found[0], *expected[1:]) if rows else expected):
            least = " or more rows" if pattern in ANY_ROWS else ""
            raise CheckpointError(
                f"{array.folder}: {array.dtype} of shape {list(found)}, and the network has {list(expected)}{least}: "
                "it is the checkpoint of another network"
            )
        return array


def _recognised(folder: Path) -> tuple[Path, Naming]:
    """Return the folder of the arrays, which is ``folder`` or a folder below it, and the naming scheme."""
    first = {naming.folder(WEIGHTS, "embedding.weight"): naming for naming in NAMINGS.values()}
    try:
        found = find_file(folder, *(f"{name}/{METADATA}" for name in first))
        packed = packed_hint(folder, *ARCHIVES) if found is None else ""
    except DataError as error:
        raise CheckpointError(f"{error} by model.checkpoint") from error
    if found is not None:
        return found.parent.parent, first[found.parent.name]
    raise CheckpointError(
        f"{folder} holds no published checkpoint of GPT-3: {next(iter(first))}/{METADATA} is missing, also under the "
        f"other name that it may have, and in folders below; name its folder by assets_dir and model.checkpoint{packed}"
    )


def _steps(content: Any, in_optimizer: bool) -> Iterator[int]:
    """Yield all step counters of optimizer states in nested ``content``."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if in_optimizer and key in _STEPS and isinstance(value, int | float | Tensor):
                yield int(value)
            else:
                yield from _steps(value, in_optimizer or key in _OPTIMIZERS)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _steps(value, in_optimizer)
