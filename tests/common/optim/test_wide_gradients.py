"""Test fp32 gradients of half-precision weights: sums over micro-batches, updates, and saved state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.config.schema import OptimizerConfig
from common.distributed.layout import Layout
from common.language.decoder import product_of
from common.language.movement import STAYING
from common.language.products import HalfProduct, Scratch, Shared, WeightCasts
from common.nn import main_gradient
from common.ops.fp8_cast.reference import Fp8Tensor, widen_fp8
from common.optim.adaptive import LAMB, Adagrad, Adam, AdamW
from common.optim.buffers import FlatBuffer
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.rules import Rule

SHAPES = {"weight": (70, 33), "norm": (19,)}
RATE, STEPS, MAX_NORM, DECAY = 1e-2, 8, 1.0, 0.1
RULES: dict[str, Rule] = {
    "adam": Adam(),
    "adamw": AdamW(),
    "lamb": LAMB(),
    "sgd": SGD(0.9, nesterov=True),
    "lars": LARS(0.9, eta=10.0, epsilon=1e-6),
    "adagrad": Adagrad(1e-8),
}
CLIPS = {"after": ClipNorm(MAX_NORM, "after_reduction"), "before": ClipNorm(MAX_NORM, "before_reduction")}
MICRO_BATCHES = 3
PASSES, TOKENS, OUTPUTS, INPUTS = 16, 32, 48, 32
TO_FP32, BEYOND_BF16 = 1e-6, 1e-3
"""Relative errors: sums in fp32 are below the first, sums that are rounded to bf16 above the second."""


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return random bf16 values in ``dtype``, always the same."""
    generator = torch.Generator().manual_seed(1)
    drawn = {name: (torch.randn(shape, generator=generator) * 0.1).bfloat16() for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def drawn_gradients(seed: int) -> dict[str, Tensor]:
    """Return random fp32 gradients, hardly any of which bf16 can represent."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer(named: dict[str, nn.Parameter], rule: Rule, **options: Any) -> Optimizer:
    """Return an optimizer of both parameters; weight decay applies to the matrix."""
    trusted = isinstance(rule, LAMB | LARS)
    groups = [
        ParameterGroup({name: parameter}, DECAY if parameter.ndim > 1 else 0.0, trust_ratio=trusted)
        for name, parameter in named.items()
    ]
    return Optimizer(groups, rule, constant(RATE), Layout(), grad_divisor=float(MICRO_BATCHES), **options)


def step(one: Optimizer, named: dict[str, nn.Parameter], micro_batches: list[dict[str, Tensor]]) -> None:
    """Apply an update with the sum of the gradients."""
    one.begin()
    for number, gradients in enumerate(micro_batches, 1):
        if number == len(micro_batches):
            one.arm()
        for name, parameter in named.items():
            assert parameter.grad is not None
            parameter.grad.add_(gradients[name])
        one.collect()
    allowed = ~one.measure()
    assert allowed
    one.write(allowed)


def masters_of(one: Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the fp32 masters, or the weights if they have no masters."""
    found = one.state_dict()
    masters: dict[str, Tensor] = found.get("masters") or {name: weight.detach() for name, weight in named.items()}
    return masters


class Product(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(drawn.bfloat16())


def operands(seed: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of a result and the input. The mean of their product is not 0, so that sums grow."""
    generator = torch.Generator().manual_seed(seed)
    dy, x = (torch.randn(TOKENS, width, generator=generator) + 0.5 for width in (OUTPUTS, INPUTS))
    return dy.bfloat16(), x.bfloat16()


def by_autograd(layer: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Add gradients from autograd. They have the dtype of the weight."""

    def add(dy: Tensor, x: Tensor) -> Tensor:
        torch.nn.functional.linear(x, layer.weight).backward(dy)
        alone = layer.weight.detach().clone().requires_grad_()
        (made,) = torch.autograd.grad(torch.nn.functional.linear(x, alone), alone, dy)
        return made.double()

    return add


def by_product(layer: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Add the products of hand-written code, which are not rounded."""
    product = HalfProduct(layer.weight, STAYING)

    def add(dy: Tensor, x: Tensor) -> Tensor:
        product.add_weight_gradient(dy, x)
        return dy.double().t() @ x.double()

    return add


def by_product_in_fp8(layer: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Add products of operands that were rounded to FP8."""
    product = product_of(layer, "fp8", Shared(Scratch(layer.weight.device), WeightCasts()))

    def add(dy: Tensor, x: Tensor) -> Tensor:
        dy8, x8 = product.cast_gradient(dy), product.cast_input(x, False)
        assert isinstance(dy8, Fp8Tensor)
        assert isinstance(x8, Fp8Tensor)
        product.add_weight_gradient(dy8, x8)
        return widen_fp8(dy8).double().t() @ widen_fp8(x8).double()

    return add


def by_row_sums(layer: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Add sums, as norms and biases do."""

    def add(dy: Tensor, x: Tensor) -> Tensor:
        sums = torch.outer(dy.float().sum(0), x.float().sum(0))
        main_gradient.add_(layer.weight, sums)
        return sums.double()

    return add


ADDERS = {"autograd": by_autograd, "product": by_product, "fp8": by_product_in_fp8, "sums": by_row_sums}


@pytest.mark.parametrize("adder", list(ADDERS))
def test_micro_batches_add_up_to_the_sum_in_float64(adder: str) -> None:
    found = {}
    for gradients in ("fp32", "same"):
        layer = Product()
        one = Optimizer(
            [ParameterGroup({"weight": layer.weight})], SGD(0.0), constant(1.0), Layout(), grad_divisor=1.0,
            gradients=gradients,
        )  # fmt: skip
        add = ADDERS[adder](layer)
        one.begin()
        expected = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
        for seed in range(PASSES):
            expected += add(*operands(seed))
        one.check_views()
        assert layer.weight.grad is not None
        found[gradients] = float((layer.weight.grad.double() - expected).norm() / expected.norm())
    assert found["fp32"] < TO_FP32
    assert found["same"] > BEYOND_BF16


def test_uses_of_one_weight_in_a_pass_add_up_in_float32() -> None:
    """For example, an embedding that is also the head. bf16 cannot represent 256 + 1."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    one = optimizer({"weight": weight}, SGD(0.0), gradients="fp32")
    one.begin()
    ((256 * weight).sum() + weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [257.0] * 3


def test_gradients_without_an_optimizer_are_those_of_the_parameter() -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    assert main_gradient.main_gradient(weight).dtype == torch.bfloat16
    other = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    other.grad_dtype = torch.float32
    assert main_gradient.main_gradient(other).dtype == torch.float32


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_reads_all_bits(rule: str, clip: str) -> None:
    """The masters equal fp32 weights after the same gradients; with bf16 gradients they differ."""
    found = {}
    for kind, dtype, gradients in (
        ("wide", torch.bfloat16, "fp32"), ("whole", torch.float32, "same"), ("narrow", torch.bfloat16, "same"),
    ):  # fmt: skip
        named = parameters(dtype)
        one = optimizer(
            named, RULES[rule], clip=CLIPS[clip], implementation="reference", micro_batches=MICRO_BATCHES,
            gradients=gradients,
        )  # fmt: skip
        for number in range(2):
            step(one, named, [drawn_gradients(MICRO_BATCHES * number + n) for n in range(MICRO_BATCHES)])
        found[kind] = masters_of(one, named)
    for name, expected in found["whole"].items():
        torch.testing.assert_close(found["wide"][name], expected, rtol=1e-6, atol=1e-8)
        assert (found["narrow"][name] - expected).abs().max() > 1e-6, "the test would not notice bfloat16"


def test_updates_are_those_of_torch() -> None:
    """Clipped AdamW with remainders as masters equals ``torch.optim.AdamW`` in float64."""
    named = parameters(torch.bfloat16)
    one = optimizer(
        named, AdamW(0.9, 0.95, 1e-5), clip=CLIPS["after"], implementation="reference", masters="remainder",
        gradients="fp32",
    )  # fmt: skip
    theirs = parameters(torch.float64)
    groups = [{"params": [theirs["weight"]], "weight_decay": DECAY}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=float(torch.tensor(RATE)), betas=(0.9, 0.95), eps=1e-5)
    for seed in range(STEPS):
        gradients = drawn_gradients(seed)
        step(one, named, [gradients])
        for name, weight in theirs.items():
            weight.grad = gradients[name].double() / MICRO_BATCHES
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), MAX_NORM)
        assert math.isclose(one.metrics["gradient_norm"].item(), norm.item(), rel_tol=1e-6)
        reference.step()
    masters = masters_of(one, named)
    for name, weight in theirs.items():
        torch.testing.assert_close(masters[name].double(), weight.detach(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_weights_keep_their_gradients(dtype: torch.dtype) -> None:
    named = parameters(dtype)
    one = optimizer(named, AdamW(), gradients="fp32")
    assert {parameter.grad.dtype for parameter in named.values() if parameter.grad is not None} == {dtype}
    assert "gradients" not in one.choices


def test_the_choice_is_reported() -> None:
    assert optimizer(parameters(torch.bfloat16), AdamW(), gradients="fp32").choices["gradients"] == "added up in fp32"
    with pytest.raises(ValueError, match="gradients='fp16': use same or fp32"):
        optimizer(parameters(torch.bfloat16), AdamW(), gradients="fp16")


def test_buckets_hold_as_many_bytes_of_gradients() -> None:
    """Four tensors of 128 elements: 1,024 bytes are four of them in bfloat16, two in float32."""
    for gradient_dtype, buckets in ((torch.bfloat16, 1), (torch.float32, 2)):
        named = {str(n): nn.Parameter(torch.ones(128, dtype=torch.bfloat16)) for n in range(4)}
        buffer = FlatBuffer([named], bucket_bytes=1024, gradient_dtype=gradient_dtype)
        assert len(buffer.buckets) == buckets
        assert buffer.gradients.dtype == gradient_dtype
        first = buffer.gradients.data_ptr()
        assert [(p.grad.data_ptr() - first) % 256 for p in named.values() if p.grad is not None] == 4 * [0]


def test_parameters_may_get_another_optimizer() -> None:
    named = parameters(torch.bfloat16)
    for gradients, dtype in (("fp32", torch.float32), ("same", torch.bfloat16)):
        one = optimizer(named, AdamW(), gradients=gradients)
        one.begin()
        named["weight"].sum().backward()
        assert named["weight"].grad is not None
        assert named["weight"].grad.dtype == dtype
        one.close()


def test_a_state_has_no_gradients_and_goes_on_with_either_kind() -> None:
    """A resumed run is equal bit for bit. A state also fits an optimizer with the other dtype of gradients."""

    def begun(gradients: str, **options: Any) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        named = parameters(torch.bfloat16)
        return optimizer(named, AdamW(), gradients=gradients, masters="remainder", **options), named

    def go_on(one: Optimizer, named: dict[str, nn.Parameter], seeds: range) -> None:
        for seed in seeds:
            step(one, named, [drawn_gradients(seed)])

    whole, its = begun("fp32")
    go_on(whole, its, range(3))
    weights, saved = {name: weight.detach().clone() for name, weight in its.items()}, whole.state_dict()
    go_on(whole, its, range(3, 6))
    states = {}
    for gradients in ("fp32", "same"):
        resumed, named = begun(gradients)
        assert [(name, state.dtype) for name, state in resumed.named_state()] == [
            (name, state.dtype) for name, state in whole.named_state()
        ]
        with torch.no_grad():
            for name, weight in named.items():
                weight.copy_(weights[name])
        resumed.load_state_dict(saved)
        go_on(resumed, named, range(3, 6))
        states[gradients] = resumed.state_dict()
    for kind in ("masters", "exp_avg", "exp_avg_sq"):
        for name, tensor in whole.state_dict()[kind].items():
            assert torch.equal(states["fp32"][kind][name], tensor)
            assert states["same"][kind][name].shape == tensor.shape
    assert not torch.equal(states["same"]["masters"]["weight"], states["fp32"]["masters"]["weight"])


def test_the_users_choice_reaches_the_optimizer() -> None:
    assert OptimizerConfig().arguments()["gradients"] == "same"
    assert OptimizerConfig(gradients="fp32").arguments()["gradients"] == "fp32"
