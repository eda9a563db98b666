"""Log entries that disclose the precision, parallelism and configuration file of a run.

Ruleset 6.1.0 requires these keys, 6.0.0 accepts them, older rulesets do not know them. A log has those of its ruleset.
"""

from __future__ import annotations

from typing import get_args

from common.config.schema import Role, RunConfig
from common.mlperf.compliance import rule_records
from common.mlperf.rules import Rules

WORDS = {"fp64": "fp64", "fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
"""Precision in the configuration -> precision in the log."""


def disclosures(run: RunConfig, rules: Rules) -> dict[str, object]:
    """Return key in the log -> value, for the keys that the ruleset knows.

    The lowest precision is that of weights, activations and gradients, unless the workload declares another
    (:class:`common.config.schema.Declaration`). Expert parallelism is always 1.
    """
    lowest = {**dict.fromkeys(get_args(Role), WORDS[run.precision]), **run.declaration.lowest_precision}
    values: dict[str, object] = {
        **{f"lowest_numerical_precision_in_{role}": word for role, word in lowest.items()},
        "tensor_parallelism": run.layout.get("tp", 1),
        "pipeline_parallelism": run.layout.get("pp", 1),
        "context_parallelism": run.layout.get("cp", 1),
        "expert_parallelism": 1,
        "micro_batch_size": run.micro_batch,
        "config_filename": run.config_file,
    }
    known = rule_records(f"{rules.usage}_{rules.ruleset}/common.yaml")
    return {key: value for key, value in values.items() if key in known}
