"""A whole run of MiniGo on a GPU: self-play, training and evaluation on the same device, with captured graphs."""

from __future__ import annotations

import pytest

from common.mlperf.parsed_log import read_log
from common.mlperf.verdict import judge
from tests.conftest import suite

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_plays_trains_and_evaluates_on_one_gpu(precision: str, data_of, tmp_path):
    output = tmp_path / "run"
    done = suite(
        "train", "benchmark=minigo", "scale=test", "device=cuda", "seed=3", f"data_dir={data_of('minigo')}",
        f"output_dir={output}", f"precision={precision}", f"player.precision={precision}",
        "benchmark.targets.win_rate.value=0.0", CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip
    assert done.code == 0, done.errors
    models = sorted(path.stem for path in (output / "self-play" / "models").iterdir())
    assert models == ["000004", "000005", "000006"]
    games = read_log(output / "mlperf.log").all("actual_selfplay_games_per_generation")
    assert len(games) == 10
    verdict = judge(output / "mlperf.log")
    assert verdict.kind == "format", verdict.reasons
    assert "not captured, runs eagerly" not in done.errors
