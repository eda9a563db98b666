"""Test the declarations of all operations, and the choice of implementations."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import pytest
import torch

from common.errors import ConfigError, UnsupportedImplementation
from common.ops.add_layer_norm import ADD_LAYER_NORM
from common.ops.catalogue import all_operations, cases_of
from common.ops.operation import (
    Choice,
    Implementation,
    Operation,
    OperationRequest,
    all_implementations,
    choose,
    compiled_references,
    select,
)
from common.ops.row_norm import LAYER_NORM_1P, RMS_NORM

CPU = torch.device("cpu")
REQUEST = OperationRequest(CPU, torch.float32)

DECLARED = list(all_operations().values())
OPTIONAL = ("cudnn", "triton")
"""Packages that an implementation may import when it is chosen."""
OF_EVERY_ONE = pytest.mark.parametrize("operation", DECLARED, ids=lambda operation: operation.name)


def test_references_are_compiled_only_where_this_is_asked_for(monkeypatch):
    class Both(NamedTuple):
        forward: Any
        backward: Any

    class Rule:
        """A class, such as an update rule."""

    def double(x):
        return 2 * x

    def fast(x):
        return x + x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: ("compiled", function, dynamic))
    single = Operation("double", double, {"fast": Implementation(fast)})
    with compiled_references():
        assert single.select("reference", REQUEST) == Choice("reference", ("compiled", double, False))
        assert single.select("fast", REQUEST).function is fast
        both = Operation("both", Both(double, fast)).select("reference", REQUEST).function
        assert both == Both(("compiled", double, False), ("compiled", fast, False))
        assert Operation("rule", Rule).select("reference", REQUEST).function is Rule
        assert torch._dynamo.config.fail_on_recompile_limit_hit  # PyTorch would silently run the function uncompiled
    assert single.select("reference", REQUEST).function is double
    assert not torch._dynamo.config.fail_on_recompile_limit_hit


def test_all_operations_are_found():
    assert len(DECLARED) > 40
    assert {"rms_norm", "linear", "transducer_loss", "adaptive"} <= {operation.name for operation in DECLARED}


def functions_of(implementation: Any) -> dict[str, Any]:
    """Return the functions of an implementation by the names of the tuple's fields."""
    return implementation._asdict() if hasattr(implementation, "_asdict") else {"": implementation}


