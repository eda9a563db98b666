"""The ResNet-50 demo reaches its target on a CPU, and MLCommons' checker accepts its log."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common import cli
from common.mlperf.parsed_log import read_log
from tests.conftest import suite


@pytest.mark.demo
@pytest.mark.timeout(600)
def test_the_demo_reaches_its_target_and_its_log_passes_the_compliance_checker(tmp_path):
    raw, data, output = tmp_path / "raw", tmp_path / "resnet-digits", tmp_path / "run"
    assert cli.run(["generate", "benchmark=resnet", "scale=demo", "--raw-dir", str(raw)]) == 0
    assert cli.run(["prepare", "benchmark=resnet", "--raw-dir", str(raw), "--data-dir", str(data)]) == 0
    done = suite(
        "train", "benchmark=resnet", "scale=demo", f"output_dir={output}",
        MLPERF_DATA_DIR=str(tmp_path), threads=2, timeout=500,
    )  # fmt: skip
    assert done.code == 0, done.errors
    log = read_log(output / "mlperf.log")
    assert log.status == "success"
    assert log.run_minutes < 5
    checker = subprocess.run(
        [
            sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", "4.0.0",
            "--log_output", str(tmp_path / "checker.log"), str(output / "mlperf.log"),
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checker.returncode == 0, checker.stdout + checker.stderr
    for told in ("target >= 0.95", "accuracy 0.9", "seed", "minutes", "not an MLPerf result of any division"):
        assert told in done.errors
