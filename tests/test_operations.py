"""Run the cases of every operation on a CPU, through Triton's interpreter."""

import importlib.util

import pytest

from common.ops.catalogue import all_operations, cases_of
from tests.conftest import interpreted

OPERATIONS = {key: operation for key, operation in all_operations().items() if cases_of(operation)}
LIBRARIES_ONLY = {"common.ops.causal_attention", "common.ops.dense_attention", "common.ops.weight_gradient"}
"""Packages whose implementations are all libraries, which need a GPU."""
PACKAGES = sorted({key.partition(":")[0] for key in OPERATIONS})


FILE = "tests/operation_cases.py"

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("package", PACKAGES)
def test_kernels_give_what_the_reference_does(package):
    done = interpreted("-m", "not slow", FILE, OPERATION=package)
    assert done.code == pytest.ExitCode.OK, done.output + done.errors
    assert ("passed" in done.output) == (package not in LIBRARIES_ONLY), done.output


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_size_with_every_type_gives_what_the_reference_does(package):
    done = interpreted("-m", "slow", FILE, timeout=3600, OPERATION=package)
    assert done.code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.output + done.errors


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cases_of_an_operation_have_different_names(operation):
    names = [case.name for case in cases_of(OPERATIONS[operation])]
    assert len(set(names)) == len(names)
