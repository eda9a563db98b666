"""Test ``bench.only=ops`` and ``tiles``: choice of operations, measurements, tables, and recovery from crashes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from common import cli
from common.errors import ConfigError
from common.ops.bench import operations as bench
from common.ops.bench import worker
from common.ops.bench.operations import Task, comparison, line, operations_of, tasks_of, time_operations
from common.ops.bench.supervisor import supervise, work
from common.ops.bench.worker import COMPILED, Measured, climb, neighbours
from common.ops.cases import ROTATED_BYTES, Case, Draw, Pass, rotating
from common.ops.catalogue import all_operations, cases_of
from common.ops.group_norm import GROUP_NORM
from common.ops.operation import REFERENCE, Operation
from common.ops.sizes import transformer
from common.ops.tile import Tile

OPERATIONS = {key: operation for key, operation in all_operations().items() if cases_of(operation)}
RMS_NORM = "common.ops.row_norm:RMS_NORM"


def test_packs_are_full_and_hold_one_two_or_three_sequences() -> None:
    lengths = transformer.sequence_lengths(48)
    assert sum(lengths) == 48 * 512
    assert len(lengths) == 23 + 2 * 2 + 3 * 23
    assert min(lengths) >= 1


@pytest.mark.slow_cases("benchmarks.rnnt.ops.transducer_loss:TRANSDUCER_LOSS-LibriSpeech")
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        pytest.param(operation, case, id=f"{key}-{case.name}", marks=pytest.mark.slow if number else ())
        for key, operation in OPERATIONS.items()
        for number, case in enumerate(cases_of(operation))
    ],
)
def test_passes_have_names_bytes_and_an_order(operation: Operation, case: Case) -> None:
    """The sizes are those of the recipe; the tensors have no values."""
    try:
        with FakeTensorMode():
            passes = case.passes(operation.reference, Draw(torch.device("cpu"), case.dtypes[-1]))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        pytest.skip(f"inputs depend on values: {error}")
    names = [each.name for each in passes]
    assert len(set(names)) == len(names) > 0
    assert passes[0].bytes > 0
    assert all(each.bytes >= 0 for each in passes)  # 0 where forward has made the gradients, or nothing is chosen
    assert all(each.after in (None, *names[:number]) for number, each in enumerate(passes))


def test_all_operations_have_cases_but_one() -> None:
    """Whether a convolution's moments exist depends on a measurement by cuDNN, and no recipe fixes their sizes."""
    assert set(all_operations()) - set(OPERATIONS) == {"common.ops.convolution:CONVOLUTION"}


def test_the_operations_of_a_workload_are_those_of_its_configuration_and_its_own() -> None:
    found = operations_of("benchmarks.llama2_70b_lora.config", ())
    assert RMS_NORM in found
    assert "common.ops.embedding_bags:EMBEDDING_BAGS" not in found
    assert "benchmarks.rgat.ops.gather_rows:GATHER_ROWS" in operations_of("benchmarks.rgat.config", ())
    assert operations_of("benchmarks.rgat.config", ["all"]) == OPERATIONS
    assert list(operations_of("benchmarks.rgat.config", ["row_norm", "swiglu"])) == [
        RMS_NORM, "common.ops.row_norm:LAYER_NORM_1P", "common.ops.swiglu:SWIGLU",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"^bench\.operations: no operation .* has 'nothing'"):
        operations_of("benchmarks.rgat.config", ["row_norm", "nothing"])


def test_every_implementation_of_every_case_is_timed_beside_the_compiled_reference() -> None:
    first = cases_of(OPERATIONS[RMS_NORM])[0].name
    names = [
        task.implementation for task in tasks_of({RMS_NORM: OPERATIONS[RMS_NORM]}, tiles=False) if task.case == first
    ]
    assert names == ["triton", COMPILED, REFERENCE]
    pytest.importorskip("triton")
    assert {task.implementation for task in tasks_of({RMS_NORM: OPERATIONS[RMS_NORM]}, tiles=True)} == {"triton"}


