"""Test optimizers on a GPU: captured against eager updates, with overflow and clipping, and LAMB against apex."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.ops.cases import Draw
from common.ops.catalogue import cases_of
from common.ops.operation import Operation
from common.optim.adaptive import ADAGRAD, ADAPTIVE, LAMB, Adam
from common.optim.ema import WeightAverage
from common.optim.learning_rate import polynomial
from common.optim.momentum import LARS, MOMENTUM
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.optim.rules import Binding
from common.optim.update_cases import DECAY_AND_RATIO, bert, shard_of
from common.step.train_step import apply_gradients
from tests.gpu.support import GPU, captured

pytestmark = pytest.mark.gpu

# Update rules


MEDIUM = bert(256, 4, 8000)


def iterated(operation: Operation, name: str, sizes: Mapping[str, Any]) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that measures and updates, and the tensors that it writes, of the first case in bf16."""
    passes = cases_of(operation)[0].passes(operation.function(name), Draw(GPU, torch.bfloat16), **sizes)

    def tensors(found: Any) -> Iterator[Tensor]:
        if isinstance(found, Tensor):
            yield found
        else:
            for each in found:
                yield from tensors(each)

    def iteration() -> None:
        for each in passes:
            each.run()

    written = list(tensors([each.run() for each in passes]))
    return iteration, written


