"""Checks whether a configuration may run under its division and ruleset, for the launcher and for every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args, get_type_hints

from common.config.loading import convert
from common.config.schema import Role, RunConfig, SessionConfig
from common.errors import ConfigError
from common.mlperf.compliance import rule_records
from common.mlperf.constraints import Division, check_hyperparameters, missing_hyperparameters
from common.mlperf.events import hyperparameters
from common.mlperf.fixed import check_fixed
from common.mlperf.rules import Rules, newest_ruleset, rules_for
from common.mlperf.schedules import FLUX1_INTERVAL, SCHEDULES, Schedule

EVALUATION_FREQUENCY = "evaluation_frequency"
"""Key in the log of the samples between two evaluations. mlperf-logging has no constant for it."""


@dataclass(frozen=True)
class Admission:
    """Ruleset, rules, log entries and evaluation schedule of an admitted configuration.

    Attributes:
        hyperparameters: key in the log -> value, including the disclosures on precision and parallelism.
    """

    ruleset: str
    rules: Rules
    hyperparameters: dict[str, object]
    schedule: Schedule


def admit(run: RunConfig, session: SessionConfig) -> Admission:
    """Check a configuration against the rules of its division.

    Raises:
        ConfigError: naming key, value and rule.
    """
    name = run.benchmark.name
    if session.bench.traffic is not True:
        raise ConfigError(
            f"bench.traffic={str(session.bench.traffic).lower()}: ranks that send no gradients train different models: "
            "it is for `mlperf-suite bench` alone, leave it away here"
        )
    ruleset = session.ruleset or newest_ruleset(name)
    rules = rules_for(name, ruleset)
    if run.evaluation.offline and not rules.scored_offline:
        raise ConfigError(f"evaluation.scoring=offline: the rules count the evaluation of {name} in a run's time")
    if session.staging_dir is not None and (run.evaluation.ranks or run.selfplay.ranks or run.evaluation.offline):
        raise ConfigError(
            f"staging_dir={session.staging_dir}: only training ranks stage data, so they must evaluate too: use "
            "evaluation.ranks=0, selfplay.ranks=0 and no offline scoring"
        )
    logged, division = {**hyperparameters(run), **evaluation_frequency(run, rules)}, session.submission.division
    _check(run, ruleset, logged, division)
    if missing := missing_hyperparameters(name, ruleset, logged, division):
        raise ConfigError(
            f"{name}: the log would lack {', '.join(missing)}, which the {division} division of ruleset {ruleset} "
            "requires: add them to benchmark.log_keys"
        )
    schedule = evaluation_schedule(run, ruleset)
    if run.selfplay.ranks and schedule.unit != "generation":
        raise ConfigError(f"selfplay.ranks={run.selfplay.ranks}: {name} does not learn by self-play; use 0")
    return Admission(ruleset, rules, {**logged, **disclosures(run, rules)}, schedule)


def _check(run: RunConfig, ruleset: str, logged: dict[str, object], division: Division) -> None:
    """Check the logged hyperparameters and, in the closed division, the other fixed values.

    Raises:
        ConfigError: naming every key, value and rule that is broken.
    """
    errors = []
    try:
        tensors, synthetic = run.declaration.initialised_tensors, run.benchmark.synthetic
        check_hyperparameters(run.benchmark.name, ruleset, logged, synthetic, division, tensors)
    except ConfigError as error:
        errors.append(str(error))
    try:
        if division == "closed":
            check_fixed(run.benchmark, run.declaration.forbidden)
    except ConfigError as error:
        errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))


def evaluation_schedule(run: RunConfig, ruleset: str | None = None) -> Schedule:
    """Return the evaluation points of a run, from its global batch and the options of the benchmark's schedule.

    Args:
        ruleset: version, for benchmarks whose points differ between rulesets; None for the newest.

    Raises:
        ConfigError: an option is unknown or has the wrong type, or the evaluation points are impossible.
    """
    name = run.benchmark.name
    given = {**run.declaration.schedule_options, **run.benchmark.schedule}
    kinds = get_type_hints(SCHEDULES[name])
    free = [option for option in kinds if option not in ("global_batch", "ruleset", "return")]
    for option in given:
        if option not in free:
            raise ConfigError(f"benchmark.schedule has no option {option!r}; that of {name} has {', '.join(free)}")
    options = {option: convert(kinds[option], value, f"benchmark.schedule.{option}") for option, value in given.items()}
    if ruleset is not None and "ruleset" in kinds:
        options["ruleset"] = ruleset
    try:
        schedule = SCHEDULES[name](run.global_batch, **options)
    except ValueError as error:
        raise ConfigError(
            f"benchmark.schedule={options}, hparams.global_batch_size={run.global_batch}: {error}"
        ) from error
    samples = run.benchmark.train_samples
    if schedule.unit == "epoch" and run.global_batch > samples:
        raise ConfigError(
            f"hparams.global_batch_size={run.global_batch}: an epoch has {samples} training samples "
            f"(benchmark.train_samples), and {name} is evaluated after whole epochs, of at least one step each: use a "
            "smaller batch"
        )
    if schedule.unit == "samples" and schedule.interval < run.global_batch:
        raise ConfigError(
            f"hparams.global_batch_size={run.global_batch}: evaluations are {schedule.interval} samples apart "
            "(benchmark.schedule), and at most one can follow a step: use a smaller batch"
        )
    return schedule


def evaluation_frequency(run: RunConfig, rules: Rules) -> dict[str, object]:
    """Return the log entry of the samples between two evaluations, if a ruleset has a key for it, as for FLUX.1.

    The rules of v5.1 and v6.0 require their own interval in the log. Since v6.1 it is the interval in whole batches.
    """
    if EVALUATION_FREQUENCY not in rule_records(f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml"):
        return {}
    if rules.ruleset not in ("5.1.0", "6.0.0"):
        return {EVALUATION_FREQUENCY: evaluation_schedule(run, rules.ruleset).interval}
    interval = run.benchmark.schedule.get("interval")
    return {EVALUATION_FREQUENCY: FLUX1_INTERVAL if interval is None else interval}


WORDS = {"fp64": "fp64", "fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
"""Precision in the configuration -> precision in the log."""


def disclosures(run: RunConfig, rules: Rules) -> dict[str, object]:
    """Return key in the log -> value, for the keys on precision and parallelism that the ruleset knows.

    Ruleset 6.1.0 requires these keys, 6.0.0 accepts them, older rulesets do not know them.
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
