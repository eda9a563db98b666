"""What the benchmark of a transformer's operations measures, its table, and what outlives a case that crashes."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common.ops.batch_norm import bench_cases as batch_norm
from common.ops.bench import cases, detection, transformer
from common.ops.bench import sweep as sweep_module
from common.ops.bench.__main__ import entries, sweeps
from common.ops.bench.cases import Pass
from common.ops.bench.supervisor import supervise, work
from common.ops.bench.sweep import Sweep
from common.ops.bench.table import Measured, line, totals
from common.ops.bias_gelu import BIAS_GELU_PASSES
from common.ops.causal_attention import CAUSAL_ATTENTION
from common.ops.cross_entropy import OF_A_PART
from common.ops.dense_attention import DENSE_ATTENTION
from common.ops.linear import LINEAR
from common.ops.operation import runs_anywhere
from common.run.kernels import OPERATIONS
from tests.references import run_references


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the references stand in for the kernels, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    own = ((LINEAR, "fp8"), (CAUSAL_ATTENTION, "cudnn"), (CAUSAL_ATTENTION, "flash"), (DENSE_ATTENTION, "cudnn"))
    kept = [(operation, name, operation.fast[name]) for operation, name in (*own, (DENSE_ATTENTION, "flash"))]
    run_references(monkeypatch, *OPERATIONS, BIAS_GELU_PASSES, OF_A_PART, LINEAR)
    for operation, name, implementation in kept:  # PyTorch's operators run on tensors without memory
        monkeypatch.setitem(operation.fast, name, dataclasses.replace(implementation, unsupported=runs_anywhere))
    # The references take many small steps for each box, which take their time without memory, too.
    monkeypatch.setattr(detection, "MOST_BOXES", 4)
    monkeypatch.setattr(detection, "CANDIDATES", 40)


def test_names_are_given_once() -> None:
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))


def test_a_step_of_bert_large_has_two_norms_a_layer_four_linear_layers_and_one_of_the_others() -> None:
    assert {entry.name: entry.calls for entry in entries() if entry.calls} == {
        "dropout_add_norm triton": 48, "bias_gelu triton": 24, "cross_entropy triton": 1, "attention triton": 24,
        **{f"linear {layer} reference": 24 for layer in ("QKV", "output", "FC1", "FC2")},
    }  # fmt: skip


def test_packs_are_full_and_hold_one_two_or_three_sequences() -> None:
    lengths = transformer.sequence_lengths(48)
    assert sum(lengths) == 48 * 512
    assert len(lengths) == 23 + 2 * 2 + 3 * 23
    assert min(lengths) >= 1


@pytest.mark.usefixtures("without_memory")
@pytest.mark.slow
def test_every_pass_of_every_implementation_runs() -> None:
    directions = {
        "cast": ["forward"],
        "product": ["forward", "input gradient", "weight gradient"],
        "transpose": ["forward"],
        "rms_norm": ["forward", "backward", "once more", "weight gradient"],
        "layer_norm_1p": ["forward", "backward", "once more", "parameters"],
        "qkv_gradient": ["in FP8", "in both orders", "joined", "in place"],
        "lora_input": ["forward", "backward", "of a norm"],
        "matching": ["forward"],
        "suppression": ["forward"],
        "bias_gradient": ["backward"],
    }
    for entry in entries():
        if entry.name not in ("attention SDPA", "attention aten flash") and "Transformer Engine" not in entry.name:
            passes = entry.build(16, torch.bfloat16)
            expected = directions.get(entry.name.split()[0], ["forward", "backward"])
            if entry.name.startswith("bias_gelu written"):
                expected = ["forward", "backward", "saving forward", "saved backward"]
            if entry.name.startswith("causal_attention interleaved"):
                expected = ["forward", "backward", "backward in place"]
            if "conv_bias_relu stem" in entry.name or "grouped layer1 " in entry.name:  # frozen
                expected = ["forward"]
            assert [each.name for each in passes] == expected, entry.name
            for each in passes:
                each.run()


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    assert len(sweeps()) == 72
    for name, sweep in {**sweeps(), **batch_norm.sweeps()}.items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name


class Tile(NamedTuple):
    size: int


def test_a_sweep_speaks_before_its_supervisor_takes_it_for_dead(monkeypatch, capsys) -> None:
    timed: list[int] = []
    table = {"kernel": Tile(7)}
    monkeypatch.setattr(sweep_module, "_milliseconds", lambda run: timed.append(table["kernel"].size) or timed[-1])
    tried = Sweep(table, "kernel", [(size,) for size in range(50)], lambda dtype: [Pass("forward", int, 0.0)], False)
    sweep_module.sweep("kernel of 64", tried, torch.float16)
    assert timed == [7, *(size for size in range(50) if size != 7)]
    assert table == {"kernel": Tile(7)}
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[:2] == ["kernel of 64 20 of 50 tiles tried", "kernel of 64 40 of 50 tiles tried"]
    assert said[2] == "kernel of 64 now (7,) 7.0000 ms; best: (0,) 0.0000, (1,) 1.0000, (2,) 2.0000"


def test_resnet_50_has_53_batch_norms_of_which_16_end_a_block() -> None:
    """He et al., table 1: conv1, three in each of 16 blocks, four projections."""
    calls: dict[str, int] = {}
    for entry in batch_norm.entries():
        kind = entry.name.split()[1]
        calls[kind] = calls.get(kind, 0) + entry.calls
    assert calls == {"pool": 1, "relu": 32, "add": 12, "dual": 4, "projection": 4}


def test_inputs_in_turn_exceed_the_cache() -> None:
    made = itertools.count()
    sets = cases.rotating(lambda: next(made), cases.ROTATED_BYTES / 2.5)
    assert list(itertools.islice(sets, 5)) == [0, 1, 2, 0, 1]


def test_operations_one_after_another_move_the_bytes_of_both() -> None:
    ran: list[str] = []
    first = [Pass("forward", lambda: ran.append("a"), 1.0, 2.0), Pass("backward", print, 1.0, 2.0, after="forward")]
    second = [Pass("forward", lambda: ran.append("b"), 3.0, 4.0), Pass("backward", print, 3.0, 4.0, after="forward")]
    forward, backward = cases.together([first, second])
    forward.run()
    assert ran == ["a", "b"]
    assert (forward.name, forward.bytes, forward.flops, forward.after) == ("forward", 4.0, 6.0, None)
    assert (backward.name, backward.after) == ("backward", "forward")


def test_tasks_go_on_behind_one_that_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crashing.py").write_text(
        "import sys\n"
        "for task in sys.argv[sys.argv.index('--worker') + 1:]:\n"
        "    print(f'begin {task}', flush=True)\n"
        "    if task == 'bad':\n"
        "        sys.exit(3)\n"
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


def test_a_line_gives_rates_and_the_share_of_a_copy() -> None:
    text = line(Measured("conv a", 7, "forward", 2.0, 3, 4e9, 1e12), 4e12)
    assert "2.0000 ms x 3" in text
    assert "2000 GB/s   50 %" in text
    assert "500 TFLOP/s" in text


def test_totals_count_the_calls_of_a_step_and_say_what_is_missing() -> None:
    measured = [
        Measured("conv a", 2, "forward", 1.0, 1, 1.0, 1.0),
        Measured("conv a", 2, "weight gradient", 3.0, 1, 1.0, 1.0),
        Measured("norm b", 2, "forward", 0.5, 4, 1.0, 0.0),
        Measured("norm candidate", 2, "forward", 9.0, 0, 1.0, 0.0),
        Measured("conv a", 1, "forward", 1.0, 1, 1.0, 1.0),
    ]
    assert list(totals(measured, ["conv a", "norm b"])) == [
        "batch 2",
        "  forward      3.00 ms (conv 1.00, norm 2.00), 666.7 samples/s",
        "  step         6.00 ms (conv 4.00, norm 2.00), 333.3 samples/s",
        "batch 1, without 1 of 2 cases",
        "  forward      1.00 ms (conv 1.00), 1000.0 samples/s",
    ]


@pytest.mark.parametrize(
    "module",
    [
        "benchmarks.llama2_70b_lora.peer_bench", "benchmarks.maskrcnn.peer_bench", "benchmarks.retinanet.peer_bench",
        "benchmarks.unet3d.split_bench", "benchmarks.rnnt.ops.lstm_bench", "common.recommendation.auc_bench",
    ],
)  # fmt: skip
def test_a_bench_that_needs_a_gpu_says_so_in_one_line(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [module])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert str(ended.value.code).startswith(f"{module} measures a GPU, and PyTorch sees no GPU")
    assert "\n" not in str(ended.value.code)
