"""The relational graph attention network.

Three convolutions, each a graph attention (Velickovic et al., arXiv:1710.10903) for every relation, whose results are
summed over the relations into a type (HeteroConv of GATConv in PyTorch Geometric 2.4). A relation has one weight for
sources and targets; no self-loops are added, no attention is dropped, and nothing is added from the layer before. A
relation's bias reaches all targets of its type, also those without an edge in it. Between convolutions come leaky ReLU
and dropout; the classifier reads the seeds.

Shapes: see :mod:`benchmarks.rgat.block`; K inputs and D = A x d outputs of a convolution, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rgat.block import Block
from benchmarks.rgat.ops.edge_attention import EDGE_ATTENTION
from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention
from benchmarks.rgat.ops.projection import PROJECTION
from benchmarks.rgat.ops.projection.reference import Projection
from benchmarks.rgat.ops.sample import SAMPLE
from benchmarks.rgat.schema import Schema
from common.config.ranges import AtLeast, FiniteNotNegative, ProbabilityBelowOne
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import Operation, OperationRequest, select
from common.ops.triton_support import widen

DROPOUT_SITE = 1 << 16
"""Call site of the first dropout, beyond those at which neighbours are drawn with the same seed."""


@dataclass(frozen=True)
class Architecture:
    """What the rules fix of the network.

    Attributes:
        feature_size: inputs of the first convolution.
        heads, head_size: of every convolution, whose outputs are those of all heads side by side.
        classes: of the seeds.
        attention_slope: of the leaky ReLU on the attention's logits.
        activation_slope: of the one between convolutions.
        dropout: probability, after the latter.
    """

    feature_size: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    head_size: Annotated[int, AtLeast(1)]
    classes: Annotated[int, AtLeast(2)]
    attention_slope: Annotated[float, FiniteNotNegative]
    activation_slope: Annotated[float, FiniteNotNegative]
    dropout: Annotated[float, ProbabilityBelowOne]

    @property
    def width(self) -> int:
        """D: outputs of a convolution."""
        return self.heads * self.head_size


OPERATIONS: dict[str, Operation] = {
    "projection": PROJECTION,
    "edge_attention": EDGE_ATTENTION,
    "sample": SAMPLE,
}
"""Operations whose implementation ``model.implementations`` can choose."""


class Operations(NamedTuple):
    """What a convolution computes with."""

    projection: Projection
    edge_attention: EdgeAttention


class Epilogue(NamedTuple):
    """What follows the sum over relations.

    Attributes:
        slope: of the leaky ReLU; None for none.
        dropout: after it; None for none.
    """

    slope: float | None
    dropout: DropoutMask | None


class Convolution(nn.Module):
    """A graph attention for each relation, summed over those into a type.

    Args:
        schema: of the graph.
        level: hops within which its inputs lie.
        inputs: K.
        architecture: of the network.
        operations: what it computes with.
        deterministic: no sum depends on the order in which programs run.

    Attributes:
        weight: [R, K, D]: ``x W`` projects the sources.
        att_src, att_dst: [R, A, d]: the logit of an edge is ``leaky(att_src . W x_source + att_dst . W x_target)``.
        bias: [R, D].
    """

    def __init__(
        self,
        schema: Schema,
        level: int,
        inputs: int,
        architecture: Architecture,
        operations: Operations,
        deterministic: bool,
    ) -> None:
        super().__init__()
        relations, heads, size = len(schema.relations), architecture.heads, architecture.head_size
        self.level = level
        self.weight = nn.Parameter(torch.empty(relations, inputs, heads * size))
        self.att_src = nn.Parameter(torch.empty(relations, heads, size))
        self.att_dst = nn.Parameter(torch.empty(relations, heads, size))
        self.bias = nn.Parameter(torch.zeros(relations, heads * size))
        self._slope = architecture.attention_slope
        self._operations, self._deterministic = operations, deterministic

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Uniform weights by Glorot's rule over the last two dimensions, as PyTorch Geometric draws them; no bias."""
        for parameter in (self.weight, self.att_src, self.att_dst):
            bound = math.sqrt(6.0 / (parameter.shape[-2] + parameter.shape[-1]))
            parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x_NK: Tensor, block: Block, epilogue: Epilogue) -> Tensor:
        """Nodes within ``level`` hops to those within one hop less, each type one behind the other.

        Args:
            x_NK: float8_e4m3fn, or a dtype of 16 or 32 bits; [shape.node_offsets(level)[-1], K].
            block: the edges.
            epilogue: what follows.

        Returns:
            [shape.node_offsets(level - 1)[-1], D], in the dtype of the weights; zeros where no node is.
        """
        how = (block, self.level, self._slope, epilogue, self._operations, self._deterministic)
        return _Convolve.apply(x_NK, self.weight, self.att_src, self.att_dst, self.bias, how)


