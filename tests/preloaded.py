"""Modules that a fork server imports once for the processes of tests, which it forks.

When Triton is imported, it decides whether kernels are compiled or interpreted. Here they are interpreted. Commands do
not notice: on a CPU, the suite uses no Triton kernel unless TRITON_INTERPRET is set while it runs.
"""

import importlib
import importlib.util
import os

from benchmarks import WORKLOADS
from common.config.composition import compose
from common.ops.catalogue import all_operations
from tests import remembered_configs, toy

MODULES = [
    *(path.partition(":")[0] for path in (*WORKLOADS.values(), toy.WORKLOAD)),
    "common.cli", "common.run.conclusion", "common.run.evaluation_rank", "common.run.trainer", "matplotlib.pyplot",
    "pytest", "tests.forked", "torch._dynamo",
]  # fmt: skip

os.environ["TRITON_INTERPRET"] = "1"
try:
    if importlib.util.find_spec("triton") is not None:
        import triton
        import triton.language  # noqa: F401

        from tests import quick_interpreter

        quick_interpreter.install()
    for name in MODULES:
        importlib.import_module(name)
    all_operations()
finally:  # a fork server passes over a module that cannot be imported
    del os.environ["TRITON_INTERPRET"]

remembered_configs.install()
compose([])  # Hydra looks for its plugins
