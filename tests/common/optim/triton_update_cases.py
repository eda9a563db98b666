"""Test properties of the optimizers' kernels that cases cannot express. tests/test_interpreted_kernels.py runs this
file."""

import pytest
import torch
from remainder_oracle import optimizer, parameters, step, steps_of_both

from common.ops.catalogue import cases_of
from common.ops.operation import Operation
from common.optim import update_triton
from common.optim.adaptive import ADAGRAD, ADAPTIVE, LAMB
from common.optim.buffers import Fragment, Shard
from common.optim.ema import WeightAverage
from common.optim.momentum import MOMENTUM
from common.optim.peer_exchange import add_pieces
from common.optim.rules import Binding, GroupSettings
from tests.operation_checks import check


@pytest.mark.parametrize("operation", [ADAPTIVE, MOMENTUM, ADAGRAD], ids=lambda operation: operation.name)
def test_partial_sums_are_added_up_over_many_chunks(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 64), ("CHUNK", 2), ("MEASURED_BLOCKS", 3)):
        monkeypatch.setattr(update_triton, name, value)
    case = cases_of(operation)[0]
    sizes = {**case.tests[0], "shards": (((1470, 0), (1000, 1)),)}
    check(operation, "triton", case, sizes, torch.float32, torch.device("cpu"))


def test_a_fragment_off_the_alignment_is_refused() -> None:
    shard = Shard(*(torch.zeros(128) for _ in range(3)), (Fragment(0, 0, 32, 32, 64),))
    with pytest.raises(ValueError, match="multiples of 64"):
        LAMB().bind(Binding([shard], [GroupSettings(1.0, 0.0, False, False)], 1, lambda _: None), "triton")


def test_masters_that_are_kept_as_remainders_are_those_of_float32() -> None:
    steps_of_both("triton")


@pytest.mark.parametrize("masters", ["remainder", "fp32"])
def test_the_averages_of_an_update_are_those_after_it(masters):
    average_of, expected_of = {}, {}
    for implementation, found in (("triton", average_of), ("reference", expected_of)):
        named = parameters()
        one = optimizer(named, masters, implementation)
        average = WeightAverage(one, 0.75, copies_first=True)
        for seed in range(4):
            average.measure()
            step(one, named, seed, allowed=seed != 1)
            average.write(torch.tensor(seed != 1))
        found.update(average.state_dict())
    assert average_of["updates"] == expected_of["updates"] == 3
    for name, tensor in expected_of["average"].items():
        torch.testing.assert_close(average_of["average"][name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize("count", [1, 4096, 9801])
def test_a_buffer_is_scaled_like_a_product_in_float32(count, dtype, wide, add):
    x, result, factor = torch.randn(count).to(dtype), torch.randn(count + 8).to(wide), torch.tensor(0.37)
    behind = result[count:].clone()
    expected = (x.float() * factor + (result[:count].float() if add else 0.0)).to(wide)
    update_triton.scale(x, factor, result[:count], add)
    torch.testing.assert_close(result[:count], expected)
    assert torch.equal(result[count:], behind)


def test_a_buffer_is_scaled_in_place():
    x = torch.randn(5000).half()
    expected = (x.float() * 0.37).half()
    update_triton.scale(x, torch.tensor(0.37), x, add=False)
    torch.testing.assert_close(x, expected)


def test_a_factor_that_is_no_number_spoils_everything():
    x = torch.randn(5000)
    update_triton.scale(x, torch.tensor(float("nan")), x, add=False)
    assert x.isnan().all()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter truncates to bf16
@pytest.mark.parametrize("count", [64, 4096, 9792])
def test_pieces_of_three_ranks_are_added_like_in_pytorch_into_one_of_them(count, dtype, clipped):
    own, factors = torch.randn(count).to(dtype), torch.tensor([0.37, 0.61, 1.0])
    slots = torch.randn(4, count + 64).to(dtype)
    expected = slots.clone()
    factor = factors[0] if clipped else None
    add_pieces(own, expected[1::2, :count], expected[1, :count], factor, factors[1:])
    update_triton.add_pieces(own, slots[1::2, :count], slots[1, :count], factor, factors[1:])
    assert torch.equal(slots, expected)