@pytest.mark.parametrize("key", ["common.optim.adaptive:ADAGRAD", "common.ops.dense_attention:DENSE_ATTENTION"])
def test_a_reference_that_is_no_function_is_not_compiled(key: str) -> None:
    names = {task.implementation for task in tasks_of({key: OPERATIONS[key]}, tiles=False)}
    assert REFERENCE in names
    assert COMPILED not in names


def test_compiling_runs_each_pass_once_and_times_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    passes = [Pass(name, functools.partial(ran.append, name), 1.0) for name in ("forward", "backward")]
    monkeypatch.setattr(worker, "passes_of", lambda *given: passes)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    worker.main(["--compile", "--worker", json.dumps([RMS_NORM, cases_of(OPERATIONS[RMS_NORM])[0].name, "triton"])])
    assert ran == ["forward", "backward"]
    assert "result" not in capsys.readouterr().out


def test_all_tables_of_tiles_are_found() -> None:
    pytest.importorskip("triton")
    from common.ops.group_norm import triton

    assert worker.tables_of(GROUP_NORM, "triton") == [triton.TILES, triton.SLAB_TILES]
    assert worker.tables_of(OPERATIONS["common.ops.causal_attention:CAUSAL_ATTENTION"], "cudnn") == []


@pytest.mark.parametrize("only", ["ops", "tiles"])
def test_operations_are_measured_on_a_gpu(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["bench", "benchmark=bert", "scale=test", "device=cpu", f"bench.only={only}"]
    assert cli.run(words) == ConfigError.exit_code
    assert "measure a GPU, and PyTorch sees none" in capsys.readouterr().err


def test_a_table_has_a_line_for_each_pass_and_the_sum_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def supervised(module: str, arguments: list[str], tasks: list[str], say: Any = None) -> Any:
        assert module == "common.ops.bench.worker"
        if arguments == ["--compile"]:
            compiled.extend(tasks)
            return
        assert arguments == []
        assert sorted(compiled) == sorted(task for task in tasks if Task(*json.loads(task)).implementation != REFERENCE)
        for task in tasks:
            _, case, name = Task(*json.loads(task))
            for direction, ms in (("forward", 2.0), ("backward", 1.0)):
                yield json.dumps(Measured("rms_norm", case, direction, name, ms * (1 + (name != "triton")), 4e9, 1e12))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(bench, "supervise", supervised)
    lines: list[str] = []
    found = time_operations({RMS_NORM: OPERATIONS[RMS_NORM]}, tiles=False, say=lines.append)
    assert len(found) == 2 * 3 * len(cases_of(OPERATIONS[RMS_NORM]))
    assert lines[0].startswith("NVIDIA H200, PyTorch ")
    assert " ".join(lines[1].split()) == (
        "rms_norm Llama-2-70B forward triton 2.0000 ms 4000.0 MB 50% of a copy 500 TFLOP/s 51% of peak"
    )
    assert "triton 3.0000 ms, compiled 6.0000 ms, reference 6.0000 ms" in lines[-1]


def test_a_gpu_of_unknown_peak_has_no_share_of_it() -> None:
    assert "peak" not in line(Measured("product", "a", "forward", "triton", 1.0, 1e9, 1e12), 4e12, None)
    assert list(comparison([])) == []


def test_an_implementation_that_failed_after_its_first_pass_is_not_the_fastest() -> None:
    whole = [Measured("norm", "a", direction, "reference", 2.0, 1.0, 0.0) for direction in ("forward", "backward")]
    (text,) = comparison([*whole, Measured("norm", "a", "forward", "triton", 1.0, 1.0, 0.0)])
    assert text.split()[2:] == ["reference", "4.0000", "ms"]


def test_an_implementation_that_cannot_serve_a_case_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = json.dumps([RMS_NORM, cases_of(OPERATIONS[RMS_NORM])[0].name, "triton"])
    wide = Case("wide", cases_of(OPERATIONS[RMS_NORM])[0].build, {"features": 20_000})
    monkeypatch.setattr(worker, "cases_of", lambda operation: (dataclasses.replace(wide, name=json.loads(task)[1]),))
    worker.main(["--worker", task, task])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "rms_norm", "begin", "rms_norm"]
    assert lines[1].endswith("not measured: features is at most 16384, not 20000")


