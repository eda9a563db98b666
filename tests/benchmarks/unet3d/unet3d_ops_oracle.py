"""Norm, upsampling, last convolution and loss of 3D U-Net, and their gradients, as formulas in float64.

They use neither the code under test nor autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch import multiprocessing as mp
from volume_split_ranks import run_rank

VOLUME = (2, 3, 4)


def instance_norm_relu(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, epsilon: float = 1e-5) -> dict[str, Tensor]:
    """Return y and gradients: dx = w / s * (dz - mean(dz) - xhat * mean(dz * xhat)), dz = dy where y > 0."""
    x, weight, bias, dy = (value.double() for value in (x, weight, bias, dy))
    w, b = weight.view(1, -1, 1, 1, 1), bias.view(1, -1, 1, 1, 1)
    mean = x.mean(VOLUME, keepdim=True)
    deviation = ((x - mean).square().mean(VOLUME, keepdim=True) + epsilon).sqrt()
    normal = (x - mean) / deviation
    z = normal * w + b
    dz = dy * (z > 0)
    means = dz.mean(VOLUME, keepdim=True), (dz * normal).mean(VOLUME, keepdim=True)
    return {
        "y": z.clamp(min=0),
        "x": w / deviation * (dz - means[0] - normal * means[1]),
        "weight": (dz * normal).sum((0, *VOLUME)),
        "bias": dz.sum((0, *VOLUME)),
    }


def upsample(x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return result and gradients; each corner of a voxel is a product of its channels with that corner's weights."""
    x, weight, bias, skip, dy = (value.double() for value in (x, weight, bias, skip, dy))
    channels = weight.shape[1]
    up, d_up = torch.zeros_like(skip), dy[:, :channels]
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for corner in itertools.product(range(2), repeat=3):
        there = (slice(None), slice(None), *(slice(first, None, 2) for first in corner))
        filters = weight[:, :, *corner]
        up[there] = torch.einsum("nidhw,io->nodhw", x, filters) + bias.view(1, -1, 1, 1, 1)
        dx += torch.einsum("nodhw,io->nidhw", d_up[there], filters)
        dweight[:, :, *corner] = torch.einsum("nidhw,nodhw->io", x, d_up[there])
    return {
        "y": torch.stack((up, skip), 1).flatten(1, 2),
        "x": dx,
        "weight": dweight,
        "bias": d_up.sum((0, *VOLUME)),
        "skip": dy[:, channels:],
    }


def output_convolution(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return result and gradients of a product of channels with the weights of the classes."""
    x, weight, bias, dy = (value.double() for value in (x, weight, bias, dy))
    classes = weight.flatten(1)
    return {
        "y": torch.einsum("ncdhw,kc->nkdhw", x, classes) + bias.view(1, -1, 1, 1, 1),
        "x": torch.einsum("nkdhw,kc->ncdhw", dy, classes),
        "weight": torch.einsum("nkdhw,ncdhw->kc", dy, x).view_as(weight),
        "bias": dy.sum((0, *VOLUME)),
    }


def dice_cross_entropy(logits: Tensor, label: Tensor, smooth: float = 1e-6) -> dict[str, Tensor]:
    """Return the loss, and its gradient by the chain rule through the softmax."""
    logits = logits.double()
    samples, classes = logits.shape[:2]
    e = (logits - logits.amax(1, keepdim=True)).exp()
    p = e / e.sum(1, keepdim=True)
    t = torch.stack([(label == k).double() for k in range(classes)], 1)
    both, total = (p * t).sum(VOLUME), p.sum(VOLUME) + t.sum(VOLUME)
    dice = (2 * both + smooth) / (total + smooth)
    entropy = -(t * p.log()).sum() / label.numel()
    loss = ((1 - dice[:, 1:]).mean() + entropy) / 2
    shape = (samples, classes, 1, 1, 1)
    d_p = -(2 * t - dice.view(shape)) / (total + smooth).view(shape) / (2 * samples * (classes - 1))
    d_p[:, 0] = 0
    gradient = p * (d_p - (p * d_p).sum(1, keepdim=True)) + (p - t) / (2 * label.numel())
    return {"loss": loss, "logits": gradient}


def norm_case(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """Return input, parameters and gradient of instance norm; means and deviations differ between channels."""
    generator = torch.Generator().manual_seed(seed)
    channels = (1, shape[1], 1, 1, 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x = normal(*shape) * (1 + normal(*channels).abs()) + normal(*channels) + mean
    values = {"x": x, "weight": 1 + normal(shape[1]) / 2, "bias": normal(shape[1]) / 2, "dy": normal(*shape)}
    return {name: value.to(dtype) for name, value in values.items()}


def upsample_case(shape: tuple[int, ...], channels: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs and gradient of upsampling from ``shape`` to ``channels`` channels."""
    samples, channels_in, *volume = shape
    fine = [2 * size for size in volume]
    shapes = {
        "x": shape,
        "weight": (channels_in, channels, 2, 2, 2),
        "bias": (channels,),
        "skip": (samples, channels, *fine),
        "dy": (samples, 2 * channels, *fine),
    }
    return normal(shapes, dtype, seed)


def output_case(shape: tuple[int, ...], classes: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs and gradient of the last convolution."""
    samples, channels, *volume = shape
    shapes = {
        "x": shape,
        "weight": (classes, channels, 1, 1, 1),
        "bias": (classes,),
        "dy": (samples, classes, *volume),
    }
    return normal(shapes, dtype, seed)


def normal(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return normal values of all shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tuple(size), generator=generator, dtype=torch.float64).to(dtype)
        for name, size in shapes.items()
    }


def values_and_gradients(function: Callable[..., Tensor], case: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``y`` and the gradients of all inputs of ``function``; ``case`` has them in order, and then ``dy``."""
    leaves = {name: value.detach().requires_grad_() for name, value in case.items() if name != "dy"}
    y = function(*leaves.values())
    gradients = torch.autograd.grad(y, list(leaves.values()), case["dy"])
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def loss_case(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return logits (N, 3, D, H, W) and labels; the second sample lacks class 1, and the third is all background."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    label = torch.randint(3, (shape[0], *shape[2:]), generator=generator, dtype=torch.uint8)
    label[1:2] *= label[1:2] == 2
    label[2:3] = 0
    return {"logits": logits.to(dtype), "label": label}


def run_ranks(folder: Path, ranks: int, cases: dict) -> list[dict]:
    """Run :mod:`volume_split_ranks` on slabs of the cases; return the results of all ranks."""
    torch.save(cases, folder / "cases.pt")
    mp.start_processes(run_rank, args=(ranks, str(folder)), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def joined(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join slabs along D and sum partial gradients of parameters; common results must be equal."""
    whole = {}
    for name, first in found[0].items():
        parts = [part[name] for part in found]
        if first.dim() == 5:
            whole[name] = torch.cat(parts, 2)
        elif name == "loss":
            assert all(torch.equal(part, first) for part in parts)
            whole[name] = first
        else:
            whole[name] = torch.stack(parts).sum(0)
    return whole


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