class _Convolve(torch.autograd.Function):
    """The convolution with its backward pass written out: what autograd would keep does not fit.

    Targets are never projected: their share of the logits is ``x . (W att_dst)``, four numbers for each relation.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, weight_RKD: Tensor, source_RAd: Tensor, target_RAd: Tensor, bias_RD: Tensor, how: Any
    ) -> Tensor:
        block, level, slope, epilogue, (products, edges), _ = how
        v_RKA = _folded(weight_RKD, target_RAd)
        z_MD, source_term_MA = products.project(x_NK, block, level, weight_RKD, source_RAd)
        target_term_TA = products.target_terms(x_NK, block, level, v_RKA)
        out_PD, log_sum_TA = edges.forward(
            z_MD,
            source_term_MA,
            target_term_TA,
            bias_RD,
            block,
            level,
            slope=slope,
            activation_slope=epilogue.slope,
            dropout=epilogue.dropout,
        )
        ctx.how = how
        ctx.save_for_backward(
            x_NK, weight_RKD, source_RAd, target_RAd, v_RKA, z_MD, source_term_MA, target_term_TA, out_PD, log_sum_TA
        )
        return out_PD

    @staticmethod
    def backward(ctx: Any, dout_PD: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_RKD, source_RAd, target_RAd, v_RKA, z_MD, source_term_MA, target_term_TA, out_PD, log_sum_TA = (
            ctx.saved_tensors
        )
        block, level, slope, epilogue, (products, edges), deterministic = ctx.how
        dz_MD, dtarget_term_TA, dbias_RD, dsource_RAd = edges.backward(
            dout_PD.contiguous(),
            out_PD,
            z_MD,
            source_term_MA,
            target_term_TA,
            log_sum_TA,
            source_RAd,
            block,
            level,
            slope=slope,
            activation_slope=epilogue.slope,
            dropout=epilogue.dropout,
            deterministic=deterministic,
        )
        wide = dbias_RD.dtype
        dv_RKA = products.target_terms_gradient(x_NK, dtarget_term_TA, block, level)
        dweight_RKD = products.weight_gradient(x_NK, dz_MD, block, level, wide)
        relations, inputs, heads = dv_RKA.shape
        dweight_RKAd = dweight_RKD.view(relations, inputs, heads, -1)
        dweight_RKAd += dv_RKA.unsqueeze(-1) * target_RAd.to(wide).unsqueeze(1)
        dtarget_RAd = torch.einsum("rkad,rka->rad", weight_RKD.view_as(dweight_RKAd).to(wide), dv_RKA)
        dx_NK = None
        if ctx.needs_input_grad[0]:
            dx_NK = products.input_gradient(dz_MD, dtarget_term_TA, block, level, weight_RKD, v_RKA)
        dtype = weight_RKD.dtype
        return (
            dx_NK,
            dweight_RKD.to(dtype),
            dsource_RAd.to(dtype),
            dtarget_RAd.to(dtype),
            dbias_RD.to(dtype),
            None,
        )


def _folded(weight_RKD: Tensor, att_RAd: Tensor) -> Tensor:
    """``W att`` of every relation and head, [R, K, A], fp32 (fp64 of fp64)."""
    relations, heads, size = att_RAd.shape
    return torch.einsum("rkad,rad->rka", widen(weight_RKD).view(relations, -1, heads, size), widen(att_RAd))


class RGAT(nn.Module):
    """The network.

    Args:
        architecture: what the rules fix.
        schema: of the graph.
        hops: convolutions.
        implementations: ``model.implementations``.
        device, dtype: of weights and activations.
        deterministic: see :class:`Convolution`.
        generator: of the initial weights, on the CPU.
    """

    def __init__(
        self,
        architecture: Architecture,
        schema: Schema,
        hops: int,
        implementations: Mapping[str, str],
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.choices: dict[str, str] = {}
        request = OperationRequest(device, dtype, {"heads": architecture.heads, "head_size": architecture.head_size})
        products = select(implementations, "projection", PROJECTION, request)
        edges = select(implementations, "edge_attention", EDGE_ATTENTION, request)
        self.choices |= {"projection": products.name, "edge_attention": edges.name}
        operations = Operations(products.function, edges.function)
        width = architecture.width
        self.convs = nn.ModuleList(
            Convolution(
                schema,
                hops - layer,
                width if layer else architecture.feature_size,
                architecture,
                operations,
                deterministic,
            )
            for layer in range(hops)
        )
        self.lin = nn.Linear(width, architecture.classes)
        self._architecture, self._seed_type = architecture, schema.seed_type
        self._initialise(generator)
        self.to(device, dtype)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for convolution in self.convs:
            assert isinstance(convolution, Convolution)
            convolution.initialise(generator)
        bound = 1 / math.sqrt(self.lin.in_features)  # PyTorch's own for linear layers
        self.lin.weight.uniform_(-bound, bound, generator=generator)
        self.lin.bias.uniform_(-bound, bound, generator=generator)

    def training_flops(self, rows: Sequence[float], seeds: float) -> float:
        """FLOPs of the projections and the classifier, forward and backward; all else is small.

        Args:
            rows: of all relations, at levels 1 to H.
            seeds: of the batch.
        """
        total = 6.0 * seeds * self.lin.in_features * self.lin.out_features
        for layer, convolution in enumerate(self.convs):
            assert isinstance(convolution, Convolution)
            _, inputs, width = convolution.weight.shape
            products = 3 if layer else 2  # the features need no gradient
            total += 2.0 * products * rows[convolution.level - 1] * inputs * width
        return total

    def forward(self, x_NF: Tensor, block: Block, seed: Tensor) -> Tensor:
        """Logits of the seeds.

        Args:
            x_NF: features of all nodes of the block, [shape.node_offsets(H)[-1], F].
            block: nodes and edges.
            seed: 0-d int64, of the dropout; read in training only.

        Returns:
            [shape.seeds, C], in the dtype of the weights; those of missing seeds mean nothing, and are finite.
        """
        architecture, last = self._architecture, len(self.convs) - 1
        h = x_NF
        for layer, convolution in enumerate(self.convs):
            p = architecture.dropout if self.training and layer < last else 0.0
            slope = architecture.activation_slope if layer < last else None
            h = convolution(h, block, Epilogue(slope, DropoutMask(p, seed, DROPOUT_SITE + layer) if p else None))
        offset = block.shape.node_offsets(0)[self._seed_type]
        logits: Tensor = self.lin(h[offset : offset + block.shape.seeds])
        return logits
