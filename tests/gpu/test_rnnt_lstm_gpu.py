"""The persistent LSTM on a GPU: against the reference in float64 at real sizes, every division, captured,
repeatable, and beside work on another stream.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.lstm import Initial, LstmStack
from benchmarks.rnnt.ops.lstm import LSTM, LstmWeights, persistent
from benchmarks.rnnt.ops.lstm.plan import Plan, Wait, plans
from benchmarks.rnnt.ops.lstm.reference import lstm_reference
from common.ops.operation import OperationRequest
from tests.generators import generator_of

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
if (reason := persistent.unsupported(OperationRequest(CUDA, torch.float16, {"width": 1024}))) is not None:
    pytest.skip(reason, allow_module_level=True)

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case:
    """Inputs of a layer, of the size that they have in the network."""

    def __init__(self, width: int, batch: int, dtype: torch.dtype, kind: str, frames: int) -> None:
        generator = generator_of(f"{width} {batch} {kind}", CUDA)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=CUDA, generator=generator).mul_(scale).to(dtype).requires_grad_()

        self.x = normal(frames, batch, 256)
        bound = 0.5 * width**-0.5
        self.weights = LstmWeights(
            normal(4 * width, 256, scale=0.05), normal(4 * width, width, scale=bound), normal(4 * width, scale=bound),
            normal(4 * width, scale=bound),
        )  # fmt: skip
        self.cotangent = normal(frames, batch, width).detach()
        self.lengths = torch.empty(batch, dtype=torch.int32, device=CUDA)
        self.kind, self.frames, self.generator = kind, frames, generator
        self.redraw()

    def redraw(self) -> None:
        """Other lengths."""
        if self.kind == "equal":
            self.lengths.fill_(self.frames)
            return
        drawn = torch.randint(0, self.frames + 1, self.lengths.shape, device=CUDA, generator=self.generator)
        drawn[0] = self.frames
        self.lengths.copy_(drawn.sort(descending=True).values if self.kind == "sorted" else drawn)

    def run(self, wide: bool = False, implementation: str = "persistent") -> list[Tensor]:
        """Results, and gradients of everything."""
        leaves = [self.x, *self.weights]
        if wide:
            leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        function = lstm_reference if wide else LSTM.function(implementation)
        y = function(leaves[0], LstmWeights(*leaves[1:]), self.lengths)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.cotangent.to(y.dtype))]

    def assert_right(self) -> None:
        """Results and gradients are those of the formula in float64."""
        found, formulas = self.run(), self.run(wide=True)
        for index, (part, formula) in enumerate(zip(found, formulas, strict=True)):
            error = ((part.double() - formula).norm() / formula.norm()).item()
            assert error < TOLERANCE[part.dtype], f"{index}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("width", "batch", "dtype", "kind"),
    [
        (1024, 192, torch.float16, "sorted"),
        (1024, 192, torch.bfloat16, "mixed"),
        (1024, 32, torch.float16, "sorted"),
        (1024, 32, torch.bfloat16, "equal"),
        (1024, 8, torch.float16, "equal"),
        (1024, 8, torch.bfloat16, "sorted"),
        (1024, 256, torch.float16, "sorted"),
        (1024, 300, torch.float16, "mixed"),
        (512, 192, torch.float16, "mixed"),
        (512, 32, torch.bfloat16, "sorted"),
        (512, 8, torch.float16, "equal"),
        (832, 100, torch.float16, "sorted"),
        (128, 1, torch.float16, "equal"),
    ],
)
def test_results_and_gradients_are_the_formulas(width: int, batch: int, dtype: torch.dtype, kind: str) -> None:
    Case(width, batch, dtype, kind, frames=24).assert_right()


@pytest.mark.parametrize(("width", "batch"), [(1024, 192), (1024, 8), (512, 32)])
def test_a_graph_gives_the_bits_of_the_step_for_other_lengths(width: int, batch: int) -> None:
    case = Case(width, batch, torch.float16, "sorted", frames=30)
    with torch.cuda.stream(torch.cuda.Stream()):
        case.run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = case.run()
        for _ in range(3):
            case.redraw()
            for tensor in captured:
                tensor.fill_(float("nan"))
            graph.replay()
            eager = case.run()
            torch.cuda.synchronize()
            for tensor, reference in zip(captured, eager, strict=True):
                assert reference.isfinite().all()
                assert torch.equal(tensor, reference)


def test_it_ends_beside_work_on_another_stream() -> None:
    case = Case(1024, 192, torch.float16, "sorted", frames=50)
    expected = case.run()
    a, side = torch.randn(4096, 4096, device=CUDA, dtype=torch.float16), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(side):
            for _ in range(8):
                b = a @ a
        found = case.run()
    torch.cuda.synchronize()
    assert b.isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["persistent", "library"])
def test_layers_train_in_16_bit(name: str) -> None:
    initial = Initial(1.0, 0.0, 0.5)
    own = LstmStack(256, 1024, 2, 0.1, initial, generator_of("layers"), CUDA, torch.float16, name)
    wide = LstmStack(256, 1024, 2, 0.1, initial, generator_of("layers"), CUDA, torch.float64, "reference")
    x = torch.randn(21, 32, 256, device=CUDA, generator=generator_of("x", CUDA)).half()
    lengths = torch.arange(32, 0, -1, device=CUDA, dtype=torch.int32).clamp(max=21)
    seed = torch.tensor([5], device=CUDA)
    results = []
    for stack, given in ((own, x), (wide, x.double())):
        y = stack(given, lengths, seed, 3, stack=2)
        y.double().square().sum().backward()
        results.append([y, *(parameter.grad for parameter in stack.parameters())])
    for part, formula in zip(*results, strict=True):
        assert (part.double() - formula).norm() / formula.norm() < 1e-2


@pytest.mark.parametrize("wait", list(Wait), ids=lambda wait: wait.name)
def test_six_hundred_frames_give_the_same_bits_every_time(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    for backward in (False, True):
        every = persistent.fitting_plans(backward, 1024, 192, CUDA, every=True)
        found = [plan for plan in every if plan.wait == wait and persistent.fits(plan, torch.float16, CUDA)]
        assert found or backward, "forward every way has a division"
        if found:
            monkeypatch.setitem(persistent.FIXED_PLANS, (backward, 1024, 192), found[0])
    case = Case(1024, 192, torch.float16, "sorted", frames=600)
    case.assert_right()
    expected = case.run()
    for _ in range(8):
        assert all(torch.equal(*pair) for pair in zip(case.run(), expected, strict=True))


def divisions() -> list[Plan]:
    shared_bytes = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    multiprocessors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    found = []
    for batch, backward in itertools.product((192, 32), (False, True)):
        fitting = plans(backward, 1024, batch, multiprocessors, shared_bytes, every=True)
        likely = [plan for plan in fitting if plan.cluster <= 2 or plan.blocks <= 100]
        found += likely[:8]
    return sorted(found, key=lambda plan: plan.wait)


@pytest.mark.parametrize("plan", divisions(), ids=str)
def test_every_division_gives_the_formula(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 192 if plan.groups * plan.rows >= 192 else 32
    if not persistent.fits(plan, torch.float16, CUDA):
        pytest.skip("clusters keep the GPU from having all blocks at a time")
    monkeypatch.setitem(persistent.FIXED_PLANS, (plan.backward, 1024, batch), plan)
    for kind in ("sorted", "mixed"):
        Case(1024, batch, torch.float16, kind, frames=9).assert_right()