def test_neighbours_of_a_tile_are_halves_doubles_and_the_next_small_numbers() -> None:
    assert {(tile.rows, tile.warps) for tile in neighbours(Tile(rows=1, warps=16))} == {(2, 16), (1, 8), (1, 32)}
    assert set(neighbours(Tile(rows=3))) == {Tile(rows=rows) for rows in (1, 2, 4, 6)}


def test_the_search_goes_to_the_best_tile_past_those_that_cannot_run() -> None:
    def time_of(tile: Tile) -> float:
        too_large = tile.rows * tile.warps > 32
        return math.inf if too_large else abs(math.log2(tile.rows) - 3) + abs(math.log2(tile.warps) - 2)

    times = climb(Tile(rows=1, warps=4), time_of)
    assert min(times, key=times.__getitem__) == Tile(rows=8, warps=4)
    assert times[Tile(rows=16, warps=4)] == times[Tile(rows=8, warps=8)] == math.inf


def test_a_sweep_leaves_the_tiles_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from common.ops.row_norm import triton

    operation: Operation = OPERATIONS[RMS_NORM]
    (case, *_) = cases_of(operation)
    before = dict(triton.TILES)
    monkeypatch.setattr(worker, "passes_of", lambda *given: [Pass("forward", int, 0.0)])
    monkeypatch.setattr(worker, "_milliseconds", lambda pass_: float(sum(vars(triton.TILES["forward"]).values())))
    texts = list(worker.sweep(operation, case, "triton"))
    assert before == triton.TILES
    assert len(texts) == len(before)
    assert "better: Tile(rows=1, warps=1, programs=1, stages=1) 4.0000 ms" in texts[0]


def test_the_compiled_reference_has_the_functions_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: asked.append(function) or function)
    operation = OPERATIONS[RMS_NORM]
    assert worker.function_of(operation, COMPILED) == operation.reference
    assert asked == list(operation.reference)
    assert worker.function_of(operation, REFERENCE) is operation.reference


def test_a_draw_gives_the_same_values_in_fp64() -> None:
    in_bf16, in_fp64 = (Draw(torch.device("cpu"), torch.bfloat16, fp64=fp64) for fp64 in (False, True))
    for make in (
        lambda draw: draw.normal(3, 4),
        lambda draw: draw.uniform(5, low=-1),
        lambda draw: draw.integers(0, 9, 4),
    ):
        first, second = make(in_bf16), make(in_fp64)
        assert torch.equal(first.double(), second.double())
    assert (in_bf16.normal(1).dtype, in_fp64.normal(1).dtype) == (torch.bfloat16, torch.float64)


def test_a_case_asks_for_its_integers() -> None:
    case = Case("a", lambda function, draw, **sizes: [], {"features": 8, "probability": 0.1})
    assert case.request(torch.device("cpu"), torch.float32, features=4).sizes == {"features": 4}


def test_inputs_in_turn_exceed_the_cache() -> None:
    made = itertools.count()
    sets = rotating(lambda: next(made), ROTATED_BYTES / 2.5)
    assert list(itertools.islice(sets, 5)) == [0, 1, 2, 0, 1]


def test_tasks_go_on_behind_one_that_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crashing.py").write_text(
        "import sys\n"
        "for task in sys.argv[sys.argv.index('--worker') + 1:]:\n"
        "    print(f'begin {task}', flush=True)\n"
        "    if task == 'bad':\n"
        "        sys.exit(3)\n"
        "    print(f'busy {task}', flush=True)\n"
        "    print(f'result {task} {sys.argv[1]}', flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert list(supervise("crashing", ["x"], ["first", "bad", "last"])) == ["first x", "last x"]
    assert capsys.readouterr().out.split() == ["bad", "ended", "its", "process", "with", "3"]


def test_a_worker_leaves_what_follows_a_failure_to_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    begun = []

    def run(task: str) -> None:
        begun.append(task)
        raise RuntimeError("out of memory\nand more")

    work(["first", "second"], run)
    assert begun == ["first"]
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=1) == ["first", "RuntimeError: out of memory"]
