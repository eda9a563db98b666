"""Reasons for refusing results: one table with every reason and its source.

A result is refused only if a sentence of the rules forbids it, if MLCommons' own checkers refuse it, or if the files
contradict themselves in a way that no honest program can produce. Everything else that looks odd is a note. Every
refusal in the code is a :class:`Refusal` that names its entry in :data:`REASONS`, so the table is complete.
docs/compliance.md shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["rule", "checker", "contradiction"]


@dataclass(frozen=True)
class Reason:
    """One reason for refusals.

    Attributes:
        kind: ``rule``: a sentence of the rules; ``checker``: MLCommons' checkers refuse it or cannot read it;
            ``contradiction``: no honest program produces it.
        text: the condition that must hold.
        source: document and section, or the checker.
    """

    kind: Kind
    text: str
    source: str


_TIMING = "training rules, timing"
_RESULTS = "training rules, results and runs"
_SEEDS = "training rules, random numbers; seed checker of the package checker"
_EVALUATION = "training rules, evaluation frequency"
_HYPERPARAMETERS = "training rules, table of hyperparameters"
_THROUGHPUT = "HPC rules, throughput"
_COMPLIANCE = "compliance checker"
_RCP = "training rules, reference convergence points; RCP checker"
_LAYOUT = "submission rules, directory structure"
_CONTENT = "submission rules, submission content"
_DESCRIPTION = "submission rules, system description"
_CHECKERS = "checkers of mlperf-logging"
_REGISTRY = "runs.jsonl, which only the launcher writes"
_LOG = "log format of mlperf-logging"

REASONS: dict[str, Reason] = {
    # One log.
    "log-unreadable": Reason("checker", "Every MLLOG line is one whole JSON object in a regular file.", _LOG),
    "benchmark-unknown": Reason("checker", "The ruleset has a benchmark with the logged name.", _COMPLIANCE),
    "rule-file-unknown": Reason(
        "checker", "Values that select rule files (division, benchmark, optimizer) are known ones.", _COMPLIANCE
    ),
    "compliance-rule": Reason("checker", "Every rule of the rule files of the ruleset holds.", _COMPLIANCE),
    "compliance-no-answer": Reason("checker", "The compliance checker can judge the log.", _COMPLIANCE),
    "run-resumed": Reason(
        "rule", "A run is one complete training from its initialization to the quality target.", _RESULTS
    ),
    "run-incomplete": Reason("checker", "A log has exactly one run_start and one run_stop.", _COMPLIANCE),
    "run-status": Reason("checker", "run_stop has the status success or aborted.", "RCP checker, result summarizer"),
    "seed-missing": Reason(
        "rule",
        "Every run of the closed division logs at least one seed (up to v4.0: if another run of the result does).",
        _SEEDS,
    ),
    "seed-not-integer": Reason("rule", "Seeds are integers.", _SEEDS),
    "seed-repeated": Reason(
        "rule", "No two runs log the same seed from the same source line, nor one run twice.", _SEEDS
    ),
    "evaluation-no-number": Reason("checker", "Quality and progress of every evaluation are numbers.", "RCP checker"),
    "evaluation-missing": Reason("checker", "Success needs an evaluation with its progress.", "RCP checker"),
    "target-missed": Reason(
        "checker", "A run with the status success reaches the target in its last evaluation.", "RCP checker"
    ),
    "evaluation-schedule": Reason(
        "rule", "Evaluations happen at least as often as in the evaluation schedule.", _EVALUATION
    ),
    "checkpoint-unreported": Reason(
        "rule",
        "Stable Diffusion: the first checkpoint that meets the targets and the one before it are evaluated; in one "
        "run of a result (v3.1), all checkpoints up to the first that meets them.",
        _EVALUATION,
    ),
    "hyperparameter-rule": Reason("rule", "Hyperparameters have the values that the table allows.", _HYPERPARAMETERS),
    "cache-cleared-late": Reason("rule", "The page cache is cleared before the run starts.", _TIMING),
    "initialization-too-long": Reason(
        "rule",
        "Initialization ends in time: after 30 minutes (v0.7: 20; GPT-3: 60; open division: 240) the clock starts.",
        _TIMING,
    ),
    "phase-order": Reason("rule", "Initialization comes first, then run_start, training, and run_stop.", _TIMING),
    "staging-not-started": Reason("checker", "Every staging_stop comes after its staging_start.", _COMPLIANCE),
    "outside-run": Reason("rule", "Training and evaluation happen between run_start and run_stop.", _TIMING),
    "run-without-length": Reason("contradiction", "A run takes time.", _LOG),
    "time-no-milliseconds": Reason(
        "contradiction", "time_ms counts milliseconds since 1970, between the years 2010 and 2100.", _LOG
    ),
    "clock-backwards": Reason(
        "contradiction", "Training and evaluations come in the order of time, to a second.", _LOG
    ),
    "run-stop-early": Reason("rule", "The clock stops when the system knows that the target is reached.", _TIMING),
    "evaluation-after-target": Reason(
        "rule", "The convergence of a run is its first evaluation that reaches the target.", _RCP
    ),
    "progress-backwards": Reason(
        "contradiction", "Training makes progress: it grows from one evaluation to the next.", _LOG
    ),
    "training-missing": Reason(
        "contradiction", "Blocks whose labels agree with the evaluations cover the training without gaps.", _LOG
    ),
    "evaluation-untrained": Reason(
        "contradiction",
        "Where the other evaluations are at the ends of blocks, every evaluation is. MiniGo: the generation that "
        "passes was trained.",
        _LOG,
    ),
    "count-invalid": Reason("contradiction", "Counts are whole numbers that are possible.", _LOG),
    "not-finite": Reason("contradiction", "Hyperparameters are finite numbers.", _LOG),
    # A set of runs.
    "benchmarks-mixed": Reason("checker", "All runs of a result are of one benchmark.", "package checker"),
    "run-count": Reason("rule", "A result has exactly the number of runs that the rules set.", _RESULTS),
    "runs-not-converged": Reason("rule", "At most one run misses the target (3D U-Net: four).", _RESULTS),
    "data-synthetic": Reason("rule", "Runs use the data set of the reference.", "training rules, data set"),
    "cache-not-cleared": Reason("rule", "The page cache is cleared before each run.", _TIMING),
    "configurations-differ": Reason(
        "rule", "All runs of a result have the same hyperparameters, code and system.", _RESULTS
    ),
    "convergence-too-fast": Reason(
        "rule", "Runs do not converge faster than the reference by more than chance allows.", _RCP
    ),
    "run-copied": Reason("contradiction", "Two runs never agree in all times to the millisecond.", _LOG),
    "file-twice": Reason("contradiction", "Each run of a result has its own file.", _LOG),
    "log-is-link": Reason("checker", "Logs in a folder of results are regular files.", "repository checker"),
    "result-name": Reason("checker", "Logs are named result_<i>.txt, each number once.", "package checker"),
    "not-consecutive": Reason(
        "rule", "The runs of a result are consecutive runs of all that were launched, in launch order.", _RESULTS
    ),
    "declared-count": Reason("rule", "The number of runs is fixed before the first one starts.", _RESULTS),
    "series-changed": Reason("rule", "One result comes from one configuration and one commit.", _RESULTS),
    "source-unknown": Reason("rule", "The submitted code is the code that ran.", "submission rules, source code"),
    "run-without-end": Reason("rule", "All runs that were launched count, with their results.", _RESULTS),
    "registry-contradiction": Reason(
        "contradiction", "The lines on a run agree with each other, with the log and with the files.", _REGISTRY
    ),
    # The instances of a throughput result.
    "instance-missing": Reason(
        "rule", "Every instance that was launched is submitted, as one that counts or as a pruned one.", _THROUGHPUT
    ),
    "instance-count": Reason("rule", "At least as many instances count as a time to solution has runs.", _THROUGHPUT),
    "instance-not-converged": Reason("rule", "Every instance that counts reaches the target.", _THROUGHPUT),
    "instance-size": Reason(
        "rule",
        "A log states the nodes and accelerators of its instance, which are equal in all instances.",
        _THROUGHPUT,
    ),
    # A submitter's folder.
    "part-missing": Reason("rule", "A submission has the folders systems and results, with results in them.", _LAYOUT),
    "file-unfit": Reason(
        "checker", "A submission holds regular files with names that the checkers can take.", "repository checker"
    ),
    "description-unreadable": Reason("checker", "Descriptions are JSON objects with every key once.", _CHECKERS),
    "description-wrong": Reason(
        "checker", "Descriptions have all fields, as text, with known words.", "system description checker"
    ),
    "description-count": Reason("rule", "Numbers of nodes and accelerators are plain decimal numbers.", _DESCRIPTION),
    "description-missing": Reason("checker", "Every system with results has a description.", "package checker"),
    "code-missing": Reason("rule", "Every benchmark comes with its code and a README on how to run it.", _CONTENT),
    "folder-of-another": Reason("rule", "Folders of results are named after the logged benchmark.", _LAYOUT),
    "division-differs": Reason("rule", "A result belongs to one division.", "training rules, divisions"),
    "counts-differ": Reason(
        "contradiction", "Logged nodes and accelerators are those of the system description.", _DESCRIPTION
    ),
    "scaling-wrong": Reason("contradiction", "scaling.json holds the factor that the RCP checker computes.", _RCP),
    "checker-refuses": Reason("checker", "MLCommons' checkers accept the submission.", _CHECKERS),
    "scaling-folder": Reason(
        "checker", "HPC results are in the folders strong and weak below the system.", "package checker"
    ),
    "throughput-alone": Reason(
        "rule", "A throughput result comes with a time to solution of the same benchmark.", _THROUGHPUT
    ),
    "submitter-differs": Reason("rule", "A submission holds the results of one organization.", _LAYOUT),
    "place-taken": Reason(
        "rule", "A submission has one result per system and benchmark, and one code per name.", _LAYOUT
    ),
}
"""Name of each reason -> the reason."""


class Refusal(str):
    """Text that says what is refused and why.

    Attributes:
        reason: key of :data:`REASONS`.
        sentence: the text without the quoted rule and its source.
    """

    reason: str
    sentence: str

    def __new__(cls, reason: str, sentence: str) -> Refusal:
        """Create the refusal. If the reason is a rule, the text ends with the sentence of the rules and its source.

        Raises:
            KeyError: ``reason`` is unknown.
        """
        refusal = super().__new__(cls, _cited(sentence, REASONS[reason]))
        refusal.reason, refusal.sentence = reason, sentence
        return refusal

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # str.__getnewargs__ returns only the text
        """Return the constructor arguments, for pickling and copying."""
        return self.reason, self.sentence

    def about(self, prefix: str) -> Refusal:
        """Return the same refusal with ``prefix``, such as the name of a file, in front of the sentence."""
        return Refusal(self.reason, f"{prefix}{self.sentence}")

    def without(self, path: str) -> Refusal:
        """Return the same refusal without ``path`` at the beginning of the sentence."""
        return Refusal(self.reason, self.sentence.removeprefix(path).lstrip(":, "))


def _cited(sentence: str, entry: Reason) -> str:
    if entry.kind != "rule":
        return sentence
    return f'{sentence} (rule: "{entry.text}" {entry.source})'
