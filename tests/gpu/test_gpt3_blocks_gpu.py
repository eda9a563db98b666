"""GPT-3's written blocks on a GPU: gradients against float64, captured iterations, what they keep, and FP8 beside bf16
on text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.config import GptArchitecture
from benchmarks.gpt3.workload import GptPretraining
from common import cli
from common.config.composition import compose
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.errors import UnsupportedImplementation
from common.language.architecture import choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.network import EMBEDDING, Decoder
from common.ops.operation import AUTO
from common.optim.buffers import FlatBuffer
from common.step.capture import capturing
from tests.benchmarks.gpt3.small_gpt3 import Passes
from tests.generators import generator_of
from tests.gpu import learning_text

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = torch.device("cuda")
WITH_FP8 = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 units")
LINEAR = pytest.mark.parametrize("linear", ["torch", pytest.param("fp8", marks=WITH_FP8)])
BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.4)}
"""Of the loss and of a gradient, relative: e5m2 has two bits behind the point, so that is the wiring."""

SHAPE = GptArchitecture(
    vocabulary=500, hidden=512, layers=3, heads=4, feed_forward=2048, positions=384, norm_epsilon=1e-5,
    initializer_range=0.04,
)  # fmt: skip
ROWS, CHUNK, LENGTH = 2, 300, 384


def model(dtype: torch.dtype, shape: GptArchitecture = SHAPE) -> Decoder:
    """With norms and biases that matter; in float64 the numbers of bf16."""
    made = Decoder(shape, GPU, torch.bfloat16)
    made.initialise(lambda name: generator_of(name, GPU))
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(0.0, 0.1, generator=generator_of(name, GPU))
    return made.to(dtype)


def handwritten(made: Decoder, linear: str, **changes: str) -> Passes:
    operations, names = choose_operations(changes, made.architecture, ContextSplit(LENGTH), GPU, torch.bfloat16)
    print(names)
    halves = HandwrittenDecoder(made, operations, linear, ROWS * made.architecture.positions)
    return Passes(made, halves, cross_entropy=AUTO)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens (B, S) and labels (T,), of which the last of a row is not scored."""
    generator = torch.Generator(GPU).manual_seed(seed)
    tokens_BR = torch.randint(SHAPE.vocabulary, (ROWS, LENGTH + 1), generator=generator, device=GPU, dtype=torch.int32)
    tokens_BR[:, -1] = -1
    return tokens_BR[:, :-1].contiguous(), tokens_BR[:, 1:].flatten()


def loss(network: Decoder | Passes, tokens_BS: Tensor, labels_T: Tensor) -> Tensor:
    network = Passes(network) if isinstance(network, Decoder) else network
    hidden = network.through(0, network.embed(tokens_BS), ROWS)
    return network.summed_loss(hidden, labels_T, CHUNK, 1 / (ROWS * (LENGTH - 1)))


def gradients(made: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters() if parameter.grad is not None}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@LINEAR
def test_gradients_follow_float64(linear: str) -> None:
    ours, exact = model(torch.bfloat16), model(torch.float64)
    halves, given = handwritten(ours, linear), rows()
    for _ in range(2):  # the second use has the scale of the first
        ours.zero_grad()
        found = loss(halves, *given)
        found.backward()
    expected = loss(exact, *given)
    expected.backward()
    of_loss, of_gradient = BOUNDS[linear]
    torch.testing.assert_close(found.double(), expected, rtol=of_loss, atol=0)
    wanted, errors = gradients(exact), {}
    assert gradients(ours).keys() == wanted.keys()
    for name, gradient in gradients(ours).items():
        errors[name] = error(gradient, wanted[name])
    print({name: round(value, 4) for name, value in errors.items()})
    assert max(errors.values()) < of_gradient, errors
    embedding = ours.embedding.weight.grad
    assert embedding is not None
    assert not embedding[SHAPE.vocabulary :].any()


@LINEAR
def test_gradients_in_fp32_do_not_drift(linear: str) -> None:
    """Micro-batches on the same rows add up to as many times one, and follow float64; in bf16 they drift apart."""
    micro_batches, exact, given = 16, model(torch.float64), rows()
    loss(exact, *given).backward()
    wanted, errors = gradients(exact), {}
    for gradient_dtype in (torch.float32, torch.bfloat16):
        ours = model(torch.bfloat16)
        halves = handwritten(ours, linear, attention="reference")
        buffer = FlatBuffer([dict(ours.named_parameters())], gradient_dtype=gradient_dtype)
        for _ in range(30):  # delayed scales settle, one product after another
            buffer.zero_gradients()
            loss(halves, *given).backward()
        once = gradients(ours)
        for _ in range(micro_batches - 1):
            loss(halves, *given).backward()
        buffer.check()
        total = gradients(ours)
        assert {gradient.dtype for gradient in total.values()} == {gradient_dtype}
        drifts = {name: error(total[name], micro_batches * gradient.double()) for name, gradient in once.items()}
        apart = {name: error(total[name], micro_batches * gradient) for name, gradient in wanted.items()}
        print(f"{gradient_dtype}: drift {max(drifts.values()):.1e}, from float64 {max(apart.values()):.1e}")
        errors[gradient_dtype] = max(drifts.values()), max(apart.values())
    assert errors[torch.float32][0] < 5e-4
    assert errors[torch.float32][0] < 0.5 * errors[torch.bfloat16][0]
    assert errors[torch.float32][1] < BOUNDS[linear][1]


