"""Load the initial weights that the rules require, from the original checkpoint or a PyTorch conversion.

The original is the TensorFlow 1 checkpoint ``model.ckpt-28252`` with 398 variables and optimizer slots, which are not
read. Its kernels are (in, out) and are transposed here; Q, K and V are three variables and become one parameter.
Conversions use the names of the common PyTorch port; those by NVIDIA use ``dense_act`` for a layer with an activation.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bert.model import VOCABULARY_MULTIPLE, Bert
from common.data.raw_layout import find_file
from common.errors import CheckpointError
from common.formats.tensor_bundle import TensorBundle
from common.untrusted.tensor_file import read_values

PUBLISHED_DATA = "-003"
"""Suffix after the checkpoint name in the data file of the MLCommons bucket; the index file lacks it."""

LAYERS = 24
"""Layers of the model in the checkpoint of the rules."""

_BY_WORD = frozenset({"embeddings.word.weight", "masked_lm.bias"})
"""Parameters with one row per word, and rows for padding."""


@dataclass(frozen=True)
class CheckpointVariable:
    """One variable of the checkpoint.

    Attributes:
        parameter: name of the parameter in :class:`Bert` that stores it.
        part: third of the rows of ``parameter`` (0, 1 or 2); None for all rows.
    """

    tf: str
    torch: str
    parameter: str
    part: int | None = None

    @property
    def transposed(self) -> bool:
        """Whether the TensorFlow variable is the transpose of our parameter."""
        return self.tf.endswith("/kernel")


def _dense(tf: str, port: str, parameter: str, part: int | None = None) -> list[CheckpointVariable]:
    return [
        CheckpointVariable(f"{tf}/kernel", f"{port}.weight", f"{parameter}.weight", part),
        CheckpointVariable(f"{tf}/bias", f"{port}.bias", f"{parameter}.bias", part),
    ]


def _norm(tf: str, port: str, parameter: str) -> list[CheckpointVariable]:
    return [
        CheckpointVariable(f"{tf}/LayerNorm/beta", f"{port}.LayerNorm.bias", f"{parameter}.bias"),
        CheckpointVariable(f"{tf}/LayerNorm/gamma", f"{port}.LayerNorm.weight", f"{parameter}.weight"),
    ]


def _layer(index: int) -> list[CheckpointVariable]:
    tf, port, own = f"bert/encoder/layer_{index}", f"bert.encoder.layer.{index}", f"layers.{index}"
    weights = []
    for part, name in enumerate(("query", "key", "value")):
        weights += _dense(f"{tf}/attention/self/{name}", f"{port}.attention.self.{name}", f"{own}.attention.qkv", part)
    weights += _dense(f"{tf}/attention/output/dense", f"{port}.attention.output.dense", f"{own}.attention.output")
    weights += _norm(f"{tf}/attention/output", f"{port}.attention.output", f"{own}.attention.norm")
    weights += _dense(f"{tf}/intermediate/dense", f"{port}.intermediate.dense", f"{own}.mlp.up")
    weights += _dense(f"{tf}/output/dense", f"{port}.output.dense", f"{own}.mlp.down")
    return weights + _norm(f"{tf}/output", f"{port}.output", f"{own}.mlp.norm")


def weights(layers: int = LAYERS) -> list[CheckpointVariable]:
    """Return all variables of a model with ``layers`` layers, in the order in which the original creates them."""
    tables = [("word", "word"), ("token_type", "segment"), ("position", "position")]
    return [
        *(
            CheckpointVariable(
                f"bert/embeddings/{name}_embeddings",
                f"bert.embeddings.{name}_embeddings.weight",
                f"embeddings.{own}.weight",
            )
            for name, own in tables
        ),
        *_norm("bert/embeddings", "bert.embeddings", "embeddings.norm"),
        *(weight for index in range(layers) for weight in _layer(index)),
        *_dense("bert/pooler/dense", "bert.pooler.dense", "pooler"),
        *_dense("cls/predictions/transform/dense", "cls.predictions.transform.dense", "masked_lm.transform"),
        *_norm("cls/predictions/transform", "cls.predictions.transform", "masked_lm.norm"),
        CheckpointVariable("cls/predictions/output_bias", "cls.predictions.bias", "masked_lm.bias"),
        CheckpointVariable(
            "cls/seq_relationship/output_weights", "cls.seq_relationship.weight", "next_sentence.weight"
        ),
        CheckpointVariable("cls/seq_relationship/output_bias", "cls.seq_relationship.bias", "next_sentence.bias"),
    ]


def initial_weight_names(layers: int = LAYERS) -> list[str]:
    """Return the TensorFlow names of all weights (398 for the rules' checkpoint), which older rulesets log."""
    return [weight.tf for weight in weights(layers)]


def load_weights(model: Bert, path: Path) -> None:
    """Overwrite all parameters of ``model`` with those of a checkpoint, cast to the dtype of the model.

    Args:
        path: prefix of a TensorFlow checkpoint, or a file ``*.pt`` with the state dict of the PyTorch port, at the top
            level or under the key ``model``. Only tensors are unpickled, never code.

    Raises:
        CheckpointError: a file is missing, truncated or damaged; a tensor is missing, has another dtype or shape, or
            has values that are not finite. Some parameters may then already be overwritten.
    """
    if path.suffix == ".pt":
        _copy(model, _port_reader(path))
    else:
        _copy(model, _tensorflow_reader(path))


Reader = Callable[[CheckpointVariable, tuple[int, ...]], Tensor]
"""``reader(weight, shape)`` returns the tensor, transposed if necessary, with that shape."""


@torch.no_grad()
def _copy(model: Bert, read: Reader) -> None:
    parameters = dict(model.named_parameters())
    vocabulary = model.architecture.vocabulary
    for weight in weights(model.architecture.layers):
        target = parameters[weight.parameter].data
        if weight.parameter in _BY_WORD:
            target[vocabulary:].zero_()
            target = target[:vocabulary]
        elif weight.part is not None:
            target = target.chunk(3)[weight.part]
        target.copy_(read(weight, tuple(target.shape)))


def find_checkpoint(assets_dir: Path, name: str) -> Path:
    """Return the path of the checkpoint ``name`` in ``assets_dir`` or a folder below it, for :func:`load_weights`.

    Raises:
        DataError: two folders have a checkpoint with this name.
    """
    path = assets_dir / name
    if Path(name).is_absolute():
        return path
    found = find_file(assets_dir, glob.escape(name if path.suffix == ".pt" else f"{name}.index"))
    return path if found is None else found.with_name(path.name)


def _tensorflow_reader(prefix: Path) -> Reader:
    first = ".data-00000-of-00001"
    published = prefix.with_name(f"{prefix.name}{PUBLISHED_DATA}")
    has_own_name = prefix.with_name(prefix.name + first).exists()
    is_published = not has_own_name and published.with_name(published.name + first).exists()
    bundle = TensorBundle(prefix, published if is_published else None)

    def read(weight: CheckpointVariable, shape: tuple[int, ...]) -> Tensor:
        expected = shape[::-1] if weight.transposed else shape
        entry = bundle.entries.get(weight.tf)
        if entry is not None and entry.shape != expected:
            raise _another_shape(bundle.index, weight.tf, entry.shape, expected)
        tensor = bundle.read(weight.tf)
        _check_values(bundle.index, weight.tf, tensor)
        return tensor.t() if weight.transposed else tensor

    return read


def _port_reader(path: Path) -> Reader:
    state = _load_state(path)

    def read(weight: CheckpointVariable, shape: tuple[int, ...]) -> Tensor:
        name = weight.torch if weight.torch in state else weight.torch.replace(".dense.", ".dense_act.")
        tensor = state.get(name)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: tensor {weight.torch} is missing")
        _check_values(path, name, tensor)
        found = tuple(tensor.shape)
        # conversions pad the vocabulary to multiples of 8 or 64
        if weight.parameter in _BY_WORD and found[1:] == shape[1:] and 0 <= found[0] - shape[0] < VOCABULARY_MULTIPLE:
            return tensor[: shape[0]]
        if found != shape:
            raise _another_shape(path, name, found, shape)
        return tensor

    return read


def _load_state(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file")
    content = read_values(path, "tensors")
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no state of a model, but a {type(content).__name__}")
    return state


def _check_values(file: Path, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{file}: tensor {name} has dtype {tensor.dtype}, and weights are floating point")
    if not tensor.isfinite().all():
        count = int((~tensor.isfinite()).sum())
        raise CheckpointError(
            f"{file}: tensor {name} has {count} of {tensor.numel()} values that are not finite: no run starts from it"
        )


def _another_shape(file: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        f"{file}: tensor {name} has shape {list(found)}, and the model needs {list(expected)}: "
        "it is the checkpoint of another model"
    )
