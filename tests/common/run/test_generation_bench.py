"""``mlperf-suite bench`` of a workload that learns by self-play."""

from __future__ import annotations

import json

import pytest

from common import cli
from common.errors import ConfigError


@pytest.mark.slow
def test_a_generation_is_measured_in_its_parts(data_of, tmp_path, capsys):
    report = tmp_path / "report.json"
    data = data_of("minigo")
    command = ["bench", "benchmark=minigo", "scale=test", "device=cpu", f"data_dir={data}", "bench.only=run"]
    assert cli.run([*command, f"bench.report={report}"]) == 0
    found = json.loads(report.read_text())["generation"]
    assert found["games"] >= 2
    assert found["steps"] >= 1
    assert found["global_batch"] == 8
    assert all(found[part] > 0 for part in ("self_play", "training", "hand_over", "evaluation"))
    output = capsys.readouterr().out
    rate = found["steps"] * 8 / found["training"]
    assert f"{found['training']:.2f} s, {found['steps']:,} steps, {rate:,.1f} samples/s" in output
    assert f"{found['self_play'] + found['training'] + found['hand_over']:.2f} s without its evaluation" in output


def test_the_reader_of_a_generation_is_not_measured_alone(data_of, capsys):
    command = ["bench", "benchmark=minigo", "scale=test", "device=cpu", f"data_dir={data_of('minigo')}"]
    assert cli.run([*command, "bench.only=reader"]) == ConfigError.exit_code
    assert "bench.only=reader: a generation reads the games that it plays" in capsys.readouterr().err
