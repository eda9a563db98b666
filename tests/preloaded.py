"""What the processes of tests find imported: a fork server imports it once, and they are forked off it.

Triton decides when it is imported whether its kernels are compiled or interpreted. Here they are interpreted, which a
command never notices: on a CPU the suite takes no Triton kernel as long as TRITON_INTERPRET is not set when it runs.
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
