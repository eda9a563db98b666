"""``score``: scores the checkpoints of a run whose training has ended, and completes the run's log.

The command can be stopped and started again at any time: each score is stored at once and never computed twice. All
evaluations and ``run_stop`` are logged together, when the first passing checkpoint is known or all are scored.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.config.override import RENAMED, override, parsed
from common.distributed import job_store
from common.distributed.faults import GracefulStop, Heartbeat
from common.distributed.layout import Layout
from common.distributed.rank_info import Role
from common.distributed.shared_folder import make_output
from common.distributed.startup import set_determinism
from common.errors import NOT_CONVERGED, CheckpointError, ConfigError, DataError
from common.evaluation.checkpoint_queue import CHECKPOINTS, Checkpoint, CheckpointQueue, CheckpointScore
from common.evaluation.checkpoint_scoring import CheckpointScoring
from common.evaluation.offline import score_of
from common.launch.data_folder import require_prepared
from common.mlperf.admission import admit
from common.mlperf.events import logged_data_set
from common.mlperf.mllog import RunLog
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.verdict import format_verdict, judge
from common.run.non_training_rank import own_stream
from common.run.scoring import ending_checkpoint, evaluation_line, log_checkpoint_scores, require_whole_set
from common.run.start import Start
from common.run.timed_run import TimedRun

USAGE = """usage: mlperf-suite score RUN [KEY=VALUE ...]

Score the checkpoints in the folder RUN of a run with evaluation.scoring=offline, and complete the run's log. A stopped
command can be started again: finished scores are kept. The number of ranks is that of the training, unless scale.nodes
and scale.gpus_per_node are given.

These settings may be changed: data_dir, assets_dir, device, timeout_seconds, cuda_graphs, micro_batch, and all settings
in evaluation, layout, scale, system, reader and model.
"""
CHOICE = USAGE.partition("\n\n")[2].partition("\n\n")[2].replace("\n", " ").strip()
KEYS = ("data_dir", "assets_dir", "device", "timeout_seconds", "cuda_graphs", "micro_batch")
SECTIONS = ("evaluation", "layout", "scale", "system", "reader", "model")
LOG_EVENTS = ("eval_start", "eval_stop", "eval_accuracy", "eval_error")
_OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)*=")
"""Pattern for the start of an override. It distinguishes overrides from folders with ``=``, such as ``./a=b``."""
OPENING_SECONDS = 30 * 60


def configuration(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration for scoring the run that the arguments name, and the arguments for its ranks.

    Raises:
        ConfigError: an argument is wrong.
        CheckpointError: the folder has no run with offline scoring.
    """
    given = [argument for argument in argv if _OVERRIDE.match(argument)]
    folders = [argument for argument in argv if argument not in given]
    if len(folders) != 1:
        raise ConfigError(f"score: name the folder of one run, these are {len(folders)}: mlperf-suite score RUN")
    folder = Path(folders[0]).absolute()
    described = CheckpointQueue(folder, lambda values: False, 1).described()
    tree: dict[str, Any] = described["configuration"]
    if former := [key for key in RENAMED if _value(tree, key) is not None]:
        raise ConfigError(
            f"{folder}: the run is of an earlier version of the suite ({former[0]} is {RENAMED[former[0]]} now); score "
            "it with the version that trained it"
        )
    tree |= {"output_dir": str(folder), "seed": described["seed"]}
    evaluation, scale = tree["evaluation"], tree["scale"]
    others = evaluation["ranks"] + tree.get("selfplay", {}).get("ranks", 0)
    if scale["nodes"] == 1:  # all ranks together may not divide the batch
        scale["gpus_per_node"] -= others
    elif others % scale["gpus_per_node"] == 0:
        scale["nodes"] -= others // scale["gpus_per_node"]
    tree["selfplay"] = {}
    evaluation |= {"ranks": 0, "by_command": False}
    given = [argument for argument in given if not argument.startswith("output_dir=")]
    for argument in given:
        _override(tree, argument)
    if evaluation["ranks"]:
        raise ConfigError(f"evaluation.ranks={evaluation['ranks']}: all ranks score here, and none trains")
    return tree, [str(folder), *given, override("output_dir", folder)]


def _value(tree: Any, name: str) -> Any:
    """Return the value of a dotted key; None if the configuration does not have it."""
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _override(tree: dict[str, Any], argument: str) -> None:
    name, value = parsed(argument)
    *sections, key = name.split(".")
    if not (name in KEYS or (sections and sections[0] in SECTIONS)):
        raise ConfigError(f"score: {name} cannot differ from the training run. {CHOICE}")
    node = tree
    for section in sections:
        if not isinstance(node.get(section), dict):
            raise ConfigError(f"{name}: unknown configuration key")
        node = node[section]
    node[key] = value


