"""Network that runs with hand-written backward passes of blocks and head.

Legend: as in :mod:`benchmarks.gpt3.network`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from benchmarks.gpt3.blocks import AttentionHalf, MlpHalf, Pair, Tokens, joined, last_normed
from benchmarks.gpt3.head import PutOff, TiedHead
from benchmarks.gpt3.network import Block, Gpt
from benchmarks.gpt3.operations import Operations
from common.distributed.tensor_parallel.products import TokenProducts
from common.nn.scratch import Scratch
from common.nn.trained_decoder.casts import Scales, WeightCasts
from common.nn.trained_decoder.products import Shared, trained_product
from common.ops.operation import AUTO


class WrittenGpt:
    """Network that runs the weights of a :class:`Gpt` with hand-written backward passes.

    Args:
        model: module with all weights; FP8 products register their scales in its layers.
        linear: implementation of the linear layers in blocks: ``torch`` or ``fp8``.
        most_tokens: maximum number of tokens in a micro-batch; determines the size of the shared scratch buffer.
        products: how tokens move during products if ranks share the layers; None for separate collectives.
        accumulation: how gradients of FP8 products are added, see :mod:`common.ops.weight_gradient`.
        put_off_head: number of micro-batches per step whose gradients of the head weight are computed at its end,
            see :class:`benchmarks.gpt3.head.PutOff`; ignored without a pipeline.
        own_eval_scales: see :class:`common.nn.trained_decoder.products.Fp8TrainedProduct`.

    Raises:
        UnsupportedImplementation: FP8 products do not support these weights.
    """

    def __init__(
        self,
        model: Gpt,
        operations: Operations,
        linear: str,
        most_tokens: int,
        products: TokenProducts | None = None,
        accumulation: str = AUTO,
        put_off_head: int = 0,
        own_eval_scales: bool = False,
    ) -> None:
        self.model, self._operations = model, operations
        self.architecture, self.parts, self.parallel = model.architecture, model.parts, model.parallel
        example = next(model.parameters())
        scratch = Scratch(example.device)
        # allocate the largest size now, so that the address does not change after CUDA graphs are captured
        scratch.wide((most_tokens, model.architecture.feed_forward // model.parallel.size), example.dtype)
        self._shared = Shared(scratch, WeightCasts(), model.parallel, products, accumulation, own_eval_scales)
        self._halves = [
            [_halves(block, operations, linear, self._shared) for block in model.blocks(chunk)]
            for chunk in range(len(model.parts))
        ]
        self._head: TiedHead | None = None
        if model.last:
            # If the embedding is on the same stage, its backward pass is the last to add to this gradient.
            self._head = TiedHead(
                model.embedding.weight, model.architecture.vocabulary, model.parallel, operations.cross_entropy,
                finishes=not model.first, put_off=PutOff(0 if model.first else put_off_head),
            )  # fmt: skip

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """See :meth:`benchmarks.gpt3.network.Gpt.embed`."""
        return self.model.embed(tokens_BS)

    def through(self, chunk: int, x_sE: Tensor, rows: int) -> Tensor:
        """See :meth:`benchmarks.gpt3.network.Gpt.through`; weight gradients are added to the main gradients."""
        tokens = Tokens(rows, not torch.is_grad_enabled())
        self._shared.begin(tokens.inference)
        pair = Pair(x_sE, None, None)
        for attention, mlp in self._halves[chunk]:
            pair = mlp(attention(pair, tokens), tokens)
        return joined(pair, self._operations)

    @torch.no_grad()
    def losses(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int) -> Tensor:
        """See :meth:`benchmarks.gpt3.network.Gpt.losses`; without gradients."""
        return self._last().losses(self._normed(x_sE), labels_T, head_chunk)

    def summed_loss(self, x_sE: Tensor, labels_T: Tensor, head_chunk: int, factor: float = 1.0) -> Tensor:
        """See :meth:`benchmarks.gpt3.network.Gpt.summed_loss`; weight gradients are added to the main gradients."""
        return self._last().summed_loss(self._normed(x_sE), labels_T, head_chunk, factor)

    @contextlib.contextmanager
    def same_weights(self) -> Iterator[None]:
        """Context of the passes of a step, during which no weight may change. Collective over tp.

        FP8 products cast their weights once. Deferred gradients of the head weight are added at the end; if the block
        fails, they are discarded.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._shared.casts.once())
            if self._head is not None:
                stack.enter_context(self._head.put_off.step(self._head))
            yield

    def prepare(self, chunk: int) -> None:
        """Cast the weights of one part, within :meth:`same_weights`; forward passes then skip the cast."""
        for attention, mlp in self._halves[chunk]:
            for product in (attention.qkv, attention.output, mlp.up, mlp.down):
                product.prepare()

    def begin_backward(self) -> None:
        """Call this before a backward pass that does not directly follow its forward pass. Collective over tp."""
        self._shared.begin_backward()

    def evaluating(self) -> AbstractContextManager[None]:
        """Context of the passes of an evaluation, in which weights do not change. FP8 weights are cast on entry."""
        return self._shared.casts.evaluating()

    def _last(self) -> TiedHead:
        if self._head is None:
            raise ValueError("a stage that is not the last has no head")
        return self._head

    def _normed(self, x_sE: Tensor) -> Tensor:
        return last_normed(x_sE, self.model.norm, self._operations)


def _halves(block: Block, operations: Operations, linear: str, shared: Shared) -> tuple[AttentionHalf, MlpHalf]:
    qkv, up = (trained_product(layer, linear, shared, bias=True) for layer in (block.qkv, block.up))
    output, down = (trained_product(layer, linear, shared) for layer in (block.output, block.down))
    saved = None
    if linear != "torch":
        block.saved = Scales(1, block.qkv.weight.device)
        saved = block.saved.scaling(0)
    biases = [layer.bias for layer in (block.qkv, block.output, block.up, block.down)]
    qkv_bias, output_bias, up_bias, down_bias = (bias for bias in biases if bias is not None)
    return (
        AttentionHalf(
            block.architecture.head_size, operations, block.attention_norm, qkv, qkv_bias, output, output_bias
        ),
        MlpHalf(operations, shared.scratch, block.mlp_norm, up, up_bias, down, down_bias, saved),
    )