def parameters_of(function: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of parameters without a default, and the defaults of the others by name."""
    given = inspect.signature(function).parameters.values()
    optional = {each.name: each.default for each in given if each.default is not each.empty}
    return sum(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given) - len(optional), optional


@OF_EVERY_ONE
def test_implementations_have_the_parameters_of_the_reference(operation):
    reference = functions_of(operation.reference)
    for name in operation.fast:
        try:
            found = functions_of(operation.function(name))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
            continue
        assert found.keys() == reference.keys(), name
        for part, function in found.items():
            (wanted, wanted_optional), (own, own_optional) = parameters_of(reference[part]), parameters_of(function)
            assert own == wanted, (name, part)
            # Only tests ask for another precision of the arithmetic, and only of a reference.
            assert own_optional == {name: value for name, value in wanted_optional.items() if name != "precision"}


RUN_ON_A_CPU = {
    "upsample_convolution": "transposed_library",
    "lstm": "library",
    "instance_norm": "library",
    "linear": "fp8",
}
"""Operations to their only faster implementation for a CPU, besides interpreted kernels."""


@OF_EVERY_ONE
def test_on_a_cpu_every_other_implementation_is_refused(operation, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cases = cases_of(operation)
    request = cases[0].request(CPU, cases[0].dtypes[-1]) if cases else REQUEST
    runs = RUN_ON_A_CPU.get(operation.name)
    automatic = runs is not None and operation.fast[runs].automatic
    assert operation.select("auto", request).name == (runs if automatic else "reference")
    for name in operation.fast.keys() - {runs}:
        with pytest.raises(UnsupportedImplementation, match=r"needs? a (GPU|CUDA device), not cpu|only with cuDNN"):
            operation.select(name, request)


@pytest.mark.parametrize(("operation", "limit"), [(RMS_NORM, 16384), (LAYER_NORM_1P, 16384), (ADD_LAYER_NORM, 8192)])
def test_rows_that_no_program_holds_are_refused(operation, limit):
    for features, reason in ((limit, None), (2 * limit, f"features is at most {limit}, not {2 * limit}")):
        request = OperationRequest(torch.device("cuda"), torch.bfloat16, {"features": features})
        assert operation.unsupported("triton", request) == reason


class Pair(NamedTuple):
    forward: Any
    backward: Any


def forward(x: int) -> int:
    return x + 1


def backward(x: int) -> int:
    return x - 1


def on_gpus_only(request: OperationRequest) -> str | None:
    return None if request.device.type == "cuda" else "it needs a GPU"


def small(**fast: Implementation) -> Operation:
    return Operation("increment", forward, fast)


def test_auto_takes_the_first_implementation_that_serves_the_request():
    operation = small(
        first=Implementation(backward, on_gpus_only), second=Implementation(abs), third=Implementation(min)
    )
    assert operation.select("auto", REQUEST) == Choice("second", abs)
    assert operation.select("auto", OperationRequest(torch.device("cuda"), torch.float32)).name == "first"


def test_auto_never_takes_an_implementation_of_another_precision():
    operation = small(coarse=Implementation(abs, automatic=False))
    assert operation.select("auto", REQUEST) == Choice("reference", forward)
    assert operation.select("coarse", REQUEST).function is abs


def test_an_implementation_is_imported_when_it_is_chosen(tmp_path, monkeypatch):
    (tmp_path / "functions_of_a_test.py").write_text("def forward(): ...\ndef backward(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    operation = Operation(
        "increment",
        Pair(forward, backward),
        {
            "one": Implementation("functions_of_a_test:forward"),
            "pair": Implementation("functions_of_a_test"),
            "absent": Implementation("no_such_module_of_a_test", on_gpus_only),
        },
    )
    module = importlib.import_module("functions_of_a_test")
    assert operation.select("one", REQUEST).function is module.forward
    assert operation.select("pair", REQUEST).function == Pair(module.forward, module.backward)
    with pytest.raises(UnsupportedImplementation, match="it needs a GPU"):
        operation.select("absent", REQUEST)
    with pytest.raises(ModuleNotFoundError):
        operation.function("absent")


def test_the_refusal_names_the_option_the_operation_and_the_reason():
    operation = small(fast=Implementation(abs, on_gpus_only))
    message = r"^model\.implementations\.plus=fast: implementation 'fast' of increment cannot be used: it needs a GPU$"
    with pytest.raises(UnsupportedImplementation, match=message):
        select({"plus": "fast"}, "plus", operation, REQUEST)


def test_several_operations_are_chosen_at_once_and_auto_serves_those_without_a_request():
    operations = {"a": small(fast=Implementation(abs)), "b": small(fast=Implementation(abs))}
    chosen = choose({"a": "reference"}, operations, REQUEST)
    assert chosen == {"a": Choice("reference", forward), "b": Choice("fast", abs)}


def test_the_mapping_of_the_configuration_is_checked_and_completed():
    operations = {"a": small(fast=Implementation(abs)), "b": small()}
    assert all_implementations({"a": "fast"}, operations) == {"a": "fast", "b": "auto"}
    with pytest.raises(ConfigError, match=r"^implementations\.c: unknown operation; there are a, b$"):
        all_implementations({"c": "auto"}, operations)
    message = r"^implementations\.b=fast: increment has no implementation 'fast'; choose one of auto, reference$"
    with pytest.raises(ConfigError, match=message):
        all_implementations({"b": "fast"}, operations)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_names_with_a_meaning_cannot_be_an_implementations(name):
    with pytest.raises(ValueError, match=f"increment: {name} cannot name"):
        small(**{name: Implementation(abs)})
