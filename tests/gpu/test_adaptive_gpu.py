"""LAMB and Adam on a GPU: Triton against plain PyTorch and apex, captured against eager, and the time of one update."""

import pytest
import torch
from torch import Tensor, nn

from common.optim.adaptive import LAMB, Adam, AdamW
from common.optim.adaptive_bench import BERT_LARGE, Size, bert_shapes, bind, build_shard, report
from common.optim.rules import Update
from common.optim.shard import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
MEDIUM = Size(256, 4, 8000)
ULP = torch.finfo(torch.float32).eps
RULES = {"lamb": LAMB(0.6, 0.85), "lamb_of_model": LAMB(0.6, 0.85, norm_of="model"), "adamw": AdamW(), "adam": Adam()}


class Scalars:
    """What an update reads from the device."""

    def __init__(self) -> None:
        self.rates_G = torch.full((2,), 0.01, device=DEVICE)
        self.step = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.factor = torch.ones((), device=DEVICE)
        self.write = torch.ones((), dtype=torch.bool, device=DEVICE)
        self.stats = torch.zeros(2, device=DEVICE)

    def iterate(self, update: Update) -> None:
        """One iteration; the step counts what was written."""
        self.stats.zero_()
        update.measure(self.stats)
        update.apply(self.rates_G, self.step, self.factor, self.write)
        self.step.add_(self.write)


def medium_shard(dtype: torch.dtype) -> Shard:
    torch.manual_seed(0)
    return build_shard(bert_shapes(MEDIUM), dtype, DEVICE)


def set_gradients(shard: Shard, seed: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for f in shard.fragments:
        shard.gradients[f.start : f.start + f.numel].normal_(generator=generator)


def state_of(shard: Shard, update: Update) -> list[Tensor]:
    states = [flat for flats in update.states.values() for flat in flats]
    return [t.clone() for t in (shard.parameters, shard.masters, *states)]


def after_five_steps(
    name: str, dtype: torch.dtype, implementation: str, wide: bool = False, nudge: float = 0.0
) -> list[Tensor]:
    """Weights, masters and moments.

    Args:
        name: of the rule.
        dtype: of weights and gradients.
        implementation: of the rule.
        wide: compute in float64, from the same weights and gradients of ``dtype``.
        nudge: relative change of all gradients.
    """
    drawn, scalars = medium_shard(dtype), Scalars()
    shard = drawn
    if wide:
        masters = drawn.masters.double()
        shard = Shard(masters, torch.zeros_like(masters), masters, drawn.fragments)
    update = bind(RULES[name], shard, implementation)
    assert update.implementation == implementation
    for seed in range(5):
        set_gradients(drawn, seed)
        if wide:
            shard.gradients.copy_(drawn.gradients).mul_(1.0 + nudge)
        scalars.factor.fill_(1.0 / (1 + seed))
        scalars.iterate(update)
    return state_of(shard, update)


def test_bert_large_has_398_tensors_with_336226108_elements():
    shapes = bert_shapes(BERT_LARGE)
    assert len(shapes) == 398
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 336_226_108


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(RULES))
def test_an_update_is_that_of_float64(name, dtype, implementation):
    exact, more, less = (after_five_steps(name, dtype, "reference", True, nudge) for nudge in (0.0, ULP, -ULP))
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}
    for ours, expected, *nudged in zip(after_five_steps(name, dtype, implementation), exact, more, less, strict=True):
        # Adam's g + decay * w may cancel exactly: then the rounding of either, over epsilon, is all of u.
        rounding = torch.stack([(other - expected).abs() for other in nudged]).amax(0)
        allowed = tolerance[ours.dtype] * expected.abs() + 2e-6 + rounding
        off = (ours.double() - expected).abs()
        assert bool((off <= allowed).all()), f"{off.max().item():.3g} off, {(off > allowed).sum().item()} elements"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights_are_their_rounded_masters(dtype):
    parameters, masters, *_ = after_five_steps("lamb", dtype, "triton")
    assert torch.equal(parameters, masters.to(dtype))
    assert not torch.equal(parameters.float(), masters)


