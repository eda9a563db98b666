"""Log events of a run: what is logged, in which form and order. No other module writes to the log.

The keys of a benchmark's hyperparameters are a table in its ``configs/benchmark`` file; workloads never log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.config.schema import BenchmarkConfig, RunConfig, SessionConfig
from common.data.batches import Block
from common.errors import ConfigError
from common.mlperf.compliance import rule_records
from common.mlperf.mllog import RunLog
from common.mlperf.parsed_log import LOGGED_SYNTHETIC
from common.mlperf.rules import OPEN_QUALITY, Rules

SILENT = -1
"""Rank number that no process has; a log of this rank writes nothing."""


def hyperparameters(run: RunConfig) -> dict[str, object]:
    """Return key in the log -> value, from the benchmark's table, the configuration and the workload's derived values.

    Raises:
        ConfigError: the table names a value that does not exist.
    """
    tables, hparams = run.benchmark.log_keys, getattr(run.workload, "hparams", None)
    sections = ["always", *(str(getattr(hparams, name, None)) for name in ("optimizer", "scheduler"))]
    return {key: _look_up(path, run) for section in sections for key, path in tables.get(section, {}).items()}


def _look_up(path: str, run: RunConfig) -> object:
    if path in run.declaration.derived_values:
        return run.declaration.derived_values[path]
    first, _, rest = path.partition(".")
    value: Any = getattr(run.workload, first) if hasattr(run.workload, first) else run
    for name in rest.split(".") if hasattr(run.workload, first) else path.split("."):
        if not hasattr(value, name):
            raise ConfigError(f"benchmark.log_keys: nothing is called {path!r}")
        value = getattr(value, name)
    return value


def logged_data_set(benchmark: BenchmarkConfig) -> str:
    """Return the value of ``data_set`` in the log."""
    return LOGGED_SYNTHETIC if benchmark.synthetic else benchmark.data_set


def _quality_target(benchmark: BenchmarkConfig) -> float | dict[str, float]:
    """Return the value of a single target, or metric -> value for several targets."""
    values = {metric: target.value for metric, target in benchmark.targets.items()}
    return values if len(values) > 1 else next(iter(values.values()))


class RunEvents:
    """Writes the events of one run, in the order that the rules require.

    Args:
        unit: metadata key for progress, ``epoch_num`` or ``samples_count``.
        epoch_samples: samples per epoch, if the schedule counts epochs but the ruleset counts samples (3D U-Net since
            v3.1). Progress is then logged in samples. The thousands of epochs are not logged as epochs.
        fraction_of: samples per epoch, if the ruleset counts fractions of epochs. Progress is then rounded to
            hundredths of an epoch, as in published submissions.
        fractions_from: value at which these fractions begin, 0 or 1.
        step_samples: samples per step, if the ruleset counts steps.
        sample_tokens: tokens per sample, if the ruleset counts tokens.
        quality_together: whether all metrics of an evaluation form one event.
    """

    def __init__(
        self,
        log: RunLog,
        unit: str,
        epoch_samples: int | None = None,
        quality_key: str = "eval_accuracy",
        fraction_of: int | None = None,
        fractions_from: int = 0,
        step_samples: int | None = None,
        quality_together: bool = False,
        sample_tokens: int | None = None,
    ) -> None:
        self._log = log
        self._unit = unit
        self._epoch_samples = epoch_samples
        self._quality_key = quality_key
        self._fraction_of = fraction_of
        self._fractions_from = fractions_from
        self._step_samples = step_samples
        self._quality_together = quality_together
        self._sample_tokens = sample_tokens
        self._block_first: float = fractions_from
        self._samples_of_epoch: int | None = None
        self._logs_open_quality = False

    def _in_unit(self, progress: int) -> int | float:
        """Convert ``progress``, in epochs or samples, to the unit of the ruleset."""
        if self._fraction_of is not None:
            return round(self._fractions_from + progress / self._fraction_of, 2)
        if self._step_samples is not None:
            return progress // self._step_samples
        return progress * (self._epoch_samples or self._sample_tokens or 1)

    def _after(self, samples: int) -> dict[str, float]:
        """Return the metadata that states progress after ``samples``, for a schedule that counts samples."""
        if self._step_samples is not None:
            return {self._unit: self._in_unit(samples)}
        return {"samples_count": samples}

    def begin(
        self, run: RunConfig, session: SessionConfig, rules: Rules, resumed_from: str | None, time_ms: int, gpus: bool
    ) -> None:
        """Log all events up to ``init_start``, back-dated to the start of this process's initialisation.

        Args:
            resumed_from: checkpoint from which the run continues; None for a new run.
            time_ms: start of the initialisation, in milliseconds since 1970.
            gpus: whether the ranks use GPUs; otherwise the log states 0 accelerators.
        """
        log, who = self._log, session.submission
        checks = rule_records(f"{rules.usage}_{rules.ruleset}/{who.division}_{rules.log_name}.yaml")
        if "epoch_num" in str(checks.get(self._quality_key, {}).get("CHECK")) and self._unit != "epoch_num":
            self._samples_of_epoch = run.train_samples  # rule files of the open division require epochs too
        self._logs_open_quality = OPEN_QUALITY in checks
        log.event("cache_clear", session.cache_cleared, time_ms=time_ms)
        log.event("submission_benchmark", rules.log_name, time_ms=time_ms)
        log.event("submission_org", who.org, time_ms=time_ms)
        log.event("submission_division", who.division, time_ms=time_ms)
        log.event("submission_status", who.status, time_ms=time_ms)
        log.event("submission_platform", who.platform, time_ms=time_ms)
        log.event("ruleset", rules.ruleset, time_ms=time_ms)
        log.event("data_set", logged_data_set(run.benchmark), time_ms=time_ms)
        log.event("quality_target", _quality_target(run.benchmark), time_ms=time_ms)
        log.event("number_of_nodes", run.scale.nodes, time_ms=time_ms)
        log.event("accelerators_per_node", run.scale.gpus_per_node if gpus else 0, time_ms=time_ms)
        if resumed_from is not None:
            log.event("resumed_from", resumed_from, time_ms=time_ms)
        log.start("init_start", time_ms=time_ms)

    def settings(
        self, seed: int, values: Mapping[str, object], implementations: Mapping[str, str], tensors: Sequence[str]
    ) -> None:
        """Log seed, initialised tensors, hyperparameters and implementations.

        Args:
            implementations: implementation by operation; nothing is logged if empty.
        """
        self._log.event("seed", seed)
        for name in tensors:
            self._log.event("weights_initialization", None, {"tensor": name})
        for key, value in values.items():
            self._log.event(key, value)
        if implementations:
            self._log.event("implementations", dict(implementations))

    def initialised(self) -> None:
        """Log the end of the initialisation."""
        self._log.end("init_stop")

    def staging_start(self) -> None:
        """Log that the copy of the data to faster storage starts. Up to v2.0, the HPC rules time this copy."""
        self._log.start("staging_start")

    def staging_stop(self, seconds: float) -> None:
        """Log the end of the copy, which took ``seconds``."""
        self._log.end("staging_stop", None, {"staging_duration": seconds})

    def run_start(self) -> None:
        """Start the clock of the run. Data may be read from here on."""
        self._log.start("run_start")

    def data_opened(self, train_samples: int, eval_samples: int) -> None:
        """Log the sizes of the data sets, after the data have been opened."""
        self._log.event("train_samples", train_samples)
        self._log.event("eval_samples", eval_samples)

    def block_start(self, block: Block, samples: int, time_ms: int | None = None) -> None:
        """Log the start of a training block.

        Args:
            samples: training samples before the block, over all ranks.
            time_ms: milliseconds since 1970; None for now.
        """
        if block.epochs:
            first, count = self._in_unit(block.first_epoch), self._in_unit(block.epochs)
            metadata: dict[str, float] = {"first_epoch_num": first, "epoch_count": count}
        elif self._sample_tokens is not None:  # the rules log tokens under the keys of epochs
            self._block_first = self._in_unit(samples)
            metadata = {"first_epoch_num": self._block_first, "epoch_count": self._in_unit(block.samples)}
        else:
            metadata = self._after(samples)
            if self._unit == "epoch_num":  # the checker requires epoch keys up to v3.1
                count = block.samples / (self._fraction_of or 1)
                self._block_first = self._in_unit(samples)
                metadata |= {"first_epoch_num": self._block_first, "epoch_count": count}
        self._log.start("block_start", None, metadata, time_ms)

    def block_stop(self, block: Block, samples: int, throughput: float, time_ms: int | None = None) -> None:
        """Log the end of a training block, and its throughput unless that is logged with epochs.

        Args:
            samples: samples trained so far, over all ranks.
            throughput: samples per second over all ranks.
        """
        if block.epochs:
            self._log.end("block_stop", None, {"first_epoch_num": self._in_unit(block.first_epoch)}, time_ms)
        else:
            metadata: dict[str, float] = {} if self._sample_tokens is not None else self._after(samples)
            if self._unit == "epoch_num":
                metadata["first_epoch_num"] = self._block_first
            self._log.end("block_stop", None, metadata, time_ms)
        if not block.epochs or self._epoch_samples is not None:
            plain = self._fraction_of is None and self._step_samples is None and self._sample_tokens is None
            at = samples if plain else self._in_unit(samples)
            self._log.event("tracked_stats", {"throughput": throughput}, {self._unit: at}, time_ms)

    def epoch_start(self, epoch: int, time_ms: int | None = None) -> None:
        """Log the start of an epoch; epochs count from 1. ``time_ms`` None: now."""
        if self._epoch_samples is None:
            self._log.start("epoch_start", None, {"epoch_num": epoch}, time_ms)

    def epoch_stop(self, epoch: int, throughput: float, time_ms: int | None = None) -> None:
        """Log the end of an epoch, and its throughput.

        Args:
            throughput: samples per second over all ranks.
            time_ms: milliseconds since 1970; None for now.
        """
        if self._epoch_samples is None:
            self._log.end("epoch_stop", None, {"epoch_num": epoch}, time_ms)
            self._log.event("tracked_stats", {"throughput": throughput}, {"step": epoch}, time_ms)

    def self_play_games(self, games: Sequence[int], generation: int) -> None:
        """Log the numbers of games in each generation of self-play that ``generation``, from 1, was trained on."""
        for count in games:
            self._log.event("actual_selfplay_games_per_generation", count, {"epoch_num": generation})

    def eval_start(self, progress: int, time_ms: int | None = None) -> None:
        """Log the start of an evaluation of the weights after ``progress`` epochs or samples.

        The rules do not define this time if evaluation overlaps with training. Callers pass the end of the training
        before it: rank 0 observes this moment for all online evaluations, so all times come from one clock, in order.
        """
        self._log.start("eval_start", None, {self._unit: self._in_unit(progress)}, time_ms)

    def accuracy(self, values: Mapping[str, float], progress: int, time_ms: int) -> None:
        """Log the metrics after ``progress`` epochs or samples.

        If the rules combine them, there is one event with all metrics, else one per metric, with its name if several.
        A second event has the value under :data:`common.mlperf.rules.OPEN_QUALITY` if the rule file requires this key.
        """
        at: dict[str, float] = {self._unit: self._in_unit(progress)}
        if self._samples_of_epoch is not None:
            at["epoch_num"] = progress / self._samples_of_epoch
        if self._quality_together:
            self._log.event(self._quality_key, dict(values), at, time_ms=time_ms)
            return
        for metric, value in values.items():
            named = {"metric": metric} if len(values) > 1 else {}
            self._log.event(self._quality_key, value, {**at, **named}, time_ms=time_ms)
            if self._logs_open_quality:
                self._log.event(OPEN_QUALITY, value, at, time_ms=time_ms)

    def eval_stop(self, progress: int, time_ms: int | None = None) -> None:
        """Log the end of an evaluation; ``time_ms`` None: now."""
        self._log.end("eval_stop", None, {self._unit: self._in_unit(progress)}, time_ms=time_ms)

    def run_stop(self, status: str, progress: int, time_ms: int | None) -> None:
        """Stop the clock of the run and write nothing more; ``status`` is ``success`` or ``aborted``.

        Training may continue for some steps until all ranks know that the run has ended; these steps are not logged.

        Args:
            progress: epochs or samples, at the evaluation that ended the run if there is one.
            time_ms: time at which the outcome was known; None for now.
        """
        self._log.end("run_stop", None, {"status": status, self._unit: self._in_unit(progress)}, time_ms=time_ms)
        self._log = RunLog(None, rank=SILENT)
