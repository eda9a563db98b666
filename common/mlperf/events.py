"""Which events of a run go into the log, and when: the only callers of the log.

The keys of a benchmark's hyperparameters are a table in its ``configs/benchmark`` file; workloads never log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.config import RunConfig, SessionConfig
from common.data.source import Block
from common.errors import ConfigError
from common.mlperf.mllog import RunLog


def hyperparameters(run: RunConfig, derived: Mapping[str, object]) -> dict[str, object]:
    """Key in the log -> value, from the benchmark's table, the configuration and the workload's derived values.

    Raises:
        ConfigError: the table names a value that does not exist.
    """
    tables = run.benchmark.log_keys
    optimizer = getattr(getattr(run.workload, "hparams", None), "optimizer", None)
    chosen = {**tables.get("always", {}), **tables.get(str(optimizer), {})}
    return {key: _look_up(path, run, derived) for key, path in chosen.items()}


def _look_up(path: str, run: RunConfig, derived: Mapping[str, object]) -> object:
    if path in derived:
        return derived[path]
    first, _, rest = path.partition(".")
    value: Any = getattr(run.workload, first) if hasattr(run.workload, first) else run
    for name in rest.split(".") if hasattr(run.workload, first) else path.split("."):
        if not hasattr(value, name):
            raise ConfigError(f"benchmark.log_keys: nothing is called {path!r}")
        value = getattr(value, name)
    return value


class RunEvents:
    """The events of one run, in the order of the rules.

    Args:
        log: the run's log; silent on all ranks but 0.
        unit: ``epoch_num`` or ``samples_count``: the metadata key under which progress is logged.
    """

    def __init__(self, log: RunLog, unit: str) -> None:
        self._log = log
        self._unit = unit

    def begin(
        self, run: RunConfig, session: SessionConfig, ruleset: str, resumed_from: str | None, time_ms: int
    ) -> None:
        """Everything up to ``init_start``, as of ``time_ms``, when this process began to build anything."""
        log, who = self._log, session.submission
        log.event("cache_clear", session.cache_cleared, time_ms=time_ms)
        log.event("submission_benchmark", run.benchmark.log_name, time_ms=time_ms)
        log.event("submission_org", who.org, time_ms=time_ms)
        log.event("submission_division", who.division, time_ms=time_ms)
        log.event("submission_status", who.status, time_ms=time_ms)
        log.event("submission_platform", who.platform, time_ms=time_ms)
        log.event("ruleset", ruleset, time_ms=time_ms)
        log.event("data_set", run.benchmark.data_set, time_ms=time_ms)
        if resumed_from is not None:
            log.event("resumed_from", resumed_from, time_ms=time_ms)
        log.start("init_start", time_ms=time_ms)

    def settings(self, seed: int, values: Mapping[str, object], implementations: Mapping[str, str]) -> None:
        """Seed and hyperparameters; then ``init_stop``."""
        self._log.event("seed", seed)
        for key, value in values.items():
            self._log.event(key, value)
        if implementations:
            self._log.event("implementations", dict(implementations))

    def initialised(self) -> None:
        """Initialisation is over."""
        self._log.end("init_stop")

    def run_start(self) -> None:
        """The clock starts: data may be touched from here on."""
        self._log.start("run_start")

    def data_opened(self, train_samples: int, eval_samples: int) -> None:
        """The sizes of the data, once they have been touched."""
        self._log.event("train_samples", train_samples)
        self._log.event("eval_samples", eval_samples)

    def block_start(self, block: Block) -> None:
        """Training of a block begins."""
        if block.epochs:
            self._log.start("block_start", None, {"first_epoch_num": block.first_epoch, "epoch_count": block.epochs})
        else:
            self._log.start("block_start", None, {"samples_count": block.start_sample})

    def block_stop(self, block: Block) -> None:
        """The last step of a block is done."""
        if block.epochs:
            self._log.end("block_stop", None, {"first_epoch_num": block.first_epoch})
        else:
            self._log.end("block_stop", None, {"samples_count": block.start_sample + block.samples})

    def epoch_start(self, epoch: int) -> None:
        """An epoch begins; epochs count from 1."""
        self._log.start("epoch_start", None, {"epoch_num": epoch})

    def epoch_stop(self, epoch: int, throughput: float) -> None:
        """The last sample of an epoch is done; ``throughput`` in samples a second over all ranks."""
        self._log.end("epoch_stop", None, {"epoch_num": epoch})
        self._log.event("tracked_stats", {"throughput": throughput}, {"step": epoch})

    def eval_start(self, progress: int) -> None:
        """An evaluation begins after ``progress`` epochs or samples."""
        self._log.start("eval_start", None, {self._unit: progress})

    def accuracy(self, value: float, progress: int, time_ms: int) -> None:
        """The value of the metric after ``progress`` epochs or samples."""
        self._log.event("eval_accuracy", value, {self._unit: progress}, time_ms=time_ms)

    def eval_stop(self, progress: int) -> None:
        """An evaluation ends."""
        self._log.end("eval_stop", None, {self._unit: progress})

    def run_stop(self, status: str, progress: int, time_ms: int | None) -> None:
        """The clock stops, at ``time_ms`` when the system knew earlier; ``status`` is success or aborted."""
        self._log.end("run_stop", None, {"status": status, self._unit: progress}, time_ms=time_ms)
