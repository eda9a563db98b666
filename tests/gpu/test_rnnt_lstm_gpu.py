"""Test the persistent LSTM on a GPU: real sizes and every division of the work against float64, graphs, and
repeatability."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.lstm import Initial, LstmStack
from benchmarks.rnnt.ops.lstm import LSTM, LstmWeights, persistent
from benchmarks.rnnt.ops.lstm.cases import CASES
from benchmarks.rnnt.ops.lstm.plan import LstmPlan, Wait, plans
from common.ops.cases import Draw
from common.ops.operation import OperationRequest
from tests.generators import generator_of
from tests.gpu.support import captured, relative_error, replay_over_nan
from tests.operation_checks import check

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
if not torch.cuda.is_available():  # the plans of this GPU are parameters
    pytest.skip("needs a CUDA device", allow_module_level=True)
if (reason := persistent.unsupported(OperationRequest(CUDA, torch.float16, {"width": 1024}))) is not None:
    pytest.skip(reason, allow_module_level=True)

(CASE,) = CASES


def assert_right(width: int, batch: int, dtype: torch.dtype, lengths: str, frames: int) -> None:
    """Check results and gradients against the reference in float64."""
    sizes = {"width": width, "utterances": batch, "inputs": 256, "lengths": lengths, "frames": frames}
    check(LSTM, "persistent", CASE, sizes, dtype, CUDA)


class Layer:
    """A layer with its inputs. The lengths of utterances can change."""

    def __init__(self, width: int, batch: int, frames: int) -> None:
        self.draw = Draw(CUDA, torch.float16)
        self.x = self.draw.normal(frames, batch, 256).requires_grad_()
        shapes = (4 * width, 256), (4 * width, width), (4 * width,), (4 * width,)
        self.weights = LstmWeights(
            *(self.draw.normal(*shape, scale=0.5 * width**-0.5).requires_grad_() for shape in shapes)
        )
        self.cotangent = self.draw.normal(frames, batch, width)
        self.lengths = torch.empty(batch, dtype=torch.int32, device=CUDA)
        self.redraw()

    def redraw(self) -> None:
        """Draw new lengths, the longest first."""
        drawn = self.draw.integers(0, len(self.x) + 1, len(self.lengths), dtype=torch.int32)
        drawn[0] = len(self.x)
        self.lengths.copy_(drawn.sort(descending=True).values)

    def run(self) -> list[Tensor]:
        """Return the result and all gradients."""
        y = LSTM.function("persistent")(self.x, self.weights, self.lengths)
        return [y.detach(), *torch.autograd.grad(y, [self.x, *self.weights], self.cotangent)]


@pytest.mark.parametrize(
    ("width", "batch", "dtype", "lengths"),
    [
        (1024, 192, torch.bfloat16, "mixed"),
        (1024, 32, torch.float16, "sorted"),
        (1024, 8, torch.float16, "equal"),
        (1024, 256, torch.float16, "sorted"),
        (1024, 300, torch.float16, "mixed"),
        (512, 192, torch.float16, "mixed"),
        (512, 32, torch.bfloat16, "sorted"),
        (832, 100, torch.float16, "sorted"),
    ],
)
def test_results_and_gradients_are_the_formulas(width: int, batch: int, dtype: torch.dtype, lengths: str) -> None:
    assert_right(width, batch, dtype, lengths, frames=24)


@pytest.mark.parametrize(("width", "batch"), [(1024, 192), (1024, 8), (512, 32)])
def test_a_graph_gives_the_bits_of_the_step_for_other_lengths(width: int, batch: int) -> None:
    case = Layer(width, batch, frames=30)
    graph, results = captured(case.run)
    for _ in range(3):
        case.redraw()
        replay_over_nan(graph, results)
        for tensor, eager in zip(results, case.run(), strict=True):
            assert eager.isfinite().all()
            assert torch.equal(tensor, eager)


def test_it_ends_beside_work_on_another_stream() -> None:
    case = Layer(1024, 192, frames=50)
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
        y = stack(given, lengths, seed, 3)
        y.double().square().sum().backward()
        results.append([y, *(parameter.grad for parameter in stack.parameters())])
    for part, formula in zip(*results, strict=True):
        assert relative_error(part, formula) < 1e-2


@pytest.mark.parametrize("wait", list(Wait), ids=lambda wait: wait.name)
def test_six_hundred_frames_give_the_same_bits_every_time(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    for backward in (False, True):
        every = persistent.fitting_plans(backward, 1024, 192, CUDA, every=True)
        found = [plan for plan in every if plan.wait == wait and persistent.fits(plan, torch.float16, CUDA)]
        assert found or backward, "forward every way has a division"
        if found:
            monkeypatch.setitem(persistent.FIXED_PLANS, (backward, 1024, 192), found[0])
    assert_right(1024, 192, torch.float16, "sorted", frames=600)
    case = Layer(1024, 192, frames=600)
    expected = case.run()
    for _ in range(8):
        assert all(torch.equal(*pair) for pair in zip(case.run(), expected, strict=True))


def divisions() -> list[LstmPlan]:
    shared_bytes = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    multiprocessors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    found = []
    for batch, backward in itertools.product((192, 32), (False, True)):
        fitting = plans(backward, 1024, batch, multiprocessors, shared_bytes, every=True)
        likely = [plan for plan in fitting if plan.cluster <= 2 or plan.blocks <= 100]
        found += likely[:8]
    return sorted(found, key=lambda plan: plan.wait)


@pytest.mark.parametrize("plan", divisions(), ids=str)
def test_every_division_gives_the_formula(plan: LstmPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = 192 if plan.groups * plan.rows >= 192 else 32
    if not persistent.fits(plan, torch.float16, CUDA):
        pytest.skip("clusters keep the GPU from having all blocks at a time")
    monkeypatch.setitem(persistent.FIXED_PLANS, (plan.backward, 1024, batch), plan)
    for kind in ("sorted", "mixed"):
        assert_right(1024, batch, torch.float16, kind, frames=9)
