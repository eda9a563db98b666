"""Test the LSTM against ``torch.nn.LSTM`` in float64: results and gradients, with mixed, equal and minimum lengths."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.rnnt.lstm import Initial, LstmStack
from benchmarks.rnnt.ops.lstm import LSTM, LstmWeights
from common.errors import UnsupportedImplementation
from common.ops.dropout.reference import dropout_reference
from tests.generators import generator_of

INITIAL = Initial(forget_bias=1.0, hidden_bias_scale=0.0, scale=0.5)
ANYWHERE = ("library", "reference")
LENGTHS = {"mixed": (2, 7, 5, 1), "equal": (7, 7, 7, 7), "one": (1, 1, 1, 1), "sorted": (7, 6, 6, 2)}


def leaves(*shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = generator_of("lstm")
    return [torch.randn(*shape, dtype=dtype, generator=generator).mul_(0.5).requires_grad_() for shape in shapes]


def case(frames: int, batch: int, inputs: int, width: int) -> tuple[Tensor, LstmWeights]:
    x, *weights = leaves((frames, batch, inputs), (4 * width, inputs), (4 * width, width), (4 * width,), (4 * width,))
    return x, LstmWeights(*weights)


def by_pytorch(x: Tensor, weights: LstmWeights, lengths: Sequence[int]) -> Tensor:
    """Return the output of ``nn.LSTM`` over a packed sequence, zero beyond each row's length."""
    module = nn.LSTM(x.shape[2], weights.width, dtype=x.dtype)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    parameters = dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), weights, strict=True))
    result, _ = torch.func.functional_call(module, parameters, (packed,))
    return pad_packed_sequence(result, total_length=len(x))[0]


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_results_and_gradients_equal_pytorchs(name, lengths):
    x, weights = case(7, 4, 5, 6)
    wanted = [x, *weights]
    expected = by_pytorch(x, weights, lengths)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=generator_of("cotangent"))
    gradients = torch.autograd.grad(expected, wanted, cotangent)

    found = LSTM.function(name)(x, weights, torch.tensor(lengths, dtype=torch.int32))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for part, formula in zip(torch.autograd.grad(found, wanted, cotangent), gradients, strict=True):
        torch.testing.assert_close(part, formula, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ANYWHERE)
def test_the_output_of_a_row_without_frames_is_zero(name):
    x, weights = case(3, 2, 5, 6)
    y = LSTM.function(name)(x, weights, torch.tensor([0, 3]))
    assert (y[:, 0] == 0).all()
    assert (y[:, 1] != 0).all()


@pytest.mark.parametrize("name", ANYWHERE)
def test_inconsistent_shapes_and_dtypes_are_refused(name):
    x, weights = case(3, 2, 5, 6)
    lengths, function = torch.tensor([3, 3]), LSTM.function(name)
    with pytest.raises(ValueError, match=r"x is \(3, 2, 4\)"):
        function(x[:, :, :4], weights, lengths)
    with pytest.raises(ValueError, match="lengths"):
        function(x, weights, lengths[:1])
    with pytest.raises(ValueError, match=r"weight_hh is .*float32"):
        function(x, weights._replace(hh_GH=weights.hh_GH.float()), lengths)


# Layers


def stack(dropout: float, **options: object) -> LstmStack:
    return LstmStack(5, 8, 3, dropout, INITIAL, generator_of("stack"), dtype=torch.float64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ANYWHERE)
def test_layers_without_dropout_equal_pytorchs(name):
    own, theirs = stack(0.1, implementation=name).eval(), nn.LSTM(5, 8, 3, dtype=torch.float64)
    theirs.load_state_dict(own.state_dict())
    (x,) = leaves((6, 3, 5))
    lengths = (6, 2, 4)
    packed = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    expected = pad_packed_sequence(theirs(packed)[0], total_length=6)[0]
    found = own(x, torch.tensor(lengths, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_each_layer_has_dropout_with_its_own_call_site():
    own = stack(0.3, implementation="reference")
    (x,) = leaves((6, 3, 5))
    lengths, seed = torch.tensor([6, 2, 4]), torch.tensor([123])
    expected = x
    for layer in range(3):
        expected = LSTM.function("reference")(expected, own.weights(layer), lengths)
        expected = dropout_reference(expected, 0.3, seed[0], 40 + layer)
    assert torch.equal(own(x, lengths, seed, 40), expected)
    assert (own.eval()(x, lengths, seed, 40) != 0).all(2).sum() == 12


def test_single_steps_equal_a_sequence():
    own = stack(0.3).eval()
    (x,) = leaves((6, 3, 5))
    expected = own(x, torch.full((3,), 6), torch.zeros(1, dtype=torch.int64), 0)
    state = own.initial_state(3)
    for frame, x_BI in enumerate(x):
        y, state = own.step(x_BI, state)
        torch.testing.assert_close(y, expected[frame], rtol=1e-12, atol=1e-12)
    assert [part.shape for part in state] == [(3, 3, 8)] * 2


def test_the_library_is_refused_in_bf16_on_a_cpu():
    with pytest.raises(UnsupportedImplementation, match="wrong on CPUs"):
        LstmStack(5, 8, 1, 0.1, INITIAL, generator_of("stack"), dtype=torch.bfloat16, implementation="library")
    assert LstmStack(5, 8, 1, 0.1, INITIAL, generator_of("stack"), dtype=torch.bfloat16).choice == "reference"