def score_run(start: Start) -> int:
    """Score the checkpoints of a run; return the exit code of ``train`` for the result, 0 except on rank 0. Collective.

    Raises:
        CheckpointError: training has not ended, or a checkpoint is missing or unreadable.
        ConfigError: the ranks do not share the folder.
        DataError: the data are missing, or differ from those of the run.
        Interrupted: a signal asked to stop; stored scores are kept.
    """
    folder, rank = start.session.output_dir, start.rank_info.rank
    make_output(folder, start.run, start.session)
    queue = CheckpointQueue(folder, start.run.benchmark.reached, start.run.evaluation.begins_with)
    log = folder / str(queue.described()["log"])
    queue.take_over() if rank == 0 else queue.open()
    if not queue.complete:
        raise CheckpointError(
            f"{queue.folder / CHECKPOINTS}: the training of this run has not ended, so that it cannot be judged: "
            "resume it, or train anew"
        )
    finished = read_log(log)
    unscored = json.dumps(queue.next() is not None) if rank == 0 else ""
    unscored = job_store.from_rank_0("whether to score", unscored)
    if unscored == "true":
        _require_data_of(finished, start)
        with own_stream(start.device):
            _score(start, queue)
    if rank:
        return 0
    if unscored == "true" or finished.status is None:
        _complete(start, queue, finished)
    verdict = judge(log, start.session.ruleset)
    print(format_verdict(verdict), flush=True)
    return 0 if queue.passed() is not None else NOT_CONVERGED


def _require_data_of(log: ParsedLog, start: Start) -> None:
    """Raise DataError if ``data_dir`` holds other data than the log names."""
    found, named = logged_data_set(require_prepared(start.run, start.session).benchmark), log.value("data_set")
    if found != named:
        raise DataError(
            f"{start.session.data_dir}: holds {found} data, and {log.path} is of {named}; give the data_dir that the "
            "run was trained on"
        )
    start.workload_type.require_data_of(start.session.output_dir, start.session.data_dir)


def _score(start: Start, queue: CheckpointQueue) -> None:
    """Score the remaining checkpoints. Collective."""
    run, session = start.run, start.session
    assert session.seed is not None, "the run's seed is in its configuration"
    layout = Layout(
        run.layout, Role.of(start.rank_info, {}).rank, start.device, session.seed,
        ctas=run.system.network.ctas.by_axis(),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        beat = Heartbeat(start.rank_info, session.output_dir, session.timeout_seconds, role="evaluate")
        heartbeat = stack.enter_context(beat)
        with heartbeat.extended(OPENING_SECONDS, "building the evaluation"):
            set_determinism(run.deterministic)
            torch.manual_seed(layout.generator("torch").initial_seed())
            workload = start.workload_type(run, layout)
            stack.callback(workload.close)
            scoring = CheckpointScoring(workload, layout, queue.folder, heartbeat=heartbeat)
            stack.callback(scoring.close)
            scoring.prepare()
            scoring.open_data(session.data_dir)
        signals = stack.enter_context(GracefulStop())

        def note(checkpoint: Checkpoint, score: CheckpointScore) -> None:
            require_whole_set(run.benchmark, score.values)
            queue.note(checkpoint.point.number, score)
            values = run.benchmark.judged(score.values)
            print(evaluation_line(run.benchmark, values, checkpoint.point.at), file=sys.stderr, flush=True)

        for _ in scoring.scores(queue.next, note, lambda: signals.requested):
            pass


def _complete(start: Start, queue: CheckpointQueue, before: ParsedLog) -> None:
    """Rewrite the log atomically with the evaluations and ``run_stop`` at its end.

    Evaluations already in the log are dropped: they are left from a process that was killed while it logged them.
    """
    run, path = start.run, before.path
    admission = admit(run, start.session)
    scores = [score_of(queue.checkpoints[number], score) for number, score in queue.scores.items()]
    scores.sort(key=lambda score: score.scored_ms or (0, 0))
    partial = path.with_name(f".{path.name}.partial")
    kept = [event.line for event in before.events if event.key not in (*LOG_EVENTS, "run_stop")]
    lines = path.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[number - 1] for number in kept))
    ending = ending_checkpoint(run.benchmark, scores)
    with RunLog(partial, 0, append=True) as log:
        tokens = run.declaration.sample_tokens
        clock = TimedRun(log, admission.rules, admission.schedule, run.train_samples, run.global_batch, tokens)
        clock.start_ms = int(before.all("run_start")[0].time_ms)
        log_checkpoint_scores(clock.events, run.benchmark, scores)
        last = max(checkpoint.point.counted for checkpoint in queue.checkpoints.values())
        clock.stop("success" if queue.passed() is not None else "aborted", last, last, ending)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)
