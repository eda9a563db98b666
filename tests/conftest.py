"""Fixtures of many tests: prepared synthetic data of each workload, and runs of the command line."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import cli
from common.distributed import groups
from common.mlperf.checker_process import one_checker_process
from tests import remembered_configs, toy
from tests.forked import FORKS, Forked

remembered_configs.install()

ROOT = Path(__file__).resolve().parent.parent

SECONDS = 1000
"""Seconds after which a process counts as hung. Most need a few; on a busy machine, many times as many."""


HAVE_RELATIVES = ("dlrm", "gpt3", "llama2_70b_lora", "maskrcnn", "retinanet")
"""Workloads that share most of their code with another workload, which the quick tests run instead."""


def one_of_each_family(workloads: Sequence[str]) -> list[Any]:
    """Return parameters for tests of many workloads; those with relatives are slow tests."""
    return [pytest.param(name, id=name, marks=pytest.mark.slow if name in HAVE_RELATIVES else ()) for name in workloads]


def pytest_make_parametrize_id(val: object, argname: str) -> None:
    """Refuse bytes, which pytest would put into the id: compressed files, for example, contain the time.

    For other values pytest uses their text, their name, or the argument's name and an index, which are stable.
    """
    content = val.pattern if isinstance(val, re.Pattern) else val
    if isinstance(content, bytes):
        raise pytest.Collector.CollectError(
            f"The parameter {argname} has the value {str(val)[:80]}, and pytest would make an id of these bytes. Bytes "
            'may depend on the time. Name the cases: parametrize(..., ids=["empty", ...]) or pytest.param(..., id=...).'
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases slow that ``slow_cases`` lists."""
    for mark in item.iter_markers("slow_cases"):
        if isinstance(item, pytest.Function) and item.callspec.id in mark.args:
            item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Refuse ids that contain the text of a set or an address, which an ``ids=str`` puts there."""
    wrong = [
        f"{item.nodeid}: the id contains the text of the parameter {name}"
        for item in items
        for name, value in (item.callspec.params.items() if hasattr(item, "callspec") else ())
        if _has_unstable_text(value) and (str(value) in item.nodeid or repr(value) in item.nodeid)
    ]
    if wrong:
        raise pytest.UsageError(
            "\n".join(wrong) + "\nThe order of a set and the address of an object differ between processes. Name the "
            'cases: parametrize(..., ids=["empty", ...]) or pytest.param(..., id=...).'
        )


def _has_unstable_text(value: object) -> bool:
    inherited = type(value).__repr__ is object.__repr__ and type(value).__str__ is object.__str__
    return inherited or isinstance(value, Set)


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    errors: str


def suite(
    *arguments: str, timeout: float = SECONDS, threads: int = 1, cwd: Path = ROOT, **environment: str
) -> Finished:
    """Run ``mlperf-suite`` as a process of its own, in the folder ``cwd``.

    It is forked off a process that has imported the suite, which takes longer than most commands. A command that sees
    GPUs is not, because that process has imported Triton for interpreted kernels.
    """
    return _finished([sys.executable, "-m", toy.entry(arguments), *arguments], timeout, threads, cwd, environment)


def interpreted(*arguments: str, timeout: float = SECONDS, **environment: str) -> Finished:
    """Run pytest with ``arguments`` in a process of its own, in which Triton's kernels are interpreted."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *arguments]
    settings = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return _finished([sys.executable, "-m", "pytest", *options], timeout, 1, ROOT, settings)


def _finished(
    command: Sequence[str], timeout: float, threads: int, cwd: Path, environment: Mapping[str, str]
) -> Finished:
    """Run a process, and kill it after ``timeout`` seconds."""
    settings = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", **environment}
    process: Forked | subprocess.Popen[str]
    if settings["CUDA_VISIBLE_DEVICES"]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=cwd, env=settings, stdout=pipe, stderr=pipe, text=True)
    else:
        process = Forked(command, cwd, settings)
    try:
        output, errors = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    code = process.returncode
    assert code is not None
    return Finished(code, output, errors)


def prepared(workload: str, root: Path, extra: Sequence[str] = ()) -> Path:
    """Generate and prepare the data of the workload's ``test`` recipe under ``root``."""
    raw, data = root / "raw", root / "data"
    with toy.known(pictures=False):
        for arguments in (
            ["generate", f"benchmark={workload}", "scale=test", "--raw-dir", str(raw), *extra],
            ["prepare", f"benchmark={workload}", "--raw-dir", str(raw), "--data-dir", str(data)],
        ):
            assert cli.run(arguments) == 0
    return data


@pytest.fixture(scope="session")
def data_of(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that returns a workload's prepared test data. The processes of a session share them."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def find(workload: str) -> Path:
        folder = shared / f"data-of-{workload}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "whole").exists():
                prepared(workload, folder)
                (folder / "whole").touch()
        return folder / "data"

    return find


@pytest.fixture
def groups_are_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the process groups of layouts by tuples of their ranks; none is the whole world."""
    monkeypatch.setattr(groups, "make", lambda ranks, _: tuple(ranks))
    monkeypatch.setattr(dist, "get_world_size", lambda: 10**6)


def checkpoint(folder: Path, step: int, rank: int = 0) -> dict:
    """Return the content of a run's checkpoint after ``step``."""
    return torch.load(folder / "checkpoints" / f"step_{step:08d}" / f"rank_{rank}.pt", weights_only=True)


def flatten(state: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors in a nested state, by path."""
    found = {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value
        elif isinstance(value, dict | list | tuple):
            found |= flatten(value, f"{prefix}{key}.")
    return found


@pytest.fixture
def interrupting_sigint() -> Iterator[None]:
    """Handle SIGINT as a process of a terminal does; one that is started in the background inherits it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the user may not list. Its permissions alone would not stop root."""
    folder, scandir = tmp_path / "unreadable", os.scandir
    folder.mkdir()

    def refuse(path: Any) -> Any:
        if os.fspath(path) == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return folder


@pytest.fixture
def forked_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let process pools fork their processes instead of starting Python and importing everything again."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: FORKS)


@pytest.fixture(autouse=True, scope="module")
def checker() -> Iterator[None]:
    """Use one process of MLCommons' checkers for all tests of a file."""
    with one_checker_process():
        yield


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """Keep denormal numbers in every test: a run in this process leaves the setting that flushes them to zero."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` fill tensors with NaN, or with the largest integer.

    oneDNN is off: its bf16 weight gradient of a 3D convolution reads memory that nothing has written.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)
    torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert bf16 matrices to fp32 before products: the interpreter would multiply their bits as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(builder, widened(left), widened(right), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def rounded_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch convert between fp32 and bf16 or FP8: the interpreter's code loses carries and subnormals."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {
        tl.bfloat16: (torch.bfloat16, torch.int16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
    }
    convert = interpreter._convert_float

    def exact(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target in kinds and source == tl.float32:
            dtype, bits = kinds[target]
            rounded = torch.from_numpy(data.view(np.float32).copy()).to(dtype).view(bits).numpy()
            return rounded.view(f"uint{8 * rounded.itemsize}")
        if source in kinds and target == tl.float32:
            dtype, bits = kinds[source]
            return torch.from_numpy(data.copy()).view(bits).view(dtype).float().numpy().view(np.uint32)
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", exact)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory(prefix="mlperf-run-") as name:
        Path(name).chmod(0o755)
        yield Path(name)