@pytest.mark.parametrize("name", list(RULES))
def test_triton_is_deterministic(name):
    first, second = (after_five_steps(name, torch.bfloat16, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_measure_reports_norm_and_infinity(implementation):
    shard, scalars = medium_shard(torch.bfloat16), Scalars()
    update = bind(LAMB(), shard, implementation)
    set_gradients(shard, 0)
    update.measure(scalars.stats)
    infinite, squares = scalars.stats.tolist()
    assert infinite == 0.0
    assert squares == pytest.approx(shard.gradients.double().square().sum().item(), rel=1e-5)
    shard.gradients[shard.fragments[-1].start] = float("nan")
    scalars.stats.zero_()
    update.measure(scalars.stats)
    assert scalars.stats[0].item() > 0.0


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", list(RULES))
def test_without_write_no_bit_changes(name, implementation):
    shard, scalars = medium_shard(torch.float16), Scalars()
    update = bind(RULES[name], shard, implementation)
    set_gradients(shard, 0)
    scalars.iterate(update)
    before = state_of(shard, update)
    shard.gradients.fill_(float("inf"))
    scalars.write.fill_(False)
    scalars.iterate(update)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(shard, update), strict=True))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_captured_updates_equal_eager_ones(implementation):
    shards, scalars = [medium_shard(torch.bfloat16) for _ in range(2)], [Scalars() for _ in range(2)]
    updates = [bind(RULES["lamb"], shard, implementation) for shard in shards]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scalars[1].write.fill_(False)
        scalars[1].iterate(updates[1])  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            scalars[1].iterate(updates[1])
    torch.cuda.current_stream().wait_stream(stream)
    for seed in range(5):
        for shard, s in zip(shards, scalars, strict=True):
            set_gradients(shard, seed)
            s.rates_G.fill_(0.01 * (1 + seed))
            s.factor.fill_(1.0 / (1 + seed))
            s.write.fill_(seed != 3)
        scalars[0].iterate(updates[0])
        graph.replay()
    assert scalars[1].step.item() == 4
    eager, captured = (state_of(s, u) for s, u in zip(shards, updates, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", list(RULES))
def test_an_update_does_not_wait_for_the_device(name, implementation):
    shard, scalars = medium_shard(torch.bfloat16), Scalars()
    update = bind(RULES[name], shard, implementation)
    scalars.iterate(update)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scalars.iterate(update)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fused_lamb() -> type:
    """NVIDIA's LAMB; the package that the registry has under the name of apex is another, and has none."""
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
    shard, scalars = medium_shard(torch.float32), Scalars()
    update = bind(LAMB(0.9, 0.999, 1e-6), shard, "triton")
    parameters = [nn.Parameter(shard.masters[f.start : f.start + f.numel].clone()) for f in shard.fragments]
    groups = [
        {
            "params": [p for p, f in zip(parameters, shard.fragments, strict=True) if f.group == group],
            "weight_decay": decay,
        }
        for group, decay in ((0, 0.1), (1, 0.0))
    ]
    bound = 1.0 if clipped else 1e9
    theirs = lamb(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=bound, use_nvlamb=False)
    for seed in range(5):
        set_gradients(shard, seed)
        for p, f in zip(parameters, shard.fragments, strict=True):
            p.grad = shard.gradients[f.start : f.start + f.numel].clone()
        norm = shard.gradients.double().norm().item()
        scalars.factor.fill_(min(1.0, bound / norm))
        scalars.iterate(update)
        theirs.step()
    for p, f in zip(parameters, shard.fragments, strict=True):
        ours = shard.masters[f.start : f.start + f.numel]
        torch.testing.assert_close(ours, p.detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_print_time_and_ratio_to_a_copy(dtype, capsys):
    torch.manual_seed(0)
    shard = build_shard(bert_shapes(BERT_LARGE), dtype, DEVICE)
    before = shard.masters[:1024].clone()
    lines = report(LAMB(0.60466, 0.85437), shard, "triton")
    assert not torch.equal(shard.masters[:1024], before)
    with capsys.disabled():
        print(f"\n{dtype}, {torch.cuda.get_device_name()}\n{lines}")
