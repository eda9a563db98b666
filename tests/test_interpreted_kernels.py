"""Run every ``*_cases.py`` below this folder in Triton's interpreter.

Each file runs in a process that is forked off one which has imported Triton for interpretation.
"""

import importlib.util

import pytest

from tests.conftest import ROOT, interpreted

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/**/*_cases.py"))
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("file", FILES)
def test_each_path_through_the_kernels_gives_what_the_formula_does(file):
    done = interpreted("-m", "not slow", file)
    assert done.code == 0, done.output + done.errors


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_every_size_and_type_gives_what_the_formula_does(file):
    done = interpreted("-m", "slow", file, timeout=3600)
    assert done.code in (0, NO_TESTS), done.output + done.errors