@pytest.mark.parametrize("operation", [ADAPTIVE, MOMENTUM, ADAGRAD], ids=lambda operation: operation.name)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_captured_updates_equal_eager_ones_and_wait_for_nothing(operation: Operation, name: str) -> None:
    sizes = {"rate": 0.25, **({"shards": (MEDIUM,)} if operation is ADAPTIVE else {})}
    (eager, expected), (replayed, found) = (iterated(operation, name, sizes) for _ in range(2))
    graph, _ = captured(replayed)
    for _ in range(2):
        graph.replay()
    for _ in range(4):
        eager()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("decay", [0.9, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_averages_of_the_update_have_the_bits_of_an_interpolation_after_it(dtype: torch.dtype, decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(300, 70, generator=generator).to("cuda", dtype))
    optimizer = Optimizer(
        [ParameterGroup({"weight": weight})], Adam(),
        lambda step: torch.full_like(step, 0.125, dtype=torch.float32), Layout(device=torch.device("cuda")),
        grad_divisor=1.0,
    )  # fmt: skip
    average = WeightAverage(optimizer, decay)
    (masters,) = (buffer.shard.masters for buffer in optimizer.buffers)
    expected = masters + 0.0
    share = torch.full((), 1.0 - decay, device="cuda")
    for number in range(4):
        for updater in (optimizer, average):
            updater.begin()
        assert weight.grad is not None
        weight.grad.copy_(torch.randn(300, 70, generator=torch.Generator().manual_seed(number)))
        apply_gradients([optimizer, average], torch.zeros((), device="cuda"))
        expected.lerp_(masters, share)
    ((_, found),) = average.named_state()
    assert torch.equal(found, expected)


def fused_lamb() -> type:
    """Return NVIDIA's LAMB, or skip the test. The package ``apex`` on PyPI is another project, without LAMB."""
    try:
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers import FusedLAMB
    except ImportError as error:
        pytest.skip(f"NVIDIA's apex with FusedLAMB is not installed: {error}")
    if not multi_tensor_applier.available:
        pytest.skip("NVIDIA's apex was built without its CUDA extensions")
    return FusedLAMB


@pytest.mark.parametrize("clipped", [False, True])
def test_lamb_equals_apex(clipped):
    lamb = fused_lamb()
    draw = Draw(GPU, torch.float32)
    shard = shard_of(draw, MEDIUM, torch.float32, weight_scale=0.02)
    update = LAMB(0.9, 0.999, 1e-6).bind(Binding([shard], DECAY_AND_RATIO, len(MEDIUM), lambda _: None), "triton")
    parts = [slice(f.start, f.start + f.numel) for f in shard.fragments]
    parameters = [nn.Parameter(shard.masters[part].clone()) for part in parts]
    groups = [
        {
            "params": [p for p, f in zip(parameters, shard.fragments, strict=True) if f.group == number],
            "weight_decay": settings.weight_decay,
        }
        for number, settings in enumerate(DECAY_AND_RATIO)
    ]
    bound = 1.0 if clipped else 1e9
    theirs = lamb(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=bound, use_nvlamb=False)
    rates_G, write = torch.full((2,), 0.01, device=GPU), torch.ones((), dtype=torch.bool, device=GPU)
    for step in range(5):
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = draw.normal(len(parameter))
            shard.gradients[part] = parameter.grad
        factor = min(1.0, bound / shard.gradients.double().norm().item())
        update.apply(rates_G, torch.full((), step, device=GPU), torch.full((), factor, device=GPU), write)
        theirs.step()
    for parameter, part in zip(parameters, parts, strict=True):
        torch.testing.assert_close(shard.masters[part], parameter.detach(), rtol=2e-5, atol=2e-6)


# Optimizers


SHAPES: dict[str, tuple[int, ...]] = {
    f"{layer}.{name}": shape
    for layer, width in [("stem", 64), *((str(number), 64 << number // 14) for number in range(52))]
    for name, shape in (("conv.weight", (width, width, 3, 3)), ("bn.weight", (width,)), ("bn.bias", (width,)))
} | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}
"""Shapes of the parameters of a network with as many tensors as ResNet-50."""


def build_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = {}
    for name, shape in SHAPES.items():
        kind = torch.float32 if ".bn." in name else dtype
        value = 0.05 * torch.randn(shape, generator=generator, device="cuda")
        if value.ndim == 4:
            value = value.to(memory_format=torch.channels_last)
        parameters[name] = nn.Parameter(value.to(kind))
    return parameters


def build(parameters: dict[str, nn.Parameter], implementation: str) -> Optimizer:
    def groups_of(*, norms: bool, bias: bool) -> dict[str, nn.Parameter]:
        return {n: p for n, p in parameters.items() if (".bn." in n) == norms and (n == "fc.bias") == bias}

    groups = [
        ParameterGroup(groups_of(norms=False, bias=False), 5e-5, trust_ratio=True, learning_rate_in_momentum=False),
        ParameterGroup(groups_of(norms=False, bias=True), 5e-5),
        ParameterGroup(groups_of(norms=True, bias=False)),
    ]
    schedule = polynomial(11.0, 1e-4, 2, 2, 20, first_step=1)
    layout = Layout(device="cuda")
    return Optimizer(groups, LARS(0.9), schedule, layout, grad_divisor=400.0, implementation=implementation)


def iterate(
    optimizer: Optimizer, parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor], skip: Tensor
) -> Tensor:
    optimizer.begin()
    torch._foreach_copy_([p.grad for p in parameters.values()], [gradients[n] for n in parameters])
    optimizer.arm()
    return apply_gradients([optimizer], skip)


def random_gradients(parameters: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype) for n, p in parameters.items()}


def state_of(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in parameters.items()} | {n: t.clone() for n, t in optimizer.named_state()}


class Scaled:
    """An optimizer of fp16 parameters with clipping and a loss scale, and the gradients of two micro-batches."""

    def __init__(self, when: Literal["before_reduction", "after_reduction"]) -> None:
        self.parameters = build_parameters(torch.float16)
        self.scale = LossScale("cuda", initial=8.0, growth_interval=2)
        self.skip = torch.zeros((), device="cuda")
        self.gradients = [random_gradients(self.parameters, seed) for seed in range(2)]
        self.optimizer = Optimizer(
            [ParameterGroup(self.parameters, 5e-5, trust_ratio=True)],
            LARS(0.9),
            polynomial(11.0, 1e-4, 2, 2, 20, first_step=1),
            Layout(device="cuda"),
            grad_divisor=2.0,
            clip=ClipNorm(1.0, when),
            micro_batches=2,
            loss_scale=self.scale,
        )

    def draw(self, seed: int, overflow: bool) -> None:
        for index, gradients in enumerate(self.gradients):
            for name, value in random_gradients(self.parameters, 2 * seed + index).items():
                gradients[name].copy_(value)
        if overflow:
            self.gradients[0]["fc.bias"][0] = float("inf")

    def iterate(self) -> None:
        self.optimizer.begin()
        for index, gradients in enumerate(self.gradients):
            if index == 1:
                self.optimizer.arm()
            torch._foreach_add_([p.grad for p in self.parameters.values()], [gradients[n] for n in self.parameters])
            self.optimizer.collect()
        apply_gradients([self.optimizer], self.skip)


@pytest.mark.parametrize("when", ["before_reduction", "after_reduction"])
def test_captured_clipping_and_loss_scale_equal_eager_ones(when):
    eager, replayed = Scaled(when), Scaled(when)
    replayed.skip.fill_(1.0)
    graph, _ = captured(replayed.iterate)
    replayed.skip.zero_()
    for seed in range(5):
        for case in (eager, replayed):
            case.draw(seed, overflow=seed == 2)
        eager.iterate()
        graph.replay()
    expected = state_of(eager.optimizer, eager.parameters)
    found = state_of(replayed.optimizer, replayed.parameters)
    assert found["step"].item() == 4
    assert found["loss_scale"].item() == 16.0  # 8, 16 after two, 8 after the overflow, 16 after two more
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_captured_an_overflow_of_one_optimizer_keeps_the_other_from_writing():
    parameters = build_parameters(torch.float16)
    scale = LossScale("cuda", initial=8.0, growth_interval=9)
    names = list(parameters)
    optimizers = [
        Optimizer(
            [ParameterGroup({name: parameters[name] for name in part}, 5e-5, trust_ratio=True)],
            LARS(0.9),
            polynomial(11.0, 1e-4, 2, 2, 20, first_step=1),
            Layout(device="cuda"),
            grad_divisor=2.0,
            loss_scale=scale,
        )
        for part in (names[:80], names[80:])
    ]
    static, skip = random_gradients(parameters, 0), torch.ones((), device="cuda")

    def iteration() -> None:
        for optimizer in optimizers:
            optimizer.begin()
        torch._foreach_copy_([p.grad for p in parameters.values()], [static[n] for n in parameters])
        apply_gradients(optimizers, skip)

    def state() -> list[Tensor]:
        torch.cuda.synchronize()
        named = [t for o in optimizers for n, t in o.named_state() if not n.startswith("loss_scale")]
        return [tensor.detach().clone() for tensor in (*parameters.values(), *named)]

    graph, _ = captured(iteration)  # skipped: writes nothing
    skip.zero_()
    states = [state()]
    for name in (None, "stem.conv.weight", "fc.bias"):  # of neither, of the first, of the second
        for n, value in random_gradients(parameters, 1).items():
            static[n].copy_(value)
        if name is not None:
            static[name].view(-1)[0] = float("inf")
        graph.replay()
        states.append(state())
    assert not any(torch.equal(a, b) for a, b in zip(states[0][:161], states[1][:161], strict=True))
    for after in states[2:]:
        assert all(torch.equal(a, b) for a, b in zip(states[1], after, strict=True))
    assert scale.value.item() == 2.0  # halved once by each of the two
