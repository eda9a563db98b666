"""Test that recipes, loader and errors agree on the keys of ``model.implementations`` of all workloads."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from typing import Any

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.errors import ConfigError
from common.ops.operation import Operation

NAMES = sorted(WORKLOADS)


@functools.cache
def composed(workload: str) -> dict[str, Any]:
    """Return the configuration of the workload's ``test`` recipe. Copy it before you change it."""
    return compose([f"benchmark={workload}", "scale=test"])


def operations(workload: str) -> dict[str, Operation]:
    """Return the operations in the workload's configuration."""
    found: dict[str, Operation] = importlib.import_module(f"benchmarks.{workload}.config").OPERATIONS
    return found


@pytest.mark.parametrize("workload", NAMES)
def test_the_base_of_all_recipes_lists_every_operation(workload):
    tree = copy.deepcopy(composed(workload))
    assert set(tree["model"]["implementations"]) == set(operations(workload))
    run, _ = cli.load(tree)
    assert run.workload.model.implementations.keys() == operations(workload).keys()


@pytest.mark.parametrize("workload", NAMES)
def test_the_former_key_of_an_operation_is_an_error_that_names_the_new_one(workload):
    name = min(operations(workload))  # composing takes its time
    with pytest.raises(ConfigError) as error:
        compose([f"benchmark={workload}", "scale=test", f"model.{name}=auto"])
    assert str(error.value).endswith(f"; did you mean model.implementations.{name}?")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workload", NAMES)
def test_the_former_key_in_a_recipe_is_an_error_that_names_the_new_one(workload):
    for name in operations(workload):
        tree = copy.deepcopy(composed(workload))
        tree["model"][name] = "auto"
        message = rf"^model\.{name}: unknown key; .*; did you mean model\.implementations\.{name}\?"
        with pytest.raises(ConfigError, match=message):
            cli.load(tree)


@pytest.mark.parametrize(
    ("workload", "key"),
    [
        ("dlrm_dcnv2", "embeddings.implementation"),
        ("unet3d", "reader.augment"),
        ("rgat", "reader.sample"),
    ],
)
def test_a_former_key_of_another_section_is_an_error_that_names_the_new_one(workload, key):
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: unknown .*; it is model\.implementations\.\w+ now$"):
        compose([f"benchmark={workload}", "scale=test", f"{key}=auto"])
    section, _, name = key.partition(".")
    tree = copy.deepcopy(composed(workload))
    tree[section][name] = "auto"
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: unknown key.*; it is model\.implementations\.\w+ now$"):
        cli.load(tree)


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("stable_diffusion", "noising"),
        ("ssd300", "class_entropy"),
        ("maskrcnn", "sampling"),
        ("unet3d", "window_sums"),
    ],
)
def test_the_key_of_an_operation_that_is_gone_is_an_error_that_says_so(workload, name):
    key = f"model.implementations.{name}"
    message = rf"^{re.escape(key)}: unknown .*; remove it: PyTorch alone computes this now$"
    with pytest.raises(ConfigError, match=message):
        compose([f"benchmark={workload}", "scale=test", f"{key}=auto"])


@pytest.mark.parametrize(
    ("workload", "operation", "former", "now"),
    [
        ("rnnt", "lstm", "torch", "library"),
        ("rnnt", "lstm", "plain", "reference"),
        ("rnnt", "joint", "torch", "reference"),
        ("rnnt", "transducer_loss", "sparse", "triton"),
        ("dlrm_dcnv2", "cross_network", "triton", "fused"),
        ("unet3d", "instance_norm", "torch", "library"),
        ("stable_diffusion", "upsampling", "transposed_torch", "transposed_library"),
        ("resnet", "batch_norm", "cudnn", "convolution_moments=cudnn"),
    ],
)
def test_the_former_name_of_an_implementation_is_an_error_that_names_the_new_one(workload, operation, former, now):
    tree = copy.deepcopy(composed(workload))
    tree["model"]["implementations"][operation] = former
    with pytest.raises(ConfigError, match=rf"\('{former}' is '{now}' now\); choose one of auto, "):
        cli.load(tree)


@pytest.mark.parametrize("workload", NAMES)
@pytest.mark.parametrize("former", ["torch", "plain"])
def test_the_former_name_of_the_reference_is_an_error_that_lists_the_names(workload, former):
    tree = copy.deepcopy(composed(workload))
    for name in operations(workload):
        tree["model"]["implementations"] = {name: former}
        with pytest.raises(
            ConfigError,
            match=rf"^model\.implementations\.{name}={former}: .* is '(reference|library)' now.*; choose one of",
        ):
            cli.load(tree)


@pytest.mark.parametrize("workload", NAMES)
def test_an_unknown_operation_is_an_error_that_lists_those_there_are(workload):
    tree = compose([f"benchmark={workload}", "scale=test", "+model.implementations.softmax=triton"])
    known = ", ".join(operations(workload))
    with pytest.raises(ConfigError, match=rf"^model\.implementations\.softmax: unknown operation; there are {known}$"):
        cli.load(tree)


@pytest.mark.parametrize("workload", ["resnet", "ssd300"])
def test_moments_that_no_batch_norm_reads_are_refused(workload):
    tree = copy.deepcopy(composed(workload))
    tree["model"]["implementations"] |= {"batch_norm": "reference", "convolution_moments": "cudnn"}
    with pytest.raises(ConfigError, match=r"^model\.implementations\.batch_norm=reference: only Triton's batch norm"):
        cli.load(tree)
