"""Runs the cases of Triton kernels in processes of their own: Triton reads TRITON_INTERPRET when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "cases", ["triton_unet3d_op_cases.py", "triton_unet3d_convolution_cases.py", "triton_unet3d_model_cases.py"]
)
def test_interpreted_kernels_equal_the_formulas(cases: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name(cases))]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