@pytest.mark.parametrize("attention", ["reference", "cudnn", "flash", "flash_attention_4", "cudnn_frontend"])
@LINEAR
def test_every_attention_reads_heads_side_by_side(linear: str, attention: str) -> None:
    """Query, key and value are views of one product, and in 16 bits their gradients are of one tensor."""
    exact, given = model(torch.float64), rows()
    ours = model(torch.bfloat16)
    try:
        halves = handwritten(ours, linear, attention=attention)
    except UnsupportedImplementation as refusal:  # a library that is not here
        pytest.skip(str(refusal))
    for _ in range(2):
        ours.zero_grad()
        loss(halves, *given).backward()
    loss(exact, *given).backward()
    wanted = gradients(exact)
    assert gradients(ours).keys() == wanted.keys()
    for name, gradient in gradients(ours).items():
        if "qkv" in name or "attention_norm" in name:
            assert error(gradient, wanted[name]) < BOUNDS[linear][1], name


@LINEAR
def test_losses_without_gradients_follow_float64(linear: str) -> None:
    halves, exact, (tokens_BS, labels_T) = handwritten(model(torch.bfloat16), linear), model(torch.float64), rows()
    with torch.no_grad():
        found, wanted = (
            network.losses(network.through(0, network.embed(tokens_BS), ROWS), labels_T, CHUNK)
            for network in (halves, Passes(exact))
        )
    assert error(found, wanted) < BOUNDS[linear][0] * 4
    assert not found[labels_T < 0].any()


@LINEAR
def test_captured_passes_are_those_of_eager_ones(linear: str) -> None:
    """Gradients of two micro-batches, whose weights are cast once; twice, with the weights changed between."""
    results = {}
    for captured in (False, True):
        ours = model(torch.bfloat16)
        halves, given = handwritten(ours, linear, attention="reference"), [rows(1), rows(2)]

        def step(halves: Passes = halves, given: list[tuple[Tensor, Tensor]] = given) -> None:
            with halves.same_weights():
                for tokens_BS, labels_T in given:
                    loss(halves, tokens_BS, labels_T).backward()

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        found = []
        with torch.cuda.stream(stream):
            step()  # scales
            step()
            torch.cuda.synchronize()
            if captured:
                with capturing(graph, stream):
                    step()
            for _ in range(2):
                for parameter in ours.parameters():
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                    parameter.data.mul_(0.98)
                graph.replay() if captured else step()
                found.append(gradients(ours))
        torch.cuda.synchronize()
        results[captured] = found
    for eager, replayed in zip(results[False], results[True], strict=True):
        for name, gradient in eager.items():
            assert error(replayed[name], gradient) < 0.02, name
    first, second = results[True]
    assert any(error(first[name], second[name]) > 0.005 for name in first if name != EMBEDDING)


@LINEAR
def test_a_layer_keeps_as_much_as_is_said(linear: str) -> None:
    """22 E bytes of a token in FP8 and 20 E in 16 bits, beside moments, scales and log-sum-exps; F = 4 E."""
    ours = model(torch.bfloat16)
    halves = handwritten(ours, linear)
    hidden = torch.randn(ROWS * LENGTH, SHAPE.hidden, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    halves.through(0, hidden, ROWS).sum().backward()  # gradients and libraries' workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = halves.through(0, hidden, ROWS)
    kept = torch.cuda.memory_allocated() - before - result.nbytes
    said = (22 if linear == "fp8" else 20) * SHAPE.hidden * ROWS * LENGTH * SHAPE.layers
    print(f"{linear}: {kept / said:.4f} of what is said")
    assert kept < 1.05 * said


def reads_text(linear: str, *overrides: str) -> list[float]:
    """Mean losses of a network of four layers, 1,024 wide."""
    facts = {
        "vocabulary": learning_text.VOCABULARY, "hidden": 1024, "layers": 4, "heads": 8, "feed_forward": 4096,
        "positions": LENGTH, "initializer_range": 0.02, "warmup_samples": 320, "decay_samples": 64_000,
    }  # fmt: skip
    given = [f"benchmark.facts.{name}={value}" for name, value in facts.items()]
    run, _ = cli.load(
        compose([
            "benchmark=gpt3", "scale=test", "device=cuda", "precision=bf16", *given, f"model.linear={linear}",
            f"hparams.global_batch_size={learning_text.ROWS}", f"micro_batch={learning_text.ROWS}",
            "hparams.base_learning_rate=5e-4", *overrides,
        ])
    )  # fmt: skip
    made = GptPretraining(run, Layout(run.layout, seed=3, device=GPU))
    return learning_text.mean_losses(made, GPU, LENGTH, last_is_scored=False)


@WITH_FP8
def test_fp8_learns_text_as_bf16_does() -> None:
    learning_text.check_that_fp8_learns_as_bf16_does(reads_text)
