"""Bytes and FLOPs of the kernels of a step, for their position in a roofline.

Two sources. The first are the shapes of PyTorch's operators: a step runs eagerly under the profiler, which links every
kernel to the operator that launched it. The second are the cases of the suite's own operations
(:mod:`common.ops.cases`), whose kernels no operator of PyTorch launches: each case runs once under the profiler.

Bytes are those that must move at least: each input is read once, each output is written once. A kernel that no source
covers has no entry; nothing is estimated.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from common.contract.workload import Workload
from common.data.batches import Batch
from common.doctor.reading import first_line
from common.errors import ConfigError, UnsupportedImplementation
from common.ops.bench.worker import passes_of
from common.ops.cases import Case
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import Operation
from common.run.kernel_profile import Breakdown, meet, recorded
from common.step.graphs import StepRunner

MARK = "kernel work "
"""Prefix of the profiler's ranges around operators."""

WITHOUT_CASES = frozenset({"linear", "accumulation"})
"""Operations whose kernels PyTorch launches, or whose operands are narrower than the dtype of their cases."""

UPDATE_RULES = "common.optim."
"""Prefix of the names of update rules among all operations."""
NOISE = 0.05
"""If a kernel takes less than this fraction of its time longer in a backward pass with its forward pass than in the
forward pass alone, it belongs to the forward pass only."""

PRECISIONS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

STILL = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Non-view operators that move no data."""
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
"""Operators that write their first argument without reading it."""
GATHERS = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read only as much of their first argument as they return."""
SCATTERS = frozenset({"index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_"})
"""Operators that read and write only as much of their first argument as their largest other one has."""
PRODUCTS = re.compile(r"(mm|mv|conv\w*|rnn\w*|lstm\w*|gru\w*|dot|attention\w*)(_backward|_activation)?_?$")
"""Names of operators that compute products; without a formula for their FLOPs, their work is unknown."""


@dataclass(frozen=True)
class OperatorWork:
    """Work of equal launches of one kernel in a step.

    Attributes:
        kernel: name of the kernel; on a CPU, of the operator.
        operator: PyTorch's operator that launched it.
        launches: launches in a step.
        ms: milliseconds in a step, all launches together.
        bytes, flops: work in a step, all launches together.
        precision: format of the operands, such as ``bf16``; ``tf32`` for fp32 operands that tensor cores round.
    """

    kernel: str
    operator: str
    launches: int
    ms: float
    bytes: float
    flops: float
    precision: str


@dataclass(frozen=True)
class CaseWork:
    """Work of one pass of a case of an operation, at the sizes of the case.

    Attributes:
        direction: name of the pass, such as ``forward``.
        kernels: kernel name to its milliseconds in the pass.
        failure: reason why the case did not run; else empty.
    """

    operation: str
    case: str
    direction: str
    implementation: str
    bytes: float = 0.0
    flops: float = 0.0
    precision: str = ""
    kernels: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class _Call:
    operator: str
    bytes: float
    flops: float | None
    precision: str


