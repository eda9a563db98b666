"""The measurement of an evaluation runs where there is no GPU, too."""

from __future__ import annotations

from benchmarks.unet3d import evaluate_bench


def test_an_evaluation_is_timed(capsys):
    words = "--window 64 32 32 --filters 1 1 1 1 1 --cases 1 --batches 4 --repeats 1 --precision fp32 --device cpu"
    evaluate_bench.main(words.split())
    # 96 x 58 x 58 voxels are padded to 96 x 64 x 64: windows 32, 16 and 16 apart
    assert "batch 4: 18 windows in" in capsys.readouterr().out
