"""The optimizer on a GPU: captured against eager iterations, overflow, clipping and float32 gradients."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from common.distributed.layout import Layout
from common.optim.learning_rate import polynomial
from common.optim.momentum import LARS
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.optim.updater import apply_gradients
from tests.common.optim.wide_gradients_oracle import RULES, follows_float32_weights, follows_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STAGES = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]  # bottleneck width, blocks, stride


def resnet_shapes() -> dict[str, tuple[int, ...]]:
    """The 161 parameter tensors of ResNet-50."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out: int, inside: int, kernel: int) -> None:
        shapes[f"{name}.conv.weight"] = (out, inside, kernel, kernel)
        shapes[f"{name}.bn.weight"] = (out,)
        shapes[f"{name}.bn.bias"] = (out,)

    convolution("stem", 64, 3, 7)
    channels = 64
    for stage, (width, blocks, _) in enumerate(STAGES):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.1", width, channels, 1)
            convolution(f"{name}.2", width, width, 3)
            convolution(f"{name}.3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, channels, 1)
            channels = 4 * width
    shapes["fc.weight"], shapes["fc.bias"] = (1000, channels), (1000,)
    return shapes


def build_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = {}
    for name, shape in resnet_shapes().items():
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


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_skip_and_overflow_write_no_bit(implementation):
    parameters = build_parameters(torch.float16)
    optimizer = build(parameters, implementation)
    gradients = random_gradients(parameters, 0)
    iterate(optimizer, parameters, gradients, torch.zeros((), device="cuda"))
    before = state_of(optimizer, parameters)
    iterate(optimizer, parameters, gradients, torch.ones((), device="cuda"))
    gradients["stem.bn.bias"][-1] = float("inf")
    assert iterate(optimizer, parameters, gradients, torch.zeros((), device="cuda")).item()
    after = state_of(optimizer, parameters)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_captured_updates_equal_eager_ones(implementation):
    eager_parameters, captured_parameters = build_parameters(torch.bfloat16), build_parameters(torch.bfloat16)
    eager, captured = build(eager_parameters, implementation), build(captured_parameters, implementation)
    static = random_gradients(captured_parameters, 0)
    skip = torch.ones((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        iterate(captured, captured_parameters, static, skip)  # compiles; skipped, so nothing is written
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            iterate(captured, captured_parameters, static, skip)
    torch.cuda.current_stream().wait_stream(stream)
    skip.zero_()
    for seed in range(5):
        gradients = random_gradients(eager_parameters, seed)
        iterate(eager, eager_parameters, gradients, skip)
        for name, value in gradients.items():
            static[name].copy_(value)
        graph.replay()
    expected = state_of(eager, eager_parameters)
    ours = state_of(captured, captured_parameters)
    assert ours["step"].item() == 5
    assert all(torch.equal(value, expected[name]) for name, value in ours.items())


class Scaled:
    """fp16 parameters under clipping and a loss scale; two micro-batches with given gradients."""

    def __init__(self, when: Literal["before_reduction", "after_reduction"]) -> None:
        self.parameters = build_parameters(torch.float16)
        self.scale = LossScale("cuda", torch.float16, initial=8.0, growth_interval=2)
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
    eager, captured = Scaled(when), Scaled(when)
    captured.skip.fill_(1.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.iterate()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured.iterate()
    torch.cuda.current_stream().wait_stream(stream)
    captured.skip.zero_()
    for seed in range(5):
        for case in (eager, captured):
            case.draw(seed, overflow=seed == 2)
        eager.iterate()
        graph.replay()
    expected = state_of(eager.optimizer, eager.parameters)
    found = state_of(captured.optimizer, captured.parameters)
    assert found["step"].item() == 4
    assert found["loss_scale"].item() == 16.0  # 8, 16 after two, 8 after the overflow, 16 after two more
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_captured_an_overflow_of_one_optimizer_keeps_the_other_from_writing():
    parameters = build_parameters(torch.float16)
    scale = LossScale("cuda", torch.float16, initial=8.0, growth_interval=9)
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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        iteration()  # compiles; skipped, so nothing is written
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
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


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_an_update_does_not_wait_for_the_device(implementation):
    parameters = build_parameters(torch.bfloat16)
    optimizer = build(parameters, implementation)
    gradients, skip = random_gradients(parameters, 0), torch.zeros((), device="cuda")
    iterate(optimizer, parameters, gradients, skip)
    torch.cuda.set_sync_debug_mode("error")
    try:
        iterate(optimizer, parameters, gradients, skip)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_a_buffer_is_scaled_like_a_product_in_float32(wide: torch.dtype, add: bool) -> None:
    from common.optim.scale_triton import scale

    x, factor = torch.randn(10_000_019, device="cuda").bfloat16(), torch.tensor(0.37, device="cuda")
    result = torch.randn(x.shape, device="cuda").to(wide)
    expected = (x.float() * factor + (result.float() if add else 0.0)).to(wide)
    scale(x, factor, result, add)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("clip", ["after", "before"])
@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_reads_all_bits_of_float32_gradients(rule, clip, implementation):
    follows_float32_weights(rule, clip, implementation, "cuda")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_updates_with_float32_gradients_and_remainders_are_those_of_torch(implementation):
    follows_torch(implementation, "cuda")
