"""Slots of symmetric memory are never written while another rank may read them: checked on what ranks enqueue.

Each rank's calls run alone, on a CPU, with streams and barriers that only note what waits for what. From the notes of
all ranks follows which two uses of the same memory are ordered on GPUs however fast each of them is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.distributed.symmetric_memory import PeerMemory
from common.distributed.tensor_parallel import overlap
from common.distributed.tensor_parallel.overlap import Slot, SymmetricMemoryProducts
from common.distributed.tensor_parallel.ranks import SCALE_STRIDE, TensorParallel

TOKENS, INPUTS, OUTPUTS = 12, 4, 5
CPU = torch.device("cpu")


class Use(NamedTuple):
    """A use of bytes [first, last) by a step of a rank."""

    step: int
    first: int
    last: int
    writes: bool
    where: str


class Notes(TorchDispatchMode):
    """What all ranks enqueue: steps, those before each of them, and their uses of memory.

    Attributes:
        rank: whose calls run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.before: list[set[int]] = []
        self._uses: dict[int | None, list[Use]] = defaultdict(list)
        self._meetings: dict[tuple[int, int], int] = {}
        self._arrivals: dict[tuple[int, int], int] = defaultdict(int)
        self.slots: list[dict[int, Tensor]] = []

    def step(self, *before: int | None) -> int:
        """A step behind others."""
        self.before.append({one for one in before if one is not None})
        return len(self.before) - 1

    def meet(self, slot: int, stream: Stream) -> None:
        """The next barrier of a slot."""
        number = self._arrivals[slot, self.rank]
        self._arrivals[slot, self.rank] += 1
        meeting = self._meetings.setdefault((slot, number), -1)
        if meeting < 0:
            meeting = self._meetings[slot, number] = self.step()
        self.before[meeting] |= self.before[self.step(stream.last)]
        stream.last = self.step(meeting)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returned = func._schema.returns
        makes_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returned)
        if not makes_view and "empty" not in func._schema.name:
            stream = Stream.current
            stream.last = self.step(stream.last)
            for argument, value in itertools.zip_longest(func._schema.arguments, args):
                value = kwargs.get(argument.name, value)
                if isinstance(value, Tensor):
                    writes = argument.alias_info is not None and argument.alias_info.is_write
                    self._use(value, stream.last, writes, f"{func._schema.name} of rank {self.rank}")
        return result

    def _use(self, tensor: Tensor, step: int, writes: bool, where: str) -> None:
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        use = Use(step, first, first + (sum(spans) + 1) * tensor.element_size(), writes, where)
        storage = tensor.untyped_storage().data_ptr()
        shared = any(storage == memory.untyped_storage().data_ptr() for slot in self.slots for memory in slot.values())
        self._uses[None if shared else self.rank].append(use)

    def races(self) -> list[tuple[str, str]]:
        """Pairs of uses of the same bytes, one of them a write, of which neither is behind the other."""
        behind: dict[int, int] = {}

        def all_before(step: int) -> int:
            if step not in behind:
                behind[step] = 0
                for one in self.before[step]:
                    behind[step] |= 1 << one | all_before(one)
            return behind[step]

        for step in sorted(range(len(self.before)), key=self._depths().__getitem__):
            all_before(step)
        return [
            (a.where, b.where)
            for uses in self._uses.values()
            for a, b in itertools.combinations(uses, 2)
            if (a.writes or b.writes) and a.first < b.last and b.first < a.last
            and a.step != b.step and not (behind[a.step] >> b.step | behind[b.step] >> a.step) & 1
        ]  # fmt: skip

    def _depths(self) -> list[int]:
        """Longest way to each step; more than there are steps would be a circle, in which ranks wait for ever."""
        depths = [0] * len(self.before)
        for _ in depths:
            found = [max((depths[one] + 1 for one in before), default=0) for before in self.before]
            if found == depths:
                return depths
            depths = found
        raise AssertionError("ranks wait for one another")


