"""A small decoder out of split layers, and what each rank finds; test_split_decoder.py compares it with one rank's.

Shapes: B rows, S tokens of a row, L those of one context-parallel rank, T = B L, s tokens of one tensor-parallel rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from split_decoder_oracle import (
    ADAPTER,
    LANES,
    LEARNING_RATE,
    MAX_NORM,
    SIZES,
    STEPS,
    WEIGHT_DECAY,
    B,
    S,
    dropout_mask,
    inputs,
    rotate,
    weights,
)  # fmt: skip
from torch import Tensor, nn

from common.distributed.context_parallel import ContextSplit, SplitAttention, attention
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, partial_parameters
from common.distributed.tensor_parallel.ranks import TensorParallel, gate_up_parts, qkv_parts
from common.distributed.tensor_parallel.vocabulary import VocabularyParallelEmbedding, next_token_loss
from common.distributed.tensor_split import TensorSplit
from common.ops import causal_attention
from common.optim.adaptive import AdamW
from common.optim.learning_rate import constant
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.train_step import apply_gradients

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {"tp2": {"tp": 2}, "cp2": {"cp": 2}},
    4: {"tp4": {"tp": 4}, "cp4": {"cp": 4}, "tp2xcp2": {"cp": 2, "tp": 2}, "dp2xtp2": {"dp": 2, "tp": 2}},
}
CLIPPED_FIRST = ("tp2", "tp2xcp2", "dp2xtp2")
"""Where clipping each micro-batch before gradients are reduced is tried too."""

CHUNK = 12
"""Tokens of a chunk of the head; it does not divide them all."""


class Norm(nn.Module):
    """Sees the rank's own tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZES.hidden, dtype=torch.float64))
        self.partial_over = {"weight": ("tp",)}

    def forward(self, x_sE: Tensor) -> Tensor:
        return F.rms_norm(x_sE, (SIZES.hidden,), self.weight, 1e-5)


class Layer(nn.Module):
    def __init__(self, parallel: TensorParallel, split: ContextSplit) -> None:
        super().__init__()
        self.parallel, self.split = parallel, split
        E, heads, kv_heads, D = SIZES.hidden, SIZES.heads, SIZES.kv_heads, SIZES.head_size
        double: dict[str, Any] = {"dtype": torch.float64}
        self.attention_norm, self.mlp_norm = Norm(), Norm()
        parts = qkv_parts(heads, kv_heads, D, parallel)
        self.qkv = ColumnParallelLinear(E, parts, parallel, adapter=ADAPTER, **double)
        self.output = RowParallelLinear(heads * D, E, parallel, adapter=ADAPTER, **double)
        self.gate_up = ColumnParallelLinear(E, gate_up_parts(SIZES.feed_forward, parallel), parallel, **double)
        self.down = RowParallelLinear(SIZES.feed_forward, E, parallel, **double)

    def forward(self, x_sE: Tensor, site: int, seed: Tensor, rows_T: Tensor) -> Tensor:
        def drop(x: Tensor, rows: Tensor, columns: int, first: int, site: int) -> Tensor:
            return x * dropout_mask(seed, site, rows, columns)[:, first : first + x.shape[1]]

        ranks, D = self.parallel.size, SIZES.head_size
        drops = [functools.partial(drop, site=2 * site + which) for which in range(2)]
        qkv_TN = self.qkv(self.attention_norm(x_sE), drops[0], rows_T)
        heads, kv_heads = SIZES.heads // ranks, SIZES.kv_heads // ranks
        qkv_BLHD = qkv_TN.view(-1, self.split.local_length, heads + 2 * kv_heads, D)
        q_BLHD, k_BLKD, v_BLKD = qkv_BLHD.split([heads, kv_heads, kv_heads], 2)
        positions = self.split.positions()
        q_BLHD, k_BLKD = rotate(q_BLHD, positions), rotate(k_BLKD, positions)
        o_BLHD = attention(q_BLHD, k_BLKD, v_BLKD, self.split, attend)
        x_sE = x_sE + self.output(o_BLHD.flatten(2).flatten(0, 1), drops[1], rows_T)
        gate_TF, up_TF = self.gate_up(self.mlp_norm(x_sE)).chunk(2, 1)
        return x_sE + self.down(F.silu(gate_TF) * up_TF)


