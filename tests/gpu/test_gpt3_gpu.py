"""Test GPT-3's network on a GPU: hand-written blocks, the gradient of the head, and published checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpt3.config import GptArchitecture
from benchmarks.gpt3.published import load_published
from common.distributed.context_parallel import ContextSplit
from common.distributed.layout import Layout
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import UnsupportedImplementation
from common.language.architecture import choose_operations
from common.language.decoder import HandwrittenDecoder
from common.language.network import EMBEDDING, Decoder
from common.ops.operation import AUTO
from common.optim.buffers import FlatBuffer, split_masters
from tests.benchmarks.gpt3.small_gpt3 import Passes
from tests.benchmarks.gpt3.small_published import SHAPE as PUBLISHED
from tests.benchmarks.gpt3.small_published import STEPS, Trainee, whole_tensors, write_published
from tests.common.language.head_gradients import HEADS, Case
from tests.generators import generator_of
from tests.gpu.support import BF16_AND_FP8, GPU, captured, relative_error

pytestmark = pytest.mark.gpu

BOUNDS = {"torch": (0.002, 0.06), "fp8": (0.02, 0.4)}
"""Largest relative errors of the loss and of a gradient. With the two mantissa bits of e5m2, they show wrong wiring."""

SHAPE = GptArchitecture(
    vocabulary=500, hidden=512, layers=3, heads=4, feed_forward=2048, positions=384, norm_epsilon=1e-5,
    initializer_range=0.04,
)  # fmt: skip
ROWS, CHUNK, LENGTH = 2, 300, 384


def model(dtype: torch.dtype, shape: GptArchitecture = SHAPE) -> Decoder:
    """Return a network whose norms and biases are random. In float64 it has the same weights as in bf16."""
    made = Decoder(shape, GPU, torch.bfloat16)
    made.initialise(lambda name: generator_of(name, GPU))
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(0.0, 0.1, generator=generator_of(name, GPU))
    return made.to(dtype)


def handwritten(made: Decoder, linear: str, **changes: str) -> Passes:
    operations, _ = choose_operations(changes, made.architecture, ContextSplit(LENGTH), GPU, torch.bfloat16)
    halves = HandwrittenDecoder(made, operations, linear, ROWS * made.architecture.positions)
    return Passes(made, halves, cross_entropy=AUTO)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens (B, S) and labels (T,). The last label of a row is not scored."""
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


@BF16_AND_FP8
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
        errors[name] = relative_error(gradient, wanted[name])
    assert max(errors.values()) < of_gradient, errors
    embedding = ours.embedding.weight.grad
    assert embedding is not None
    assert not embedding[SHAPE.vocabulary :].any()


@BF16_AND_FP8
def test_gradients_in_fp32_do_not_drift(linear: str) -> None:
    """The sum over 16 equal micro-batches is 16 times the gradient of one, and follows float64. In bf16 it drifts."""
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
        drifts = {
            name: relative_error(total[name], micro_batches * gradient.double()) for name, gradient in once.items()
        }
        apart = {name: relative_error(total[name], micro_batches * gradient) for name, gradient in wanted.items()}
        print(f"{gradient_dtype}: drift {max(drifts.values()):.1e}, from float64 {max(apart.values()):.1e}")
        errors[gradient_dtype] = max(drifts.values()), max(apart.values())
    assert errors[torch.float32][0] < 5e-4
    assert errors[torch.float32][0] < 0.5 * errors[torch.bfloat16][0]
    assert errors[torch.float32][1] < BOUNDS[linear][1]


@pytest.mark.parametrize("attention", ["reference", "cudnn", "flash", "flash_attention_4", "cudnn_frontend"])
@BF16_AND_FP8
def test_every_attention_reads_heads_side_by_side(linear: str, attention: str) -> None:
    """Query, key and value are views of one product, and so are their gradients in 16 bits."""
    exact, given = model(torch.float64), rows()
    ours = model(torch.bfloat16)
    try:
        halves = handwritten(ours, linear, attention=attention)
    except UnsupportedImplementation as refusal:  # the library is missing
        pytest.skip(str(refusal))
    for _ in range(2):
        ours.zero_grad()
        loss(halves, *given).backward()
    loss(exact, *given).backward()
    wanted = gradients(exact)
    assert gradients(ours).keys() == wanted.keys()
    for name, gradient in gradients(ours).items():
        if "qkv" in name or "attention_norm" in name:
            assert relative_error(gradient, wanted[name]) < BOUNDS[linear][1], name


@BF16_AND_FP8
def test_losses_without_gradients_follow_float64(linear: str) -> None:
    halves, exact, (tokens_BS, labels_T) = handwritten(model(torch.bfloat16), linear), model(torch.float64), rows()
    with torch.no_grad():
        found, wanted = (
            network.losses(network.through(0, network.embed(tokens_BS), ROWS), labels_T, CHUNK)
            for network in (halves, Passes(exact))
        )
    assert relative_error(found, wanted) < BOUNDS[linear][0] * 4
    assert not found[labels_T < 0].any()


