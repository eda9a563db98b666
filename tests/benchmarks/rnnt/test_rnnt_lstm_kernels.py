"""Test the persistent LSTM's CUDA C++ kernels, compiled for a CPU, against the reference in fp32; and NVRTC's build."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.ops.lstm import persistent
from benchmarks.rnnt.ops.lstm.persistent import lstm_persistent
from benchmarks.rnnt.ops.lstm.plan import MOST_ROWS, LstmPlan, Wait, plans
from benchmarks.rnnt.ops.lstm.reference import LstmWeights, lstm_reference
from common.ops.cuda_program import compiled, no_compiler
from tests.generators import generator_of

H200 = (132, 232448)
"""Number of multiprocessors, and bytes of shared memory per block."""
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
MACHINE = Path(__file__).with_name("lstm_machine.hpp")
LAUNCH = """
extern "C" bool launch(int blocks, int shared_bytes, void** p, const int* n) {
  return machine_run(blocks, shared_bytes, [=] {
#if BACKWARD
    lstm_recurrence_backward((u16*)p[0], (u16*)p[1], (u16*)p[2], (float*)p[3], (u16*)p[4], (int*)p[5], (u32*)p[6],
                             (u32*)p[7], n[0], n[1], n[2], n[3]);
#else
    lstm_recurrence_forward((u16*)p[0], (u16*)p[1], (u16*)p[2], (u16*)p[3], (int*)p[4], (u32*)p[5], (u32*)p[6], n[0],
                            n[1], n[2], n[3], n[4]);
#endif
  });
}
"""


class Machine:
    """A kernel on the CPU, in place of :class:`common.ops.cuda_program.CudaKernel`."""

    def __init__(self, plan: LstmPlan, bfloat: bool, folder: Path) -> None:
        macros = "".join(f"#define {name} {value}\n" for name, value in plan.macros(bfloat).items())
        kernels = Path(persistent.__file__).with_name("kernels.cu").read_text()
        file = folder / f"{abs(hash((plan, bfloat)))}.cpp"
        file.write_text(macros + MACHINE.read_text() + kernels + LAUNCH)
        library = file.with_suffix(".so")
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(file)]
        subprocess.run(command, check=True)
        self._library, self._shared_bytes = ctypes.CDLL(str(library)), plan.shared_bytes
        self._library.launch.restype = ctypes.c_bool

    def launch_cooperatively(self, blocks: int, arguments: Sequence[Tensor | int | None]) -> None:
        pointers = [0 if given is None else given.data_ptr() for given in arguments if not isinstance(given, int)]
        numbers = [given for given in arguments if isinstance(given, int)]
        ended = self._library.launch(
            blocks, self._shared_bytes, (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int * len(numbers))(*numbers),
        )  # fmt: skip
        assert ended, "the blocks are in a deadlock"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Machine]:
    folder = tmp_path_factory.mktemp("machines")
    return functools.cache(lambda plan, bfloat, device: Machine(plan, bfloat, folder))


@pytest.fixture
def machine(machines: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(persistent, "_kernel", machines)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = generator_of(f"kernels {shape}")
    return torch.randn(shape, generator=generator).mul_(scale).to(dtype).requires_grad_()


def small_weights(scale: float = 1.0) -> LstmWeights:
    """Return fp16 weights of a layer with 8 inputs and 128 units."""
    shapes = (512, 8), (512, 128), (512,), (512,)
    return LstmWeights(*(drawn(*shape, dtype=torch.float16, scale=scale) for shape in shapes))


def lengths_of(batch: int, frames: int, kind: str) -> Tensor:
    if kind == "equal":
        return torch.full((batch,), frames, dtype=torch.int32)
    lengths = torch.randint(0, frames + 1, (batch,), generator=generator_of("lengths"), dtype=torch.int32)
    return lengths.sort(descending=True).values if kind == "sorted" else lengths


# H, (groups, rows, units, cluster, wait) forward and backward, batch, dtype, lengths: a last block with fewer units,
# two tiles, sums over 1 to 8 blocks
DIVISIONS: dict[str, tuple[int, tuple[Any, ...], tuple[Any, ...], int, torch.dtype, str]] = {
    "one tile": (128, (2, 48, 24, 1, Wait.COUNT), (2, 48, 24, 1, Wait.LOAD), 70, torch.float16, "mixed"),
    "two tiles": (128, (1, 96, 32, 1, Wait.LOAD), (1, 96, 16, 4, Wait.COUNT), 90, torch.bfloat16, "sorted"),
    "odd width": (192, (1, 32, 32, 1, Wait.COUNT), (1, 32, 24, 4, Wait.COUNT), 20, torch.float16, "equal"),
    "clusters": (128, (1, 16, 16, 2, Wait.LOAD), (1, 16, 8, 8, Wait.LOAD), 9, torch.bfloat16, "mixed"),
}


@pytest.mark.slow_cases("one tile", "two tiles", "odd width")
@pytest.mark.parametrize("name", DIVISIONS)
def test_kernels_equal_the_reference(name, machine, monkeypatch):
    width, *divisions, batch, dtype, kind = DIVISIONS[name]
    inputs, frames = 24, 6
    for backward, division in zip((False, True), divisions, strict=True):
        monkeypatch.setitem(persistent.FIXED_PLANS, (backward, width, batch), LstmPlan(backward, width, *division))
    x = drawn(frames, batch, inputs, dtype=dtype)
    ih, hh = drawn(4 * width, inputs, dtype=dtype, scale=0.3), drawn(4 * width, width, dtype=dtype, scale=0.15)
    weights = LstmWeights(ih, hh, drawn(4 * width, dtype=dtype), drawn(4 * width, dtype=dtype, scale=0.5))
    lengths = lengths_of(batch, frames, kind)
    leaves = [x, *weights]

    found = lstm_persistent(x, weights, lengths)
    leaves_fp32 = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = lstm_reference(leaves_fp32[0], LstmWeights(*leaves_fp32[1:]), lengths)
    cotangent = drawn(*expected.shape, dtype=torch.float32).detach()
    gradients = torch.autograd.grad(found, leaves, cotangent.to(dtype))
    formula_gradients = torch.autograd.grad(expected, leaves_fp32, cotangent)

    padding = torch.arange(frames).unsqueeze(1) >= lengths
    assert (found[padding] == 0).all()
    for index, (part, formula) in enumerate(zip([found, *gradients], [expected, *formula_gradients], strict=True)):
        error = (part.float() - formula).norm() / formula.norm()
        assert error < TOLERANCE[dtype], f"{index}: relative error {error:.2e}"


def test_rows_above_the_maximum_take_several_launches(machine, monkeypatch):
    width, batch, frames = 128, MOST_ROWS + 5, 2
    monkeypatch.setitem(persistent.FIXED_PLANS, (False, width, MOST_ROWS), LstmPlan(False, width, 2, 128, 32, 1))
    monkeypatch.setitem(persistent.FIXED_PLANS, (False, width, 5), LstmPlan(False, width, 1, 16, 32, 1))
    x, lengths = drawn(frames, batch, 8, dtype=torch.float16), lengths_of(batch, frames, "mixed")
    weights = small_weights(0.2)
    with torch.no_grad():
        found = lstm_persistent(x, weights, lengths)
        expected = lstm_reference(x.float(), LstmWeights(*(weight.float() for weight in weights)), lengths)
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("autograd", [False, True])
def test_gates_and_cell_states_are_saved_only_for_a_backward_pass(autograd, machine, monkeypatch):
    monkeypatch.setitem(persistent.FIXED_PLANS, (False, 128, 3), LstmPlan(False, 128, 1, 16, 32, 1))
    launch = persistent.launch
    kept = []

    def recorded(
        backward: bool, batch: int, pointers: list[Tensor | None], width: int, tail: list[int]
    ) -> list[Tensor]:
        cell_TBH = pointers[2]
        kept.append((0 if cell_TBH is None else len(cell_TBH), tail))
        return launch(backward, batch, pointers, width, tail)

    monkeypatch.setattr(persistent, "launch", recorded)
    weights = small_weights()
    with torch.set_grad_enabled(autograd):
        lstm_persistent(drawn(4, 3, 8, dtype=torch.float16), weights, torch.full((3,), 4, dtype=torch.int32))
    assert kept == [(5, [1]) if autograd else (0, [0])]


def test_a_second_backward_pass_is_refused(machine, monkeypatch):
    for backward in (False, True):
        monkeypatch.setitem(persistent.FIXED_PLANS, (backward, 128, 3), LstmPlan(backward, 128, 1, 16, 32, 1))
    x = drawn(1, 3, 8, dtype=torch.float16)
    weights = small_weights()
    y = lstm_persistent(x, weights, torch.ones(3, dtype=torch.int32))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs only once"):
        y.sum().backward()


# Divisions


@pytest.mark.parametrize("batch", [1, 8, 32, 64, 100, 192, 256])
@pytest.mark.parametrize("width", [128, 512, 832, 1024])
@pytest.mark.parametrize("backward", [False, True])
def test_every_plan_covers_all_rows_and_units_within_the_gpus_limits(backward, width, batch):
    found = plans(backward, width, batch, *H200)
    assert found
    assert {plan.wait for plan in found} == {Wait.COUNT if backward else Wait.LOAD}
    every = plans(backward, width, batch, *H200, every=True)
    assert {plan._replace(wait=found[0].wait) for plan in every} == set(found)
    assert {plan.wait for plan in every} == set(Wait)
    assert len(set(every)) == len(every)
    for plan in found:
        assert plan.groups * plan.rows >= batch > (plan.groups - 1) * plan.rows
        assert plan.group_blocks * plan.units >= width
        assert plan.blocks <= H200[0]
        assert plan.shared_bytes <= H200[1]


# Rows, backward: (groups, rows, units, cluster, wait) and microseconds a frame of a layer of 1,024 units
# (measured on two H200)
MEASURED = {
    (192, False): {
        (3, 64, 24, 1, Wait.LOAD): 6.58, (3, 64, 24, 1, Wait.COUNT): 7.11, (2, 96, 16, 1, Wait.COUNT): 8.84,
        (2, 96, 16, 2, Wait.LOAD): 9.15, (2, 96, 16, 2, Wait.COUNT): 10.74, (2, 96, 24, 1, Wait.COUNT): 12.41,
    },
    (192, True): {
        (3, 64, 24, 2, Wait.COUNT): 8.51, (2, 96, 16, 2, Wait.COUNT): 10.71, (2, 96, 24, 2, Wait.COUNT): 15.54,
    },
    (32, False): {
        (1, 32, 8, 1, Wait.LOAD): 2.97, (1, 32, 8, 2, Wait.LOAD): 3.33, (2, 16, 16, 1, Wait.LOAD): 3.47,
        (1, 32, 8, 1, Wait.COUNT): 3.65, (1, 32, 16, 1, Wait.LOAD): 3.79, (1, 32, 16, 1, Wait.COUNT): 4.11,
        (1, 32, 8, 2, Wait.COUNT): 4.2, (2, 16, 16, 2, Wait.LOAD): 4.35, (2, 16, 24, 1, Wait.LOAD): 4.58,
    },
    (32, True): {
        (1, 32, 8, 2, Wait.COUNT): 4.53, (1, 32, 16, 4, Wait.LOAD): 4.78, (1, 32, 16, 8, Wait.LOAD): 5.72,
        (2, 16, 16, 1, Wait.COUNT): 5.9, (1, 32, 16, 8, Wait.COUNT): 6.11, (1, 32, 8, 1, Wait.COUNT): 7.14,
    },
    (8, False): {
        (1, 16, 8, 1, Wait.LOAD): 2.51, (1, 16, 8, 2, Wait.LOAD): 2.73, (1, 16, 16, 1, Wait.LOAD): 2.83,
        (1, 16, 8, 1, Wait.COUNT): 3.37, (1, 16, 8, 2, Wait.COUNT): 3.85, (1, 16, 16, 1, Wait.COUNT): 3.87,
    },
    (8, True): {
        (1, 16, 8, 2, Wait.COUNT): 4.17, (1, 16, 16, 4, Wait.LOAD): 4.19, (1, 16, 16, 8, Wait.LOAD): 5.14,
        (1, 16, 16, 1, Wait.COUNT): 5.44, (1, 16, 16, 8, Wait.COUNT): 5.69, (1, 16, 8, 1, Wait.COUNT): 6.32,
    },
}  # fmt: skip


@pytest.mark.parametrize(("batch", "backward"), MEASURED)
def test_the_first_division_is_the_fastest_that_was_measured(batch, backward):
    measured = {LstmPlan(backward, 1024, *division): took for division, took in MEASURED[batch, backward].items()}
    assert plans(backward, 1024, batch, *H200)[0] == min(measured, key=lambda plan: measured[plan])
    for plan, took in measured.items():
        assert abs(plan.microseconds / took - 1) < 0.25


def test_a_small_gpu_has_no_plan_for_a_large_layer():
    assert not plans(False, 1024, MOST_ROWS, 20, H200[1])


@pytest.mark.parametrize(
    ("backward", "bfloat", "width", "batch"),
    [(False, False, 1024, 192), (True, True, 1024, 192), (False, True, 512, 8), (True, False, 832, 32)],
)
def test_nvrtc_compiles_the_source(backward, bfloat, width, batch):
    if (reason := no_compiler()) is not None:
        pytest.skip(reason)
    plan = plans(backward, width, batch, *H200)[0]
    assert compiled(persistent.source(plan, bfloat), "lstm.cu", "sm_90a").startswith(b"\x7fELF")
