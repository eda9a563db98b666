"""A small published checkpoint, put together with numpy, and what every rank should have of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.distributed.layout import Layout
from common.distributed.pipeline.order import layers_of
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.language.network import Decoder
from common.optim.adaptive import AdamW
from common.optim.learning_rate import constant
from common.optim.optimizer import Optimizer, ParameterGroup
from tests.benchmarks.gpt3.small_gpt3 import architecture

SHAPE = architecture(layers=4)
WORDS, POSITIONS = 176, 48
"""Rows of the tables: more than the network has words and positions, and not as many as any tp pads to."""
STEPS = 4000
PREFIXES = {
    "reference": {
        "weights": "language_model.", "masters": "optimizer.state.fp32_from_fp16.language_model.",
        "exp_avg": "optimizer.state.exp_avg.language_model.",
        "exp_avg_sq": "optimizer.state.exp_avg_sq.language_model.",
    },
    "nvidia": {
        "weights": "model.", "masters": "optimizer.state.fp32_param.model.",
        "exp_avg": "optimizer.state.exp_avg.model.", "exp_avg_sq": "optimizer.state.exp_avg_sq.model.",
    },
}  # fmt: skip
LAYER_NAMES = {
    "attention_norm.weight": ("input_layernorm.weight", "self_attention.layernorm_qkv.layer_norm_weight"),
    "attention_norm.bias": ("input_layernorm.bias", "self_attention.layernorm_qkv.layer_norm_bias"),
    "qkv.weight": ("self_attention.query_key_value.weight", "self_attention.layernorm_qkv.weight"),
    "qkv.bias": ("self_attention.query_key_value.bias", "self_attention.layernorm_qkv.bias"),
    "output.weight": ("self_attention.dense.weight", "self_attention.proj.weight"),
    "output.bias": ("self_attention.dense.bias", "self_attention.proj.bias"),
    "mlp_norm.weight": ("post_attention_layernorm.weight", "layernorm_mlp.layer_norm_weight"),
    "mlp_norm.bias": ("post_attention_layernorm.bias", "layernorm_mlp.layer_norm_bias"),
    "up.weight": ("mlp.dense_h_to_4h.weight", "layernorm_mlp.fc1_weight"),
    "up.bias": ("mlp.dense_h_to_4h.bias", "layernorm_mlp.fc1_bias"),
    "down.weight": ("mlp.dense_4h_to_h.weight", "layernorm_mlp.fc2_weight"),
    "down.bias": ("mlp.dense_4h_to_h.bias", "layernorm_mlp.fc2_bias"),
}
OTHER_NAMES = {
    "embedding.weight": ("embedding.word_embeddings.weight",) * 2,
    "positions.weight": ("embedding.position_embeddings.weight",) * 2,
    "norm.weight": ("encoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    "norm.bias": ("encoder.final_layernorm.bias", "decoder.final_layernorm.bias"),
}


def whole_tensors() -> dict[str, dict[str, Tensor]]:
    """Kind to our name to the published values in fp32: tables with all their rows."""
    shapes = {name: tuple(parameter.shape) for name, parameter in Decoder(SHAPE).named_parameters()}
    shapes |= {"embedding.weight": (WORDS, SHAPE.hidden), "positions.weight": (POSITIONS, SHAPE.hidden)}
    found: dict[str, dict[str, Tensor]] = {}
    for number, kind in enumerate(("masters", "exp_avg", "exp_avg_sq")):
        generator = torch.Generator().manual_seed(number)
        found[kind] = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return found


def write_published(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], layers: int, steps: int) -> None:
    """Write a checkpoint in the reference's form with numpy alone: bfloat16 if ``tensors`` has masters, else fp32.

    Args:
        tensors: kind (weights, masters, exp_avg, exp_avg_sq) to our name to whole tensor.
        steps: number of optimizer steps of the checkpoint.
    """
    for kind, named in tensors.items():
        half, prefix = kind == "weights" and "masters" in tensors, PREFIXES["reference"][kind]
        for ours, (theirs, _) in OTHER_NAMES.items():
            array(folder / f"{prefix}{theirs}", named[ours], half)
        for ours, (theirs, _) in LAYER_NAMES.items():
            stacked = torch.stack([named[f"layers.{layer}.{ours}"] for layer in range(layers)])
            array(folder / f"{prefix}encoder.layers.{theirs}", stacked, half, stacked=True)
    torch.save({"optimizer": {"optimizer": {"param_groups": [{"lr": 6e-5, "step": steps}]}}}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')


def renamed(folder: Path, copy: Path) -> None:
    """The same arrays, linked, as NVIDIA's submission calls them."""
    copy.mkdir()
    layers = {f"encoder.layers.{old}": f"decoder.layers.{new}" for old, new in LAYER_NAMES.values()}
    for kind in PREFIXES["reference"]:
        for old, new in [*OTHER_NAMES.values(), *layers.items()]:
            names = (f"{PREFIXES[naming][kind]}{name}" for naming, name in (("reference", old), ("nvidia", new)))
            theirs, ours = names
            (copy / ours).symlink_to(folder / theirs)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(folder / name, copy)


