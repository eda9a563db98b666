"""The closed division's rules on hyperparameters, checked before a run.

The checks are the CHECK expressions of the installed compliance checker, evaluated by the checker itself, and the rows
of the rules' table that the checker does not test (:mod:`common.mlperf.text_rules`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from common.errors import ConfigError
from common.mlperf.compliance import RuleFinding, check_values, checker_version, rule_records
from common.mlperf.rules import OPEN_QUALITY, Rules, rules_for
from common.mlperf.text_rules import TEXT_RULES

Division = Literal["closed", "open"]

LOGGED_LATER = frozenset(
    {
        "accelerators_per_node",
        "aggregated_eval_accuracy",
        OPEN_QUALITY,
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

INFINITE = frozenset({("rnnt", "opt_gradient_clip_norm")})
"""Benchmark and key of hyperparameters that may be infinite. The rules allow RNN-T to clip at 1 or infinity."""


HYPERPARAMETERS = ("data_", "lars_", "lora_", "lr_", "model_", "opt_", "scheduler_", "sgd_")
"""Prefixes of hyperparameter keys, including keys that no rule file names."""


def hyperparameter_complaints(rules: Rules, logged: Mapping[str, object]) -> dict[str, str]:
    """Return complaints about hyperparameters that the rules' table forbids or that are not finite.

    A hyperparameter that is absent breaks no rule.

    Args:
        logged: log key to value; keys that are not hyperparameters are ignored.

    Returns:
        Key to complaint, which states the key, its value, the rule and the source of the rule.
    """
    complaints = infinite_hyperparameters(rules, logged)
    for rule in TEXT_RULES.get(rules.benchmark, ()):
        if rule.key in logged and rule.key not in complaints:
            complaint = rule.complaint(logged[rule.key], logged, rules)
            if complaint is not None:
                complaints[rule.key] = complaint
    return complaints


def infinite_hyperparameters(rules: Rules, logged: Mapping[str, object]) -> dict[str, str]:
    """Return key to complaint for infinite and NaN hyperparameters; arguments as in ``hyperparameter_complaints``."""
    return {
        key: f"{key} = {repr(value)[:80]}: a hyperparameter is neither infinite nor NaN"
        for key, value in logged.items()
        if is_hyperparameter(key, rules) and not _is_finite(value) and (rules.benchmark, key) not in INFINITE
    }


def is_hyperparameter(key: str, rules: Rules) -> bool:
    """Return whether a log key is a hyperparameter."""
    return key not in LOGGED_LATER and (key.startswith(HYPERPARAMETERS) or key in rule_records(_closed(rules)))


def _is_finite(value: object) -> bool:
    """Return whether a JSON value contains no infinite number and no NaN. Text such as "inf" counts as infinite."""
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, str):
        return value.strip().casefold().lstrip("+-") not in ("nan", "inf", "infinity")
    return not isinstance(value, float) or math.isfinite(value)


def check_hyperparameters(
    benchmark: str,
    ruleset: str | None,
    logged: Mapping[str, object],
    synthetic: bool = False,
    division: Division = "closed",
    tensors: Sequence[str] | None = None,
) -> None:
    """Refuse hyperparameters and initialised tensors that a division would refuse in the log of a run.

    In the open division hyperparameters are free, but a ruleset may lack rules for the benchmark there. Absent keys
    cause no complaint (see :func:`missing_hyperparameters`) unless the rule of a present key needs them.

    Args:
        benchmark: our name, or the name in a log.
        ruleset: version; None for the newest that accepts the benchmark.
        logged: log key to the value that will be logged.
        synthetic: whether the data are synthetic. Such a run cannot be a result. It may break the rules' table, but
            not the checker's rules.
        tensors: names of tensors that will be logged as initialised; None to skip their check.

    Raises:
        ConfigError: naming every key, value and rule that is broken, or if the ruleset does not accept the benchmark.
    """
    rules = rules_for(benchmark, ruleset)
    findings = _findings(rules, logged, division, tensors or ())
    if tensors is None:
        findings = [finding for finding in findings if finding.kind != "end"]
    broken = [finding for finding in findings if finding.key in logged]
    if broken:  # a forbidden value may also make the checker die
        findings = [finding for finding in findings if finding.kind != "crash"]
    complaints = [finding.sentence() for finding in broken] if division == "closed" else []
    if division == "closed" and not synthetic:
        complaints += hyperparameter_complaints(rules, logged).values()
    if any(map(_is_of_the_ruleset, findings)):
        complaints += _other_ruleset(rules, logged, division, tensors or (), findings)
    if complaints:
        raise ConfigError(
            f"{rules.benchmark}: the {division} division of ruleset {rules.ruleset} forbids this configuration:\n  "
            + "\n  ".join(complaints)
            + f"\n(rule files are those of mlperf-logging {checker_version()}'s compliance checker)"
        )


def _is_of_the_ruleset(finding: RuleFinding) -> bool:
    """Return whether only another ruleset helps: this one has no rules for the benchmark or lists other tensors."""
    return finding.kind in ("crash", "end") or finding.key == "submission_benchmark"


def _other_ruleset(
    rules: Rules,
    logged: Mapping[str, object],
    division: Division,
    tensors: Sequence[str],
    findings: Sequence[RuleFinding],
) -> list[str]:
    """Return the complaints that only another ruleset resolves, and the next later ruleset without them."""
    complaints = []
    for finding in filter(_is_of_the_ruleset, findings):
        if finding.kind == "end":
            complaints.append(
                f"weights_initialization: {finding.rule_file} lists the names of the initialised tensors of the rules' "
                f"network; those of this one, {len(tensors)}, are others"
            )
        else:
            complaints.append(finding.sentence())
    later = rules.accepted_by[rules.accepted_by.index(rules.ruleset) + 1 :]
    for version in later:
        if not any(map(_is_of_the_ruleset, _findings(rules_for(rules.benchmark, version), logged, division, tensors))):
            return [*complaints, f"the next ruleset without this rule is {version}: ruleset={version}"]
    return complaints


def missing_hyperparameters(
    benchmark: str, ruleset: str | None, logged: Mapping[str, object], division: Division = "closed"
) -> list[str]:
    """Return the keys that a division requires and ``logged`` lacks, in the order of the rule files.

    Raises:
        ConfigError: if the ruleset does not accept the benchmark.
    """
    rules = rules_for(benchmark, ruleset)
    findings = _findings(rules, logged, division)
    required = [f.key for f in findings if f.kind == "occurrence" and f.key not in LOGGED_LATER]
    return list(dict.fromkeys(key for key in required if key and key not in logged))


def _findings(
    rules: Rules, logged: Mapping[str, object], division: Division, tensors: Sequence[str] = ()
) -> list[RuleFinding]:
    values = _ordered(rules, logged)
    return check_values(values, rules.usage, rules.ruleset, rules.log_name, division, tensors)


def _ordered(rules: Rules, logged: Mapping[str, object]) -> dict[str, object]:
    """Return ``logged`` without the keys of LOGGED_LATER, in the order of the benchmark's rule file.

    In this order, a key comes before the rules that refer to it (a learning rate may refer to the global batch).
    """
    order = [*rule_records(_closed(rules)), *logged]
    return {key: logged[key] for key in dict.fromkeys(order) if key in logged and key not in LOGGED_LATER}


def _closed(rules: Rules) -> str:
    """Return the rule file of a benchmark in the closed division."""
    return f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml"