class Decoder(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.parallel = TensorParallel.from_layout(layout)
        self.split = ContextSplit.from_layout(layout, S)
        self.embedding = VocabularyParallelEmbedding(SIZES.vocabulary, SIZES.hidden, self.parallel, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(self.parallel, self.split) for _ in range(SIZES.layers))
        self.norm = Norm()
        self.head = VocabularyParallelEmbedding(SIZES.vocabulary, SIZES.hidden, self.parallel, dtype=torch.float64)
        for name, full in weights().items():
            with torch.no_grad():
                split = self.split_of(name)
                self.get_parameter(name).copy_(full if split is None else split.local_of(full))

    def split_of(self, name: str) -> TensorSplit | None:
        """How the ranks share a parameter, as its layer says."""
        layer, _, own_name = name.rpartition(".")
        splits: dict[str, TensorSplit] = getattr(self.get_submodule(layer), "splits", {})
        return splits.get(own_name)

    def freeze_base(self) -> dict[str, nn.Parameter]:
        """The adapters, which are all that learns."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora" in name)
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def hidden(self, tokens_BS: Tensor, seed: Tensor) -> Tensor:
        positions = self.split.positions()
        rows_T = (torch.arange(B).unsqueeze(1) * S + positions).flatten()
        x_sE = self.embedding(self.split.own_tokens(tokens_BS).flatten())
        for site, layer in enumerate(self.layers):
            x_sE = layer(x_sE, site, seed, rows_T)
        return self.norm(x_sE)

    def loss(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rank's part of a micro-batch's mean, losses (B, L) and hidden vectors (s, E)."""
        tokens_BS, labels_BS, seed = inputs(number)
        hidden_sE = self.hidden(tokens_BS, seed)
        labels_BL = self.split.own_tokens(labels_BS)
        losses_T = next_token_loss(hidden_sE, self.head.weight, labels_BL.flatten(), self.parallel, CHUNK)
        scored = self.split.scored((labels_BL != -1).sum())
        return losses_T.sum() / scored, losses_T.view(B, -1).detach(), hidden_sE.detach()

    def micro_batches(self) -> range:
        """Micro-batches of this replica."""
        return range(self.layout.index("dp"), LANES, self.layout.size("dp"))

    def in_full(self, name: str, local: Tensor) -> Tensor:
        """A whole parameter, or what has its shape, from those of all ``tp`` ranks."""
        split = self.split_of(name)
        if split is None or self.parallel.size == 1:
            return local.clone()
        return split.full_of(self.parallel.all_gather(local.unsqueeze(0).contiguous()).unbind())

    def row_order(self, local: Tensor) -> Tensor:
        """Whole rows (B, S, ...) from those of all ``cp`` ranks."""
        if self.split.group is None:
            return local
        own = local.contiguous()
        gathered = own.new_empty(self.split.ranks, *own.shape)
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own, group=self.split.group)
        whole = own.new_empty(B, S, *own.shape[2:])
        C = S // (2 * self.split.ranks)
        for rank, part in enumerate(gathered):
            whole[:, rank * C : (rank + 1) * C] = part[:, :C]
            whole[:, S - (rank + 1) * C : S - rank * C] = part[:, C:]
        return whole