class Stream:
    """A stream that notes its last step."""

    notes: Notes
    current: Stream

    def __init__(self, *_: object, **__: object) -> None:
        self.last: int | None = None

    def wait_stream(self, other: Stream) -> None:
        self.last = self.notes.step(self.last, other.last)

    def record_event(self) -> int | None:
        return self.last

    def wait_event(self, event: int | None) -> None:
        self.last = self.notes.step(self.last, event)


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Make ``stream`` the current one."""
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Handle:
    """One rank's view of a slot's memory."""

    def __init__(self, notes: Notes, number: int) -> None:
        self._notes, self._number = notes, number

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        memory, start = self._notes.slots[self._number][rank], offset * dtype.itemsize
        return memory[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def barrier(self, channel: int) -> None:
        self._notes.meet(self._number, Stream.current)


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, tuple[str, ...]], Notes]:
    """``enqueued(size, calls)``: what so many ranks enqueue by these calls."""

    def run(size: int, calls: tuple[str, ...]) -> Notes:
        notes = Stream.notes = Notes()
        made: Mapping[int, list[int]] = defaultdict(list)

        def allocate(capacity: int, *_: object) -> PeerMemory:
            number = len(made[notes.rank])
            made[notes.rank].append(number)
            if number == len(notes.slots):
                notes.slots.append({rank: torch.empty(capacity, dtype=torch.uint8) for rank in range(size)})
            return PeerMemory(notes.slots[number][notes.rank], Handle(notes, number), notes.rank, size)

        monkeypatch.setattr(PeerMemory, "allocate", allocate)
        for notes.rank in range(size):
            Stream.current = Stream()
            parallel = TensorParallel(size, notes.rank, object())  # type: ignore[arg-type]
            products = SymmetricMemoryProducts(parallel, CPU, 0.0)
            with notes:
                for call in calls:
                    perform(products, call, size)
        return notes

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(overlap, "FIRST_CAPACITY", 64)  # the first products outgrow it
    return run


def perform(products: SymmetricMemoryProducts, call: str, size: int) -> None:
    def product(x_nK: Tensor, scale_inverse: Tensor | None, y_nN: Tensor) -> None:
        torch.mm(x_nK, weight, out=y_nN)
        if scale_inverse is not None:
            y_nN *= scale_inverse

    weight, own = torch.zeros(INPUTS, OUTPUTS), TOKENS // size
    if call == "begin":
        products.begin()
    elif call == "gather":
        products.gather_product(torch.zeros(own, INPUTS), torch.ones(()), product, torch.zeros(TOKENS, OUTPUTS))
    elif call == "gather and keep":
        kept, scales = torch.zeros(TOKENS, INPUTS), torch.zeros(size, SCALE_STRIDE)
        given = (torch.zeros(own, INPUTS), torch.ones(()), product, torch.zeros(TOKENS, OUTPUTS))
        products.gather_product(*given, kept, scales)
    else:
        result = torch.zeros(own, OUTPUTS)
        products.start_product_scatter(torch.zeros(TOKENS, INPUTS), None, product, result).wait()


WORDS = [("begin", *word) for word in itertools.product(("begin", "gather", "scatter"), repeat=4)]
WORDS += [("begin", *word) for word in itertools.product(("gather and keep", "scatter"), repeat=3)]


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("size", [2, 4])
def test_no_use_of_a_slot_meets_another(enqueued, size):
    for word in WORDS:
        assert enqueued(size, word).races() == [], word


def test_without_the_barrier_between_passes_they_would_meet(enqueued, monkeypatch):
    monkeypatch.setattr(SymmetricMemoryProducts, "begin", lambda self: setattr(self, "_turn", 0))
    assert enqueued(2, ("begin", "gather", "begin", "gather")).races()
    assert enqueued(2, ("begin", "scatter", "begin", "scatter")).races()


def test_with_one_slot_they_would_meet(enqueued, monkeypatch):
    monkeypatch.setattr(SymmetricMemoryProducts, "_next_slot", lambda self, size: self._slots[0])
    monkeypatch.setattr(overlap, "FIRST_CAPACITY", 1 << 10)
    assert enqueued(2, ("begin", "gather", "gather")).races()


def test_without_its_barrier_a_product_would_read_too_early(enqueued, monkeypatch):
    monkeypatch.setattr(Slot, "barrier", lambda self: None)
    assert enqueued(2, ("begin", "gather")).races()
    assert enqueued(2, ("begin", "scatter")).races()
