"""BERT's model with products in FP8: what is cast where, and biases beside FP8's products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from micro_batches import back_to_back, draw, lay_out
from small_bert import LENGTHS, REFERENCES, SMALL, mean_loss
from torch import Tensor

from benchmarks.bert.model import Bert
from common.ops import fp8_cast
from common.ops.fp8_cast.reference import Fp8Tensor, Handover, cast_reference, widen_fp8

SMALL_FP8 = replace(SMALL, feed_forward=64)
IMPLEMENTATIONS = {linear: {**REFERENCES, "linear": linear} for linear in ("reference", "fp8")}


@pytest.mark.parametrize("linear", IMPLEMENTATIONS)
def test_the_bias_of_queries_keys_and_values_is_added_and_differentiated_once(linear, monkeypatch):
    model = Bert(SMALL_FP8, torch.Generator().manual_seed(0), IMPLEMENTATIONS[linear], dtype=torch.bfloat16).train()
    qkv, kept, left, leave = model.layers[1].attention.qkv, [], {}, Handover.leave

    def keep(module: object, inputs: tuple[Tensor], given: dict[str, Any], output: Tensor) -> None:
        output.retain_grad()
        kept.extend([inputs[0], output, given["handover"]])

    def record(handover: Handover, gradient: Fp8Tensor) -> Tensor:
        left[id(handover)] = gradient
        return leave(handover, gradient)

    monkeypatch.setattr(Handover, "leave", record)
    with torch.no_grad():
        qkv.bias.normal_(std=100.0, generator=torch.Generator().manual_seed(1))  # twice it, or none, would show
    qkv.register_forward_hook(keep, with_kwargs=True)
    samples = draw(LENGTHS, SMALL_FP8.vocabulary)
    mean_loss(model(lay_out(samples, back_to_back(samples), (64, 6, 12)))).backward()
    x, y, handover = kept
    x = x.source if isinstance(x, Fp8Tensor) else x
    product = x.detach().double() @ qkv.weight.detach().double().t()
    rounding = 0.5 + 0.1 * product.abs().max()  # half a bf16 step of the sum, and FP8's of the product
    assert (y.detach().double() - product - qkv.bias.detach().double()).abs().max() < rounding
    expected = (y.grad if handover is None else widen_fp8(left[id(handover)])).double().sum(0)
    tolerance = {"reference": 2**-8, "fp8": 2**-3}[linear]
    for part in (0, 2):  # a key's bias adds the same to all scores of a row: rounding is all that its gradient has
        found, reference = (gradient.chunk(3)[part].double() for gradient in (qkv.bias.grad, expected))
        assert reference.norm() > 0
        assert (found - reference).norm() < tolerance * reference.norm()


@pytest.mark.parametrize("layers", [1, 3])
def test_fp8_producers_write_the_operands_of_products(layers, monkeypatch):
    """Casts of their own are left for weights, the first layer's input and the attention's contexts."""
    cast = []

    def record(x: Tensor, *rest: Any) -> Fp8Tensor:
        cast.append(tuple(x.shape))
        return cast_reference(x, *rest)

    monkeypatch.setattr(fp8_cast, "FP8_CAST", replace(fp8_cast.FP8_CAST, reference=record))
    architecture = replace(SMALL_FP8, layers=layers)
    model = Bert(architecture, torch.Generator().manual_seed(0), IMPLEMENTATIONS["fp8"], dtype=torch.bfloat16).train()
    samples = draw(LENGTHS, architecture.vocabulary)
    mean_loss(model(lay_out(samples, back_to_back(samples), (64, 6, 12)))).backward()
    weights = [tuple(p.shape) for name, p in model.named_parameters() if "layers." in name and p.ndim == 2]
    activations = [(64, architecture.hidden)] * (1 + layers)
    assert sorted(cast) == sorted(weights + activations)
