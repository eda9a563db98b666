"""Relational graph attention network.

It has three convolutions. Each applies a graph attention (Velickovic et al., arXiv:1710.10903) per relation, and sums
the results over the relations into a type (HeteroConv of GATConv in PyTorch Geometric 2.4). A relation has one weight
for sources and targets. There are no added self-loops, no attention dropout and no residual connections. A relation's
bias reaches all targets of its type, also targets without an edge in this relation. Leaky ReLU and dropout follow
each convolution but the last; the classifier reads the seeds.

Shapes: see :mod:`benchmarks.rgat.graph`; K inputs and D = A x d outputs of a convolution, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rgat.graph import SampledBlock, Schema
from benchmarks.rgat.ops.edge_attention import EDGE_ATTENTION
from benchmarks.rgat.ops.edge_attention.reference import EdgeAttention
from benchmarks.rgat.ops.projection import PROJECTION
from benchmarks.rgat.ops.projection.reference import Projection
from benchmarks.rgat.ops.sample import SAMPLE
from common.config.ranges import AtLeast, NotNegative, ProbabilityBelowOne
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import Operation, OperationRequest, select
from common.ops.triton_support import widen

DROPOUT_SITE = 1 << 16
"""Call site of the first dropout, above the sites that draw neighbours with the same seed."""


@dataclass(frozen=True)
class Architecture:
    """Architecture options of the network, fixed by the rules.

    Attributes:
        feature_size: inputs of the first convolution.
        heads, head_size: heads of every convolution, and outputs per head; the outputs are concatenated.
        attention_slope: negative slope of the leaky ReLU on the attention logits.
        activation_slope: negative slope of the leaky ReLU between convolutions.
        dropout: probability of dropout after that leaky ReLU.
    """

    feature_size: Annotated[int, AtLeast(1)]
    heads: Annotated[int, AtLeast(1)]
    head_size: Annotated[int, AtLeast(1)]
    classes: Annotated[int, AtLeast(2)]
    attention_slope: Annotated[float, NotNegative]
    activation_slope: Annotated[float, NotNegative]
    dropout: Annotated[float, ProbabilityBelowOne]

    @property
    def width(self) -> int:
        """D, outputs of a convolution."""
        return self.heads * self.head_size


OPERATIONS: dict[str, Operation] = {
    "projection": PROJECTION,
    "edge_attention": EDGE_ATTENTION,
    "sample": SAMPLE,
}
"""Operations whose implementation ``model.implementations`` selects."""


class Epilogue(NamedTuple):
    """Activation after the sum over relations.

    Attributes:
        slope: negative slope of the leaky ReLU; None: no leaky ReLU.
        dropout: dropout after it; None: no dropout.
    """

    slope: float | None
    dropout: DropoutMask | None


class GraphAttention(nn.Module):
    """One graph attention per relation, summed over the relations into each type.

    Args:
        level: the inputs are the nodes within ``level`` hops.
        deterministic: whether every sum must be independent of the order in which programs run.

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
        operations: tuple[Projection, EdgeAttention],
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
        """Draw uniform weights with Glorot's bound over the last two dimensions, like PyTorch Geometric; no bias."""
        for parameter in (self.weight, self.att_src, self.att_dst):
            bound = math.sqrt(6.0 / (parameter.shape[-2] + parameter.shape[-1]))
            parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, x_NK: Tensor, block: SampledBlock, epilogue: Epilogue) -> Tensor:
        """Return the outputs of the nodes within ``level - 1`` hops, from inputs of those within ``level`` hops.

        Args:
            x_NK: inputs, [shape.node_offsets(level)[-1], K], float8_e4m3fn or a dtype of 16 or 32 bits.

        Returns:
            [shape.node_offsets(level - 1)[-1], D], in the dtype of the weights; zeros in unfilled entries.
        """
        options = (block, self.level, self._slope, epilogue, self._operations, self._deterministic)
        return _Convolve.apply(x_NK, self.weight, self.att_src, self.att_dst, self.bias, options)


class _Convolve(torch.autograd.Function):
    """Convolution with a hand-written backward pass, because the tensors that autograd would save do not fit.

    Targets are never projected: their part of the logits is ``x . (W att_dst)``, one number per head and relation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NK: Tensor,
        weight_RKD: Tensor,
        source_RAd: Tensor,
        target_RAd: Tensor,
        bias_RD: Tensor,
        options: Any,
    ) -> Tensor:
        block, level, slope, epilogue, (products, edges), _ = options
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
        ctx.options = options
        ctx.save_for_backward(
            x_NK, weight_RKD, source_RAd, target_RAd, v_RKA, z_MD, source_term_MA, target_term_TA, out_PD, log_sum_TA
        )
        return out_PD

    @staticmethod
    def backward(ctx: Any, dout_PD: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_RKD, source_RAd, target_RAd, v_RKA, z_MD, source_term_MA, target_term_TA, out_PD, log_sum_TA = (
            ctx.saved_tensors
        )
        block, level, slope, epilogue, (products, edges), deterministic = ctx.options
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
        sum_dtype = dbias_RD.dtype
        # v = W att_dst, so its gradient reaches both factors: dW += dv att_dst, datt_dst = W dv.
        dv_RKA = products.target_terms_gradient(x_NK, dtarget_term_TA, block, level)
        dweight_RKD = products.weight_gradient(x_NK, dz_MD, block, level, sum_dtype)
        relations, inputs, heads = dv_RKA.shape
        dweight_RKAd = dweight_RKD.view(relations, inputs, heads, -1)
        dweight_RKAd += dv_RKA.unsqueeze(-1) * target_RAd.to(sum_dtype).unsqueeze(1)
        dtarget_RAd = torch.einsum("rkad,rka->rad", weight_RKD.view_as(dweight_RKAd).to(sum_dtype), dv_RKA)
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
    """Return ``W att`` of every relation and head, [R, K, A], in fp32 (fp64 for fp64)."""
    relations, heads, size = att_RAd.shape
    return torch.einsum("rkad,rad->rka", widen(weight_RKD).view(relations, -1, heads, size), widen(att_RAd))


class RGAT(nn.Module):
    """The complete network: convolutions and classifier.

    Args:
        deterministic: whether every sum must be independent of the order in which programs run.
        generator: CPU generator for the initial weights.
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
        operations = products.function, edges.function
        width = architecture.width
        self.convs = nn.ModuleList(
            GraphAttention(
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
            assert isinstance(convolution, GraphAttention)
            convolution.initialise(generator)
        bound = 1 / math.sqrt(self.lin.in_features)  # PyTorch's default for linear layers
        self.lin.weight.uniform_(-bound, bound, generator=generator)
        self.lin.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, x_NF: Tensor, block: SampledBlock, seed: Tensor) -> Tensor:
        """Return the logits of the seeds.

        Args:
            x_NF: features of all nodes of the block, [shape.node_offsets(H)[-1], F].
            seed: seed of dropout, 0-d int64; read in training only.

        Returns:
            [shape.seeds, C], in the dtype of the weights; those of padding seeds are finite but meaningless.
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