def attend(q_BnHD: Tensor, k_BmKD: Tensor, v_BmKD: Tensor) -> Tensor:
    n, m = q_BnHD.shape[1], k_BmKD.shape[1]
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    q, k, v = (x.transpose(1, 2) for x in (q_BnHD, k_BmKD, v_BmKD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def one_micro_batch(layout: Layout, frozen: bool) -> dict[str, Any]:
    """Whole result, losses and gradients of micro-batch 0; on every replica the same."""
    model = Decoder(layout)
    if frozen:
        model.freeze_base()
    part, losses_BL, hidden_sE = model.loss(0)
    part.backward()
    part = part.detach()
    if model.split.group is not None:
        dist.all_reduce(part, group=model.split.group)
    partial, gradients = partial_parameters(model), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        for group in (layout.group("cp"), *(layout.group(axis) for axis in partial.get(name, ()))):
            if group is not None:
                dist.all_reduce(gradient, group=group)
        gradients[name] = model.in_full(name, gradient)
    hidden_BLE = model.parallel.all_gather(hidden_sE).view(B, -1, SIZES.hidden)
    return {
        "loss": part,
        "losses": model.row_order(losses_BL),
        "hidden": model.row_order(hidden_BLE),
        "gradients": gradients,
    }


def train(layout: Layout, when: str, **options: Any) -> dict[str, Any]:
    """Adapters, and the norm before the clip, after some steps of the suite's optimizer."""
    model = Decoder(layout)
    adapters, partial = model.freeze_base(), partial_parameters(model)
    groups = [
        ParameterGroup({n: p for n, p in adapters.items() if n not in partial}, WEIGHT_DECAY),
        ParameterGroup({n: p for n, p in adapters.items() if n in partial}, WEIGHT_DECAY, summed_over=("tp",)),
    ]
    micro_batches = model.micro_batches()
    optimizer = Optimizer(
        groups, AdamW(0.9, 0.999, 1e-8), constant(LEARNING_RATE), layout, grad_divisor=LANES, bucket_bytes=4000,
        micro_batches=len(micro_batches), clip=ClipNorm(MAX_NORM, when), **options,
    )  # fmt: skip
    norms = []
    for step in range(STEPS):
        optimizer.begin()
        for number in micro_batches:
            if number == micro_batches[-1]:
                optimizer.arm()
            model.loss(step * LANES + number)[0].backward()
            optimizer.collect()
        apply_gradients([optimizer], torch.tensor(0.0))
        norms.append(optimizer.metrics.get("gradient_norm", torch.zeros(())).item())
    optimizer.materialize()
    trained = {name: model.in_full(name, parameter.detach()) for name, parameter in adapters.items()}
    return {"weights": trained, "norms": norms}


def explicit_attention(layout: Layout) -> dict[str, tuple[Tensor, ...]]:
    """Result and gradients of attention with autograd, and with a backward pass that is called."""
    split = ContextSplit.from_layout(layout, S)
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(B, S, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)]
    q, k, v, do = (split.own_tokens(x) for x in whole)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, split, attend)
    gradients = torch.autograd.grad((o * do).sum(), leaves)

    explicit = SplitAttention(causal_attention.CAUSAL_ATTENTION.reference, q.shape[-1] ** -0.5, split)
    k, v = split.all_gather_kv(k, v)
    o_called, kept = explicit.forward(q, k, v)
    dq, gradients_of_kv = explicit.backward(do, q, k, v, o_called, kept)
    return {"autograd": (o.detach(), *gradients), "called": (o_called, dq, *gradients_of_kv())}


def movements(layout: Layout) -> dict[str, Any]:
    """Tokens gathered and scattered; rank r has r + 1 everywhere, and column 1 twice that."""
    parallel = TensorParallel.from_layout(layout)
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.float8_e4m3fn):
        own = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (parallel.index + 1)).to(dtype)
        gathered = parallel.all_gather(own)
        found[f"gathered {dtype}"] = gathered.float()
        if dtype != torch.float8_e4m3fn:
            found[f"scattered {dtype}"] = parallel.reduce_scatter(gathered).float()
    scales = torch.tensor([2.0 + parallel.index, 9.0 - parallel.index])
    parallel.agree_on_scales_(scales)
    found["scales"] = scales.tolist()
    return found


def learning_head_in_bf16(layout: Layout) -> dict[str, Tensor]:
    """Losses and gradients, whole, of a head in bfloat16 that learns and of a frozen one."""
    parallel = TensorParallel.from_layout(layout)
    tokens_BS, labels_BS, _ = inputs(0)
    hidden_TE, head_VE = (weights()[n].bfloat16() for n in ("embedding.weight", "head.weight"))
    hidden_TE = hidden_TE[tokens_BS.flatten()] * 2
    found: dict[str, Tensor] = {}
    for case, learns in (("learns", True), ("frozen", False)):
        hidden = parallel.own_tokens(hidden_TE).clone().requires_grad_()
        head = head_VE.chunk(parallel.size)[parallel.index].clone().requires_grad_(learns)
        losses_T = next_token_loss(hidden, head, labels_BS.flatten(), parallel, CHUNK)
        (losses_T * torch.linspace(0, 2, B * S)).sum().backward()
        assert hidden.grad is not None
        found[f"{case}.losses"], found[f"{case}.hidden"] = losses_T.detach(), parallel.all_gather(hidden.grad)
        if learns:
            assert head.grad is not None
            found["head"] = parallel.all_gather(head.grad)
    return found


def run_rank(rank: int, world: int, _: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, axes in LAYOUTS[world].items():
        layout = Layout(axes, rank)
        for frozen in (False, True):
            results[f"micro-batch/{frozen}/{name}"] = one_micro_batch(layout, frozen)
        results[f"train/after_reduction/{name}"] = train(layout, "after_reduction")
        if name in CLIPPED_FIRST:
            results[f"train/before_reduction/{name}"] = train(layout, "before_reduction")
        if layout.size("cp") > 1:
            results[f"attention/{name}"] = explicit_attention(layout)
        if layout.sizes["tp"] == world:
            results["movements"] = movements(layout)
            results["head"] = learning_head_in_bf16(layout)
        if layout.size("dp") > 1:
            results[f"train/shards/{name}"] = train(layout, "after_reduction", shard="all")
    return results