def in_fp32(folder: Path, copy: Path) -> None:
    """The reference's set in fp32, linked: what are masters there are weights here."""
    beside(folder, copy)
    for path in copy.glob(f"{PREFIXES['reference']['masters']}*"):
        name = path.name.replace(PREFIXES["reference"]["masters"], PREFIXES["reference"]["weights"])
        (copy / name).unlink()
        path.rename(copy / name)


def beside(folder: Path, copy: Path) -> Path:
    """A copy whose arrays are links to those of ``folder``, which are not to be written to."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_dir():
            (copy / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, copy)
    return copy


def own(path: Path) -> Path:
    """An array of such a copy, no longer a link."""
    linked = path.resolve()
    path.unlink()
    shutil.copytree(linked, path)
    return path


def array(folder: Path, values: Tensor, half: bool, stacked: bool = False) -> None:
    """In chunks of one layer and an eighth of each dimension; what reaches beyond the array is NaN."""
    folder.mkdir(parents=True)
    eighths = [size // 8 if size % 8 == 0 else -(-size // 3) for size in values.shape[stacked:]]
    chunks = [1] * stacked + eighths
    described = {
        "chunks": chunks, "compressor": None, "dimension_separator": ".", "dtype": "bfloat16" if half else "<f4",
        "fill_value": None, "filters": None, "order": "C", "shape": list(values.shape), "zarr_format": 2,
    }  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(described))
    grid = [-(-size // chunk) for size, chunk in zip(values.shape, chunks, strict=True)]
    numbers = (values.bfloat16().view(torch.int16) if half else values).numpy()
    padded = np.full([n * c for n, c in zip(grid, chunks, strict=True)], -1 if half else np.nan, numbers.dtype)
    padded[tuple(map(slice, values.shape))] = numbers
    for index in np.ndindex(*grid):
        chunk = padded[tuple(slice(n * c, (n + 1) * c) for n, c in zip(index, chunks, strict=True))]
        chunk.tofile(folder / ".".join(map(str, index)))


class Trainee:
    """The part of the network that a rank has, with AdamW; its weights are something else before it loads."""

    def __init__(self, layout: Layout, parallel: TensorParallel, chunks: int = 1, **options: Any) -> None:
        self.layout, stage, stages = layout, layout.coordinate("pp"), layout.size("pp")
        parts = layers_of(SHAPE.layers, stage, stages, chunks)
        first, last, half = stage == 0, stage == stages - 1, torch.bfloat16
        self.model = Decoder(SHAPE, layout.device, half, parallel=parallel, parts=parts, first=first, last=last)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        named = dict(self.model.named_parameters())
        tied = {name: named.pop(name) for name in ("embedding.weight",) if name in named}
        groups = [ParameterGroup(named), ParameterGroup(tied, tied_over=("pp",))]
        self.optimizer = Optimizer(groups, AdamW(0.9, 0.95), constant(0.1), layout, grad_divisor=1.0, **options)

    def expected(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
        """Name, kind and values of this rank's part of whole tensors, cut by hand."""
        for name in dict(self.model.named_parameters()):
            for kind in ("masters", "exp_avg", "exp_avg_sq"):
                yield name, kind, own_part(name, tensors[kind][name], self.layout)


def own_part(name: str, whole: Tensor, layout: Layout) -> Tensor:
    """What a rank has of a published tensor."""
    ranks, index = layout.size("tp"), layout.coordinate("tp")
    if name == "embedding.weight":
        rows = -(-SHAPE.vocabulary // (128 * ranks)) * 128 * ranks
        padded = torch.zeros(rows, SHAPE.hidden)
        padded[: SHAPE.vocabulary] = whole[: SHAPE.vocabulary]
        return padded.chunk(ranks)[index]
    if name == "positions.weight":
        return whole[: SHAPE.positions]
    if name.endswith(("qkv.weight", "qkv.bias", "up.weight", "up.bias")):
        return whole.chunk(ranks)[index]
    if name.endswith(("output.weight", "down.weight")):
        return whole.chunk(ranks, 1)[index]
    return whole
