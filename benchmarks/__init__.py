"""The workloads of the suite, one package each.

``WORKLOADS`` maps the name on the command line to the class that implements
:class:`common.workload.Workload`, as an import path so that listing the suite
imports none of them.
"""

WORKLOADS: dict[str, str] = {
    "resnet": "benchmarks.resnet.workload:ResNet",
}
