"""The benchmark of weights' gradients: every case runs, on a CPU and in small, and moves what it says."""

from __future__ import annotations

import json

import pytest
import torch

from common.errors import UnsupportedImplementation
from common.nn.trained_decoder import accumulation_bench as bench
from common.ops.bench.supervisor import RESULT

SMALL = bench.Layer(64, {"one": (48, 16), "two": (16, 64)})
CPU = torch.device("cpu")
ON_A_CPU = [name for name in bench.cases() if "cublaslt" not in name]


@pytest.mark.parametrize("name", ON_A_CPU)
def test_a_case_runs(name: str) -> None:
    case = bench.cases()[name](SMALL, CPU)
    case.run()
    if case.alone is not None:
        case.alone()
    if "products" in name or "wgrad" in name:
        assert case.flops == case.parts * 2.0 * 64 * (48 * 16 + 16 * 64)
    assert case.parts == (2 if "two micro-batches" in name else 1)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(UnsupportedImplementation, match="CUDA"):
        bench.cases()["wgrad fp8 into bf16 cublaslt"](SMALL, CPU)


def test_layers_are_those_of_the_networks() -> None:
    """GPT-3's has 12 h^2 weights, Llama's 218,103,808."""
    assert bench.LAYERS["gpt3"].elements() == 12 * 12288**2 == 4 * bench.LAYERS["gpt3/4"].elements()
    assert bench.LAYERS["llama31_8b"].elements() == 4096 * (6144 + 4096 + 3 * 14336)


def test_a_line_tells_time_and_rate_of_one_micro_batch() -> None:
    told = bench.line(bench.Timed("a", 2.0, 1.6, 2.0e12))
    assert "2.000 ms, alone    1.600, more  +0.400 (+25.0 %)    1000 TFLOP/s" in told
    assert "alone" not in bench.line(bench.Timed("a", 2.0, float("nan"), 0.0))


def test_without_a_gpu_it_says_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="measures a GPU"):
        bench.main([])


def test_times_are_of_one_micro_batch_and_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts 8 ms a layer's call, whatever it does."""
    monkeypatch.setattr(bench, "time_graph", lambda launches, replays: 8.0 * launches() / bench.CALLS)
    for name, ms in (("wgrad fp8 into bf16 reference", 8.0), ("wgrad fp8 into bf16 reference, two micro-batches", 4.0)):
        found = bench.measure(name, SMALL, bench.cases()[name], CPU)
        assert (found.ms, found.alone_ms, found.flops) == (ms, ms, SMALL.flops())
    assert bench.measure("", SMALL, bench.cases()["passes transposes of weights"], CPU).flops == 0.0


def test_a_process_of_its_own_hands_back_what_it_has_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "time_graph", lambda launches, replays: 1.0)
    monkeypatch.setitem(bench.LAYERS, "small", SMALL)
    bench._work(["small: wgrad fp8 into bf16 cublaslt", "small: wgrad bf16 into bf16"], CPU)
    told = capsys.readouterr().out.splitlines()
    assert "cuBLASLt needs a CUDA device" in told[1]
    assert told[-1].startswith(RESULT)
    assert bench.Timed(*json.loads(told[-1].removeprefix(RESULT))).name == "small: wgrad bf16 into bf16"
