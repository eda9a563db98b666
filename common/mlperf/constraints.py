"""The closed division's rules on hyperparameters, checked before a run instead of after it.

The rules are the CHECK expressions of the installed compliance checker, evaluated by the checker itself, and the few
of the rules' own table that the checker does not test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.errors import ConfigError
from common.mlperf.compliance import Finding, check_values, checker_version, rule_records
from common.mlperf.rules import Rules, rules_for

LOGGED_LATER = frozenset(
    {
        "accelerators_per_node",
        "aggregated_eval_accuracy",
        "actual_selfplay_games_per_generation",
        "eval_accuracy",
        "eval_error",
        "eval_samples",
        "number_of_nodes",
        "seed",
        "submission_benchmark",
        "train_samples",
        "weights_initialization",
    }
)
"""Keys of the rule files that are not hyperparameters: they come from the data, the run or the launcher."""


@dataclass(frozen=True)
class TextRule:
    """A rule on hyperparameters that stands in the rules' table but not in the checker."""

    key: str
    text: str
    holds: Callable[[Mapping[str, object]], bool]


def _number(values: Mapping[str, object], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be logged as a number, got {value!r}")
    return float(value)


TEXT_RULES: dict[str, tuple[TextRule, ...]] = {
    "resnet": (
        TextRule(
            "lars_opt_momentum",
            "0.9 if the global batch is below 32k, which published results read as 32,000",
            lambda v: _number(v, "global_batch_size") >= 32_000 or v["lars_opt_momentum"] == 0.9,
        ),
        TextRule("sgd_opt_momentum", "0.9", lambda v: v["sgd_opt_momentum"] == 0.9),
        TextRule(
            "sgd_opt_learning_rate_decay_poly_power", "2", lambda v: v["sgd_opt_learning_rate_decay_poly_power"] == 2
        ),
    ),
    "ssd300": (
        TextRule(
            "opt_learning_rate_decay_boundary_epochs",
            "[40, 50] * (1 + k / 10) with one integer k for both; the checker looks at the second alone",
            lambda v: _ssd_boundaries(v["opt_learning_rate_decay_boundary_epochs"]),
        ),
    ),
    "gpt3": (
        TextRule(
            "global_batch_size",
            "1,536 to 8,192, for which there are reference convergence points",
            lambda v: 1536 <= _number(v, "global_batch_size") <= 8192,
        ),
        TextRule(
            "init_checkpoint_step",
            "ceil(4,000 * 1,536 / batch), since training goes on from the published checkpoint (assets_dir)",
            lambda v: v["init_checkpoint_step"] == math.ceil(4000 * 1536 / _number(v, "global_batch_size")),
        ),
        TextRule("opt_weight_decay", "0.1", lambda v: v["opt_weight_decay"] == 0.1),
        TextRule(
            "opt_base_learning_rate",
            "2e-5 for global batches of 1,536 up to 3,072, 3e-5 for 4,096 up to 8,192, either between",
            lambda v: _gpt3_learning_rate(_number(v, "global_batch_size"), _number(v, "opt_base_learning_rate")),
        ),
    ),
}
"""Benchmark to the further rules of the hyperparameter table (training rules, hyperparameters and optimizer)."""


def _ssd_boundaries(epochs: object) -> bool:
    """Whether the boundaries are 4 n and 5 n of a whole n."""
    if not isinstance(epochs, list | tuple) or len(epochs) != 2:
        return False
    first, second = epochs
    return bool(second % 5 == 0 and 5 * first == 4 * second)


def _gpt3_learning_rate(global_batch: float, learning_rate: float) -> bool:
    low, high = global_batch < 4096, global_batch > 3072
    return (low and learning_rate == 2e-5) or (high and learning_rate == 3e-5)


def check_hyperparameters(benchmark: str, ruleset: str | None, logged: Mapping[str, object]) -> None:
    """Refuse hyperparameters that the closed division forbids.

    Keys that are absent are not complained about (see :func:`missing_hyperparameters`), unless the rule of a
    present key needs them.

    Args:
        benchmark: our name, or the name in a log.
        ruleset: version; None for the newest that accepts the benchmark.
        logged: log key to the value that will be logged.

    Raises:
        ConfigError: naming every key, value and rule that is broken, or if the ruleset does not accept the benchmark.
    """
    rules = rules_for(benchmark, ruleset)
    findings = [f for f in _findings(rules, logged) if f.key in logged or f.kind == "crash"]
    broken = [f for f in findings if f.kind != "crash"]  # a forbidden value may also make the checker die
    complaints = [f.sentence() for f in broken or findings]
    for rule in TEXT_RULES.get(rules.benchmark, ()):
        if rule.key in logged and not rule.holds(logged):
            complaints.append(f"{rule.key} = {logged[rule.key]!r} breaks the rules' table: {rule.text}")
    if complaints:
        raise ConfigError(
            f"{rules.benchmark}: the closed division of ruleset {rules.ruleset} forbids this configuration:\n  "
            + "\n  ".join(complaints)
            + f"\n(rule files are those of mlperf-logging {checker_version()}'s compliance checker)"
        )


def missing_hyperparameters(benchmark: str, ruleset: str | None, logged: Mapping[str, object]) -> list[str]:
    """The hyperparameter keys that the closed division requires and ``logged`` lacks, in the rule files' order.

    Raises:
        ConfigError: if the ruleset does not accept the benchmark.
    """
    rules = rules_for(benchmark, ruleset)
    findings = [f for f in _findings(rules, logged) if f.kind == "occurrence" and f.key not in LOGGED_LATER]
    return list(dict.fromkeys(f.key for f in findings if f.key and f.key not in logged))


def _findings(rules: Rules, logged: Mapping[str, object]) -> list[Finding]:
    return check_values(_ordered(rules, logged), rules.usage, rules.ruleset, rules.log_name)


def _ordered(rules: Rules, logged: Mapping[str, object]) -> dict[str, object]:
    """``logged`` without what is logged later, in the order of the benchmark's rule file.

    Rules that refer to another key (a learning rate to the global batch) come after it there.
    """
    order = [*rule_records(f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml"), *logged]
    return {key: logged[key] for key in dict.fromkeys(order) if key in logged and key not in LOGGED_LATER}
