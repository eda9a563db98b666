"""FP8 products without gradients: with training's scales, which they leave, or with scales of an evaluation's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.language.architecture import TokenPositions
from common.language.decoder import product_of
from common.language.fp8_products import Fp8TrainedProduct
from common.language.network import Decoder
from common.language.products import Scales, Scratch, Shared, WeightCasts
from tests.common.language.small_trained_decoder import CPU, LENGTH, ROWS, SMALL, error, trained
from tests.counted_transposes import counted_transposes
from tests.generators import generator_of

PRODUCTS = 4 * SMALL.layers


class Network:
    """A decoder and its halves."""

    def __init__(self, linear: str = "fp8", transposed: int = 0, own_eval_scales: bool = False) -> None:
        self.model = Decoder(SMALL, dtype=torch.bfloat16)
        self.model.initialise(generator_of)
        self.halves = trained(self.model, linear, transposed_layers=transposed, own_eval_scales=own_eval_scales)

    def hidden(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(SMALL.vocabulary, (ROWS, LENGTH), generator=generator)
        return self.halves.hidden_states(tokens, TokenPositions.whole(ROWS, LENGTH))

    def step(self, *seeds: int, prepared: bool = False) -> dict[str, Tensor]:
        """Passes over micro-batches, before the first of which weights may be cast as graphs of chunks want it;
        gradients, of which a multiple leaves the weights."""
        self.model.zero_grad()
        with self.halves.same_weights():
            if prepared:
                self.halves.prepare()
            for seed in seeds:
                self.hidden(seed).float().square().mean().backward()
        found = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    found[name] = parameter.grad.clone()
                    parameter.sub_(0.1 * parameter.grad)
        return found

    @torch.no_grad()
    def evaluate(self, *seeds: int) -> list[Tensor]:
        with self.halves.evaluating():
            return [self.hidden(seed) for seed in seeds]

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_evaluation_is_what_the_next_step_computes_and_moves_no_scale():
    network, half = Network(), Network("torch")
    network.step(1, 2)
    half.model.load_state_dict(dict(network.model.named_parameters()))
    before = network.buffers()
    (found,) = network.evaluate(3)
    assert equal(network.buffers(), before)
    assert torch.equal(found, network.hidden(3).detach())
    in_half = half.evaluate(3)[0]
    assert not torch.equal(found, in_half)
    assert error(found, in_half) < 0.3  # a few tokens, of which others exceed the scales of before


@pytest.mark.slow_cases("0-False", "2-True")
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("transposed", [0, 2])
def test_training_goes_on_as_if_nothing_had_been_evaluated(transposed, prepared):
    ours, theirs = (Network(transposed=transposed) for _ in range(2))
    for seed in range(3):
        found = ours.step(2 * seed, 2 * seed + 1, prepared=prepared)
        ours.evaluate(7, 8)
        with torch.no_grad():
            ours.hidden(9)  # a pass on its own
        assert equal(found, theirs.step(2 * seed, 2 * seed + 1, prepared=prepared))
        assert equal(ours.buffers(), theirs.buffers())
        assert equal(dict(ours.model.named_parameters()), dict(theirs.model.named_parameters()))


def test_weights_are_cast_before_the_passes_of_an_evaluation_and_not_in_them(monkeypatch):
    network = Network(transposed=SMALL.layers)
    casts = []
    original = Fp8TrainedProduct._cast_weight

    def counted(product: Fp8TrainedProduct) -> None:
        casts.append(product)
        original(product)

    monkeypatch.setattr(Fp8TrainedProduct, "_cast_weight", counted)
    transposes = counted_transposes(monkeypatch)
    with network.halves.evaluating(), torch.no_grad():
        assert len(casts) == len(set(map(id, casts))) == PRODUCTS
        for seed in range(3):
            network.hidden(seed)
    assert len(casts) == PRODUCTS
    assert not transposes, "forward passes want no transposes"
    network.step(1, 2)
    assert len(casts) == 2 * PRODUCTS, "the next step casts its own"
    with torch.no_grad():
        network.hidden(1)
        network.hidden(1)
    assert len(casts) == 4 * PRODUCTS, "elsewhere weights may have changed before any pass"


def test_before_any_step_scales_are_found_and_stay_unknown():
    network, half = Network(), Network("torch")
    found, wanted = network.evaluate(1)[0], half.evaluate(1)[0]
    assert error(found, wanted) < 0.2
    assert not any(buffer.any() for buffer in network.buffers().values())


def test_an_evaluation_with_scales_of_its_own_is_the_same_whatever_came_before():
    """They begin anew, and follow its micro-batches."""
    network, fresh, half = Network(own_eval_scales=True), Network(own_eval_scales=True), Network("torch")
    network.evaluate(5, 6)
    of_others = network.buffers()
    with torch.no_grad():
        kept = {name: parameter.clone() for name, parameter in network.model.named_parameters()}
        for parameter in network.model.parameters():
            parameter.mul_(3.0)
        network.evaluate(9)
        for name, parameter in network.model.named_parameters():
            parameter.copy_(kept[name])
    found, wanted = network.evaluate(1, 2), fresh.evaluate(1, 2)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not equal(network.buffers(), of_others)
    for one, other in zip(found, half.evaluate(1, 2), strict=True):
        assert error(one, other) < 0.3


def test_a_weight_whose_scale_is_unknown_is_cast_with_its_maximum():
    """A sample of its rows would miss the one that is a hundred times as large, and cut it off."""

    class Layer(nn.Module):
        weight: nn.Parameter

    layer = Layer()
    layer.weight = nn.Parameter((torch.randn(1024, 32, generator=generator_of("w")) * 0.01).bfloat16())
    layer.weight.data[1] *= 100.0
    casts = WeightCasts()
    product = product_of(layer, "fp8", Shared(Scratch(CPU), casts))
    assert isinstance(product, Fp8TrainedProduct)
    x = torch.randn(16, 32, generator=generator_of("x")).bfloat16()
    wanted = x.double() @ layer.weight.detach().double().t()
    with casts.evaluating():
        found = product.multiply(product.cast_input(x, True))
    assert error(found, wanted) < 0.06
    assert error(found[:, 1], wanted[:, 1]) < 0.06
    scales = layer.get_submodule("fp8")
    assert isinstance(scales, Scales)
    assert not scales.scales.any()
