"""The same decoder on one rank, in float64, out of torch.nn.functional and torch.optim alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed.tensor_parallel.layers import Adapter
from common.ops.dropout.reference import keep_mask, scale_of_kept

SIZES = SimpleNamespace(layers=2, hidden=16, heads=8, kv_heads=4, head_size=4, feed_forward=24, vocabulary=40)
ADAPTER = Adapter(rank=3, alpha=6.0)
B, S = 2, 16
LANES = 2
"""Micro-batches of a step, over all replicas."""

STEPS = 3
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 2.0**-7, 0.1, 0.05  # the suite keeps the rate in fp32
DROPPED = 0.25
ROTATION = 100.0


@functools.cache
def weights() -> dict[str, Tensor]:
    """All parameters, by name."""
    E, D, r = SIZES.hidden, SIZES.head_size, ADAPTER.rank
    qkv, inner = (SIZES.heads + 2 * SIZES.kv_heads) * D, SIZES.heads * D
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (SIZES.vocabulary, E)}
    for n in range(SIZES.layers):
        layer = {
            "attention_norm.weight": (E,), "mlp_norm.weight": (E,), "qkv.weight": (qkv, E), "output.weight": (E, inner),
            "gate_up.weight": (2 * SIZES.feed_forward, E), "down.weight": (E, SIZES.feed_forward),
            "qkv.lora_a": (r, E), "qkv.lora_b": (qkv, r), "output.lora_a": (r, inner), "output.lora_b": (E, r),
        }  # fmt: skip
        shapes |= {f"layers.{n}.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (E,), "head.weight": (SIZES.vocabulary, E)}
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) * (0.4 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def inputs(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels (B, S) and the dropout's seed of a micro-batch; some labels are not scored."""
    generator = torch.Generator().manual_seed(100 + number)
    tokens_BS = torch.randint(0, SIZES.vocabulary, (B, S), generator=generator, dtype=torch.int32)
    labels_BS = torch.randint(0, SIZES.vocabulary, (B, S), generator=generator, dtype=torch.int32)
    labels_BS[torch.rand(B, S, generator=generator) < 0.3] = -1
    return tokens_BS, labels_BS, torch.tensor(number + 5)


def dropout_mask(seed: Tensor, site: int, rows: Tensor, columns: int) -> Tensor:
    """Factors of an adapter's input: 0 or that of kept elements, (rows, columns)."""
    elements = rows.unsqueeze(1) * columns + torch.arange(columns)
    return keep_mask(seed, site, elements, DROPPED).double() * scale_of_kept(DROPPED)


def rotate(x_BSHD: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, dimension i with i + D / 2, by complex numbers."""
    half = x_BSHD.shape[-1] // 2
    frequencies = ROTATION ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_SD = positions.double().unsqueeze(1) * frequencies
    rotated = torch.complex(x_BSHD[..., :half], x_BSHD[..., half:]) * torch.polar(
        torch.ones_like(angles_SD), angles_SD
    ).unsqueeze(1)
    return torch.cat((rotated.real, rotated.imag), -1)


def hidden(w: dict[str, Tensor], tokens_BS: Tensor, seed: Tensor) -> Tensor:
    """What the head sees, (B * S, E)."""
    E, H, K, D = SIZES.hidden, SIZES.heads, SIZES.kv_heads, SIZES.head_size
    rows = torch.arange(B * S)
    x = w["embedding.weight"][tokens_BS.flatten().long()]

    def adapted(name: str, x: Tensor, site: int) -> Tensor:
        u = (x * dropout_mask(seed, site, rows, x.shape[1])) @ w[f"{name}.lora_a"].t()
        return x @ w[f"{name}.weight"].t() + 2.0 * u @ w[f"{name}.lora_b"].t()

    for n in range(SIZES.layers):
        at = f"layers.{n}"
        y = F.rms_norm(x, (E,), w[f"{at}.attention_norm.weight"], 1e-5)
        q, k, v = adapted(f"{at}.qkv", y, 2 * n).split([H * D, K * D, K * D], 1)
        q, k = rotate(q.view(B, S, H, D), torch.arange(S)), rotate(k.view(B, S, K, D), torch.arange(S))
        k, v = (t.view(B, S, K, D).repeat_interleave(H // K, 2) for t in (k, v))
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + adapted(f"{at}.output", o.transpose(1, 2).reshape(B * S, H * D), 2 * n + 1)
        y = F.rms_norm(x, (E,), w[f"{at}.mlp_norm.weight"], 1e-5)
        gate, up = (y @ w[f"{at}.gate_up.weight"].t()).split(SIZES.feed_forward, 1)
        x = x + (F.silu(gate) * up) @ w[f"{at}.down.weight"].t()
    return F.rms_norm(x, (E,), w["norm.weight"], 1e-5)


def micro_batch(w: dict[str, Tensor], number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss, losses (B, S) and hidden vectors (B, S, E)."""
    tokens_BS, labels_BS, seed = inputs(number)
    hidden_TE = hidden(w, tokens_BS, seed)
    losses_T = F.cross_entropy(
        hidden_TE @ w["head.weight"].t(), labels_BS.flatten().long(), ignore_index=-1, reduction="none"
    )
    return losses_T.sum() / (labels_BS != -1).sum(), losses_T.view(B, S), hidden_TE.view(B, S, -1)


def one_micro_batch() -> dict[str, Any]:
    """What test_split_decoder.py expects of micro-batch 0."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights().items()}
    loss, losses_BS, hidden_BSE = micro_batch(leaves, 0)
    loss.backward()
    return {
        "loss": loss.detach(),
        "losses": losses_BS.detach(),
        "hidden": hidden_BSE.detach(),
        "gradients": {name: leaf.grad for name, leaf in leaves.items()},
    }


def train(when: str | None) -> dict[str, Any]:
    """Adapters after some steps, clipped before or after micro-batches are averaged, and the norms of the averages."""
    w = {name: tensor.clone().requires_grad_("lora" in name) for name, tensor in weights().items()}
    learning = [tensor for tensor in w.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(learning, LEARNING_RATE, (0.9, 0.999), 1e-8, WEIGHT_DECAY)
    norms = []
    for step in range(STEPS):
        means = [torch.zeros_like(tensor) for tensor in learning]
        for number in range(LANES):
            optimizer.zero_grad()
            micro_batch(w, step * LANES + number)[0].backward()
            if when == "before_reduction":
                torch.nn.utils.clip_grad_norm_(learning, MAX_NORM)
            for mean, tensor in zip(means, learning, strict=True):
                mean += tensor.grad / LANES
        for mean, tensor in zip(means, learning, strict=True):
            tensor.grad = mean
        norm = torch.nn.utils.clip_grad_norm_(learning, MAX_NORM if when == "after_reduction" else 1e9)
        norms.append(norm.item())
        optimizer.step()
    return {"weights": {name: t.detach() for name, t in w.items() if t.requires_grad}, "norms": norms}
