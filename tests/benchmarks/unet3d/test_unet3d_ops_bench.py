"""What the benchmark of 3D U-Net's operations measures, and how it adds up."""

import pytest

from benchmarks.unet3d.ops.bench_cases import SIZE, entries, layers, norms
from benchmarks.unet3d.ops.bench_table import Measured, line, totals


def test_layers_are_those_of_the_network() -> None:
    """28 convolutions of 954.6 GFLOP for a crop, a norm behind each of the 22 of 3x3x3; the specification's count."""
    assert len(layers()) == 28
    assert sum(layer.flops for layer in layers()) == pytest.approx(954.6e9, rel=1e-4)
    assert sum(norms().values()) == 22
    assert norms()[32, SIZE] == 4


def test_a_step_runs_every_layer_once() -> None:
    calls: dict[str, int] = {}
    for entry in entries():
        kind = entry.name.split()[0]
        calls[kind] = calls.get(kind, 0) + entry.calls
    assert calls == {"conv": 28, "cat": 5, "norm": 22, "loss": 1, "product": 0}


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