@BF16_AND_FP8
def test_captured_passes_equal_eager_ones(linear: str) -> None:
    """Two micro-batches share the cast weights of a step; each replay casts the weights anew."""
    results = {}
    for capture in (False, True):
        ours = model(torch.bfloat16)
        halves, given = handwritten(ours, linear, attention="reference"), [rows(1), rows(2)]

        def step(halves: Passes = halves, given: list[tuple[Tensor, Tensor]] = given) -> None:
            with halves.same_weights():
                for tokens_BS, labels_T in given:
                    loss(halves, tokens_BS, labels_T).backward()

        graph, _ = captured(step)  # runs two steps first, which set the scales
        found = []
        for _ in range(2):
            for parameter in ours.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
                parameter.data.mul_(0.98)
            graph.replay() if capture else step()
            found.append(gradients(ours))
        results[capture] = found
    for eager, replayed in zip(results[False], results[True], strict=True):
        for name, gradient in eager.items():
            assert relative_error(replayed[name], gradient) < 0.02, name
    first, second = results[True]
    assert any(relative_error(first[name], second[name]) > 0.005 for name in first if name != EMBEDDING)


@BF16_AND_FP8
def test_a_layer_keeps_the_planned_bytes(linear: str) -> None:
    """22 E bytes per token in FP8 and 20 E in 16 bits, besides moments, scales and log-sum-exps; F = 4 E."""
    ours = model(torch.bfloat16)
    halves = handwritten(ours, linear)
    hidden = torch.randn(ROWS * LENGTH, SHAPE.hidden, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    halves.through(0, hidden, ROWS).sum().backward()  # gradients and libraries' workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = halves.through(0, hidden, ROWS)
    kept = torch.cuda.memory_allocated() - before - result.nbytes
    planned = (22 if linear == "fp8" else 20) * SHAPE.hidden * ROWS * LENGTH * SHAPE.layers
    assert kept < 1.05 * planned


# The gradient of the head's weight: chunks add up in fp32, and no product is rounded


LARGE = Case(tokens=4096, chunk=512, words=256, hidden=512, device=GPU)
AS_FP32, BEYOND_BF16 = 2e-4, 5e-4
"""As in tests/common/language/test_head_gradients.py; a tensor core's sums are a little coarser than fp32's."""

LIBRARIES = 64_000_000
"""Bytes of workspaces that products take while they run."""


@pytest.mark.parametrize("head", list(HEADS))
def test_chunks_are_added_without_rounding_their_products(head: str) -> None:
    errors = [LARGE.gradient_and_error(head, LARGE.zeros(), dtype)[1] for dtype in (torch.float32, torch.bfloat16)]
    assert errors[0] < AS_FP32
    assert errors[1] > BEYOND_BF16


@pytest.mark.parametrize("head", list(HEADS))
def test_gradients_of_the_head_follow_float64(head: str) -> None:
    assert LARGE.gradient_and_error(head, LARGE.drawn().mul_(0.1), torch.float32)[1] < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_for_tensor_parallelism_takes_no_memory_for_a_chunks_product(dtype: torch.dtype) -> None:
    """The gradient takes its fp32 sum and, in 16 bits, the rounded result. A chunk takes fp32 and 16-bit logits.

    The product of a chunk would be 268 MB more, and gradients in fp32 may take about 690 MB.
    """
    case = Case(tokens=512, chunk=128, words=65536, hidden=2048, device=LARGE.device)
    weight, hidden, labels = case.given(case.zeros(), dtype)
    HEADS["shared"](weight, hidden, labels, case.chunk).backward()  # leaves the main gradient
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    HEADS["shared"](weight, hidden, labels, case.chunk).backward()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    elements, logits = weight.numel(), case.chunk * case.words
    result_bytes = 4 if dtype == torch.float32 else 6
    assert taken < result_bytes * elements + 10 * logits + 2 * hidden.nbytes + LIBRARIES


# The published checkpoint, which threads read through pinned memory


@pytest.mark.parametrize("masters", ["fp32", "remainder"])
def test_weights_masters_and_moments_are_those_of_the_checkpoint(tmp_path: Path, masters: str) -> None:
    tensors = whole_tensors()
    write_published(tmp_path / "checkpoint", {**tensors, "weights": tensors["masters"]}, PUBLISHED.layers, STEPS)
    layout = Layout(device="cuda:0")
    one = Trainee(layout, TensorParallel(), masters=masters)
    splits = one.model.tensor_splits()
    load_published(tmp_path / "checkpoint", one.model, one.optimizer, layout, PUBLISHED, STEPS, splits)
    state, parameters = one.optimizer.state_dict(), dict(one.model.named_parameters())
    assert state["step"] == STEPS
    for name, kind, values in one.expected(tensors):
        assert torch.equal(state[kind][name], values), (name, kind)
        if kind == "masters":
            rounded = split_masters(values)[0] if masters == "remainder" else values.bfloat16()
            assert torch.equal(parameters[name].cpu(), rounded), name