class _Calls(TorchDispatchMode):
    """Puts a numbered range of the profiler around every operator, and records the operator's work.

    Attributes:
        found: number in the range's name to the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, _Call] = {}
        self._numbers = itertools.count()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, number = kwargs or {}, next(self._numbers)
        with record_function(f"{MARK}{number}"):
            result = func(*args, **kwargs)
        self.found[number] = _Call(
            str(func.overloadpacket),
            bytes_of(func, args, kwargs, result),
            flops_of(func, args, kwargs, result),
            _precision(func, args, kwargs),
        )
        return result


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the bytes that an operator must move.

    Args:
        func: overload of an operator, such as ``torch.ops.aten.mm.default``.
        result: its result; tensors that it changed in place count as read and as written.
    """
    name = func.overloadpacket.__name__
    if func.is_view or name in STILL:
        return 0.0
    tensors = list(_tensors((args, kwargs)))
    results = [] if name in SCATTERS else list(_tensors(result))
    first, others = (tensors[0], tensors[1:]) if tensors else (None, [])
    written = sum(map(_size, results))
    if name in OVERWRITES:
        return written + _sizes(others)
    if name in GATHERS:
        return 2 * written + _sizes(others)
    if name in SCATTERS and first is not None:
        touched = min(_size(first), max(map(_size, others), default=0.0))
        return 2 * touched + _sizes(others)
    return written + _sizes(tensors)


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float | None:
    """Return the FLOPs of an operator by PyTorch's formulas: 0 for one without products, None if unknown.

    A causal attention computes half of the products that PyTorch's formula counts.
    """
    packet = func.overloadpacket
    counter: Callable[..., float] | None = flop_registry.get(packet)
    if counter is None:
        return None if PRODUCTS.search(packet.__name__) else 0.0
    names = [argument.name for argument in func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    flops = float(counter(*args, **kwargs, out_val=result))
    return flops / 2 if named.get("is_causal") is True else flops


def _precision(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the narrowest floating-point format among the operands; empty without any."""
    tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_floating_point()]
    if not tensors:
        return ""
    narrowest = min(tensors, key=lambda tensor: tensor.element_size())
    name = PRECISIONS.get(narrowest.dtype, str(narrowest.dtype).removeprefix("torch."))
    if name != "fp32" or not narrowest.is_cuda or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return name
    convolution = "conv" in func.overloadpacket.__name__
    backend = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return "tf32" if backend.allow_tf32 else name


def _tensors(values: Any) -> Iterator[Tensor]:
    seen = set()
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _size(tensor: Tensor) -> float:
    """Return the bytes of a tensor; elements that an expanded tensor repeats count once."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return float(elements * tensor.element_size())


def _sizes(tensors: Iterable[Tensor]) -> float:
    return sum(map(_size, tensors))


def operator_work(step: Callable[[], object], cuda: bool) -> list[OperatorWork]:
    """Run ``step`` eagerly, twice, and return the work of the second run by kernel. Collective.

    Args:
        step: queues one iteration on the current stream.
    """
    calls = _Calls()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    step()
    meet(cuda)
    with profile(activities=activities, acc_events=True) as profiler, calls:
        step()
        if cuda:
            torch.cuda.synchronize()
    return list(_rows(_times(profiler.events() or (), cuda), calls.found))


@contextlib.contextmanager
def profiler_window(device: torch.device) -> Iterator[None]:
    """Let an attached profiler, such as ``ncu``, record the context (``cudaProfilerStart``, ``cudaProfilerStop``).

    Raises:
        ConfigError: there is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError("bench.only=counters: counts kernels of a GPU, and this run uses the CPU")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _times(events: Iterable[Any], cuda: bool) -> dict[int, dict[str, list[float]]]:
    """Return the milliseconds of each launch by the number of the operator's call and the kernel.

    On a CPU, the only launch of a call is the call itself, whose kernel has an empty name.
    """
    times: dict[int, dict[str, list[float]]] = {}
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        own = event.name.startswith(MARK)
        if not cuda:
            if own:
                times[_number(event)] = {"": [event.time_range.elapsed_us() / 1e3]}
            continue
        range_ = event
        while range_ is not None and not range_.name.startswith(MARK):
            range_ = range_.cpu_parent
        for kernel in event.kernels if range_ is not None else ():
            of_call = times.setdefault(_number(range_), {})
            of_call.setdefault(kernel.name, []).append(kernel.duration / 1e3)
    return times


def _number(event: Any) -> int:
    return int(event.name.removeprefix(MARK))


def _rows(times: Mapping[int, Mapping[str, Sequence[float]]], calls: Mapping[int, _Call]) -> Iterator[OperatorWork]:
    """Yield the work by kernel. If an operator launches several kernels, they share its work by their times."""
    found: dict[tuple[str, _Call], list[float]] = {}
    for number, kernels in times.items():
        call, total = calls.get(number), sum(map(sum, kernels.values()))
        if call is None or call.flops is None or total <= 0:
            continue
        for name, each in kernels.items():
            row = found.setdefault((name or call.operator, call), [0.0, 0.0, 0.0])
            row[0] += len(each)
            row[1] += sum(each)
            row[2] += sum(each) / total
    for (kernel, call), (launches, ms, share) in found.items():
        work = (call.bytes * share, (call.flops or 0.0) * share)
        yield OperatorWork(kernel, call.operator, int(launches), ms, *work, call.precision)


def kernels_report(
    runner: StepRunner, batches: Sequence[Batch], found: Breakdown | None, eager: bool
) -> dict[str, Any]:
    """Return the kernels of a step as values for a report; of an eager step also their work by PyTorch's operators.

    Args:
        found: breakdown of the step; None on a CPU.
    """
    kernels: dict[str, Any] = {"breakdown": None if found is None else asdict(found)}
    if eager:
        with runner.on_stream():
            work = operator_work(lambda: runner(batches), runner.cuda)
        kernels["operators"] = [asdict(each) for each in work]
    return kernels


def cases_report(workload_type: type[Workload], chosen: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the result of :func:`case_work` for a workload as values for a report."""
    operations = importlib.import_module(workload_type.config_type.__module__).OPERATIONS
    return [asdict(each) for each in case_work(workload_type.title, operations, chosen)]


def case_work(title: str, operations: Mapping[str, Operation], chosen: Mapping[str, str]) -> list[CaseWork]:
    """Run the cases of a workload's operations, and of update rules, on this GPU.

    The results cover only kernels that a step launches under the same names, so a rule that the step does not use adds
    nothing.

    Args:
        title: title of the workload. If names of an operation's cases contain it, only these cases run; update rules
            have no others.
        operations: operations of the workload by key.
        chosen: key of each operation to the name of its implementation.
    """
    found: list[CaseWork] = []
    for operation, implementation, only_own in _measured_operations(operations, chosen):
        cases = [case for case in cases_of(operation) if not case.only or implementation in case.only]
        own = [case for case in cases if title in case.name]
        for case in own if own or only_own else cases:
            found += _case(operation, case, implementation)
            torch.cuda.empty_cache()
    return found


def _measured_operations(
    operations: Mapping[str, Operation], chosen: Mapping[str, str]
) -> Iterator[tuple[Operation, str, bool]]:
    """Yield each operation, its implementation, and whether only cases of this workload count."""
    for key, operation in operations.items():
        if key not in WITHOUT_CASES and chosen.get(key) in operation.names:
            yield operation, chosen[key], False
    for name, rule in all_operations().items():
        if name.startswith(UPDATE_RULES):
            yield rule, next(iter(rule.fast)), True


def _case(operation: Operation, case: Case, implementation: str) -> Iterator[CaseWork]:
    precision = PRECISIONS.get(case.dtypes[-1], "")
    earlier: dict[str, Mapping[str, float]] = {}
    try:
        for pass_ in passes_of(operation, case, implementation):
            spans, _ = recorded(pass_.run, pass_.run)
            times: dict[str, float] = {}
            for span in spans:
                times[span.name] = times.get(span.name, 0.0) + (span.end - span.start) / 1e3
            earlier[pass_.name] = times
            before = earlier[pass_.after] if pass_.after else {}
            own = {name: ms - before.get(name, 0.0) for name, ms in times.items()}
            kernels = {name: ms for name, ms in own.items() if ms > NOISE * times[name]}
            yield CaseWork(
                operation.name, case.name, pass_.name, implementation, pass_.bytes, pass_.flops, precision, kernels
            )
    except (RuntimeError, UnsupportedImplementation) as error:
        yield CaseWork(operation.name, case.name, "", implementation, failure=first_line(error))
