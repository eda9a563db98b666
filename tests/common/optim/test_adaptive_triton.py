"""Runs the tests of the adaptive rules for the Triton kernels, in a process of its own: Triton reads
TRITON_INTERPRET when it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_follow_the_formulas():
    files = ("test_adaptive_rules.py", "test_adaptive_shards.py", "adaptive_triton_cases.py")
    cases = [str(Path(__file__).with_name(name)) for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
