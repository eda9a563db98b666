"""The command line, ``mlperf-suite COMMAND …``: maps workload names to classes and passes them to the layers below.

Only the commands that need Hydra or PyTorch import them, so that commands that only read text start at once.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from benchmarks import WORKLOADS
from common.config.composition import completions, scales_of, settings_help, with_hydra
from common.config.override import did_you_mean
from common.config.yaml_files import workload_file
from common.errors import ConfigError, Interrupted, SuiteError, disk_error, flush_output, print_error
from common.untrusted.confined import import_path

if TYPE_CHECKING:
    from common.config.schema import RunConfig, SessionConfig
    from common.contract.workload import Workload
    from common.data.commands import DataCommands
    from common.mlperf.admission import Admission
    from common.run.start import Start

USAGE = """usage: mlperf-suite COMMAND …

  train         train a benchmark and write its log               mlperf-suite train benchmark=resnet scale=demo
  list          list the workloads with targets and scales
  download      download raw data, or check downloaded files      mlperf-suite download benchmark=resnet --help
  generate      generate small synthetic raw data                 mlperf-suite generate benchmark=resnet scale=demo
  prepare       convert raw data to the format for training       mlperf-suite prepare benchmark=resnet --help
  verify        compare prepared data with their checksums        mlperf-suite verify benchmark=resnet
  score         score the checkpoints of a run afterwards         mlperf-suite score runs/stable_diffusion/…
  bench         measure the speed of a workload                   mlperf-suite bench benchmark=resnet scale=1xH200
  measure       measure all workloads on 1, 2, 4, … GPUs          mlperf-suite measure --help
  characterise  what the steps spend their time on: a page        mlperf-suite characterise --help
  estimate      estimate time and energy on N GPUs                mlperf-suite estimate bert --gpus 1,8,64
  schedule      plan several trainings on the GPUs of a node      mlperf-suite schedule jobs.yaml --gpus 8
  doctor        test this machine, or all nodes of a job          mlperf-suite doctor --help
  check         check logs and submissions against the rules      mlperf-suite check runs/resnet/…/mlperf.log
  summarize     compute the score of a series of runs             mlperf-suite summarize results/
  package       build a submission and run MLCommons' checkers    mlperf-suite package --help
  report        draw one or several runs as an HTML page          mlperf-suite report results/

Each command explains its arguments with --help. train and bench take settings as KEY=VALUE, and Hydra's flags such as
--cfg job. Tab completion:
  eval "$(mlperf-suite train -sc install=bash)"
"""

HELP = frozenset({"-h", "--help"})
LIST_COLUMNS = 100
"""Width of the table of workloads, in characters."""


def main() -> None:
    """Run the console command and exit with its exit code."""
    arguments = sys.argv[1:]
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if arguments and arguments[0] in READING_COMMANDS:
        sys.path[:] = import_path()
    if arguments and arguments[0] in RANK_COMMANDS:
        from common.distributed.startup import leave

        leave(lambda: run(arguments))
    sys.exit(run(arguments))


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed.

    Otherwise the next file that is opened would get the number of the stream, and text for the stream would go into it.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Print expected errors as one message without a traceback."""
    if not argv or argv[0] in {*HELP, "help"}:
        print(USAGE, end="")
        return 0 if argv else ConfigError.exit_code
    command, rest = argv[0], list(argv[1:])
    try:
        if command in ("-sc", "--shell-completion"):
            return _complete(argv)
        known = {**COMMANDS, **DRIVER_COMMANDS}
        if command not in known:
            raise ConfigError(
                f"no command {command!r}; the commands are {', '.join(COMMANDS)}{did_you_mean(command, COMMANDS)}"
            )
        _require_current_folder()
        code = known[command](rest)
        sys.stdout.flush()
        return code
    except SuiteError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:  # training has its own handler, which writes a checkpoint
        stopped = Interrupted(f"{command} was stopped by Ctrl-C")
        stopped.came_by(signal.SIGINT)
        print_error(stopped)
        return stopped.exit_code
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        flush_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if (message := disk_error(error, "output of the command")) is None:
            raise
        print_error(message)
        return message.exit_code


def _require_current_folder() -> None:
    """Raise a ConfigError if the current folder was removed: relative paths and programs that start here need it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder no longer exists: change to another one with cd") from error


def workload_class(name: str) -> type[Workload]:
    """Return the class of workload ``name``.

    Raises:
        ConfigError: there is no such workload.
    """
    if name not in WORKLOADS:
        raise _unknown_benchmark(name)
    module, _, attribute = WORKLOADS[name].partition(":")
    loaded: type[Workload] = getattr(importlib.import_module(module), attribute)
    return loaded


def _unknown_benchmark(name: str) -> ConfigError:
    known = sorted(WORKLOADS)
    return ConfigError(f"benchmark={name}: unknown; the workloads are {', '.join(known)}{did_you_mean(name, known)}")


def load(tree: Mapping[str, Any], micro_batch: int | None = None) -> tuple[RunConfig, SessionConfig]:
    """Build the validated configuration of any workload from ``tree`` (:func:`common.config.loading.load`).

    Raises:
        ConfigError: naming key, value and what was expected.
    """
    from common.config import loading

    return loading.load(tree, workload_class, micro_batch)


def admitted(tree: Mapping[str, Any]) -> tuple[RunConfig, SessionConfig, Admission]:
    """Build the validated configuration from ``tree``, and its rules, schedule and logged hyperparameters.

    Raises:
        ConfigError: the configuration is wrong, or the rules of its division forbid it.
    """
    from common.mlperf.admission import admit

    run, session = load(tree)
    return run, session, admit(run, session)


def train(argv: list[str]) -> int:
    """``train``: compose and validate, start this node's ranks unless a launcher has, and train."""
    from common.launch.data_folder import refuse_custom, require_prepared
    from common.run.start import on_ranks

    def work(start: Start) -> int:
        from common.distributed.rank_info import Role
        from common.mlperf.admission import admit
        from common.run.conclusion import await_conclusion, conclude
        from common.run.evaluation_rank import EvaluationRank
        from common.run.non_training_rank import NonTrainingRank
        from common.run.play_rank import PlayRank
        from common.run.trainer import Trainer

        other_roles: dict[str, type[NonTrainingRank]] = {"play": PlayRank, "evaluate": EvaluationRank}

        # Report errors in the configuration before errors in the data.
        if start.run.system.vboost is not None and start.device.type != "cuda":
            raise ConfigError(f"system.vboost={start.run.system.vboost}: this run uses no GPU")
        admit(start.run, start.session)
        start = replace(start, run=require_prepared(start.run, start.session))
        of_a_run = (start.workload_type, start.run, start.session, start.rank_info, start.device)
        role = Role.of(start.rank_info, start.run.other_ranks).name
        if role in other_roles:
            other_roles[role](*of_a_run).work()
            await_conclusion()
            return 0
        trainer = Trainer(*of_a_run, start.began_ms, start.scorer, start.tree)
        return conclude(trainer.train(), start)

    if not HELP.isdisjoint(argv):
        print(settings_help("train", argv), end="")
        return 0
    return with_hydra(
        argv, lambda tree, arguments: on_ranks("train", arguments, tree, workload_class, work, refuse_custom)
    )


def score(argv: list[str]) -> int:
    """``score``: score the checkpoints of a run whose training has ended, on this node's or a launcher's ranks."""
    from common.run.score_run import USAGE as SCORE_USAGE
    from common.run.score_run import configuration, score_run
    from common.run.start import on_ranks

    if not argv or argv[0] in HELP:
        print(SCORE_USAGE, end="")
        return 0 if argv else ConfigError.exit_code
    tree, arguments = configuration(argv)
    return on_ranks("score", arguments, tree, workload_class, score_run)


def bench(argv: list[str]) -> int:
    """``bench``: measure the step on a synthetic batch and the run through the reader, or as ``bench.only`` selects."""
    began = time.perf_counter()
    if not HELP.isdisjoint(argv):
        print(settings_help("bench", argv), end="")
        return 0
    # Import both now: with `measure`, this process waits for its turn on the GPUs after all imports.
    from common.run.bench import bench as measure
    from common.run.start import on_ranks

    def work(start: Start) -> int:
        return measure(start, began)

    return with_hydra(argv, lambda tree, arguments: on_ranks("bench", arguments, tree, workload_class, work))


def measure(argv: list[str]) -> int:
    """``measure``: measure all workloads that have a recipe, on several numbers of this node's GPUs; print a table."""
    from common.measure import command

    return command.main(argv, WORKLOADS)


def characterise(argv: list[str]) -> int:
    """``characterise``: measure variants of the steps of workloads, and write a page that compares them."""
    from common.characterise import command

    return command.main(argv, WORKLOADS)


def estimate(argv: list[str]) -> int:
    """``estimate``: estimate time to train, efficiency and energy on numbers of GPUs; print the best settings."""
    from common.planning import estimate as command

    return command.main(argv, load, workload_class)


def list_workloads(argv: list[str]) -> int:
    """``list``: print a table of the workloads."""
    from omegaconf import OmegaConf

    from common.config.schema import TargetConfig
    from common.mlperf.rules import newest_ruleset, rules_for

    if argv and argv[0] in HELP:
        print(
            "usage: mlperf-suite list\n\nPrint a table of the workloads: targets, runs of a result, last round, scales."
        )
        return 0
    if argv:
        raise ConfigError("list takes no arguments")
    rows = [("benchmark", "target", "runs", "last round", "scales")]
    for name in sorted(WORKLOADS):
        settings = OmegaConf.load(workload_file("benchmark", name))
        rules = rules_for(name, newest_ruleset(name))
        targets = {metric: TargetConfig(**target) for metric, target in settings.targets.items()}
        wanted = ", ".join(f"{metric} {target}" for metric, target in targets.items())
        rows.append((name, wanted, str(rules.runs), rules.last_round, ", ".join(scales_of(name))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    for row in rows:
        begin = "".join(f"{entry:<{width + 2}}" for entry, width in zip(row[:-1], widths[:-1], strict=True))
        scales = textwrap.wrap(row[-1], LIST_COLUMNS - indent, break_long_words=False)
        print(begin + f"\n{' ' * indent}".join(scales))
    return 0


def _module_command(path: str) -> Callable[[list[str]], int]:
    """Return a command that imports the module at ``path`` and calls its ``main(argv)``."""

    def run_command(argv: list[str]) -> int:
        code: int = importlib.import_module(path).main(argv)
        return code

    return run_command


def _data_command(command: str) -> Callable[[list[str]], int]:
    def run_command(argv: list[str]) -> int:
        names = [argument.removeprefix("benchmark=") for argument in argv if argument.startswith("benchmark=")]
        if not names and not HELP.isdisjoint(argv):
            usage = f"mlperf-suite {command} benchmark=NAME"
            print(f"usage: {usage} [OPTION ...]\n\nNAME is one of {', '.join(sorted(WORKLOADS))}.")
            print(f"The options depend on the benchmark. To list them: {usage} --help")
            return 0
        if len(names) != 1:
            raise ConfigError(f"{command}: name exactly one benchmark: mlperf-suite {command} benchmark=NAME …")
        if names[0] not in WORKLOADS:
            raise _unknown_benchmark(names[0])
        rest = [argument for argument in argv if not argument.startswith("benchmark=")]
        scales = [argument for argument in rest if argument.startswith("scale=")]
        scale = None
        if scales and command == "generate":
            scale = scales[-1].removeprefix("scale=")
            rest = [argument for argument in rest if argument not in scales]
            rest = [*_generation_arguments(names[0], scale), *rest]
        package = WORKLOADS[names[0]].partition(":")[0].rpartition(".")[0]
        commands: DataCommands = importlib.import_module(f"{package}.prepare").COMMANDS
        return commands.run(command, rest, scale)

    return run_command


def _generation_arguments(benchmark: str, scale: str) -> list[str]:
    from common.config.composition import compose

    arguments = compose([f"benchmark={benchmark}", f"scale={scale}"])["synthetic"]
    if not arguments:
        raise ConfigError(f"generate: the recipe scale={scale} of {benchmark} is not for synthetic data")
    return [str(argument) for argument in arguments]


def _series(argv: list[str]) -> int:
    from common.config.composition import compose
    from common.launch import experiment

    return experiment.main(argv, compose, admitted)


def _task(argv: list[str]) -> int:
    from common.launch import task

    return task.main(argv, run)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "list": list_workloads,
    "download": _data_command("download"),
    "generate": _data_command("generate"),
    "prepare": _data_command("prepare"),
    "verify": _data_command("verify"),
    "score": score,
    "bench": bench,
    "measure": measure,
    "characterise": characterise,
    "estimate": estimate,
    "schedule": _module_command("common.planning.command"),
    "doctor": _module_command("common.doctor.command"),
    "check": _module_command("common.submission.check"),
    "summarize": _module_command("common.submission.summarize"),
    "package": _module_command("common.submission.package"),
    "report": _module_command("common.report.command"),
}
DRIVER_COMMANDS: dict[str, Callable[[list[str]], int]] = {"series": _series, "task": _task}
"""Commands for the scripts of ``scripts/``, not for users."""
READING_COMMANDS = ("check", "summarize", "package", "report")
"""Commands that read untrusted files."""
RANK_COMMANDS = ("train", "score", "bench", "doctor", "task")
"""Commands whose process may be a rank of a job."""


def _complete(argv: Sequence[str]) -> int:
    """Complete a command line. Remove the subcommand for Hydra, whose completion expects a program without one."""
    from common.distributed.environment import integer

    line = os.environ.get("COMP_LINE", "")
    match = re.match(r"(\S+\s+)(\S+\s)(.*)", line)
    words = line.split()
    if match is not None and not line.endswith(" ") and (offered := completions(words[2:])) is not None:
        print("\n".join(offered))
        return 0
    if match is None or match[2].strip() not in ("train", "bench"):
        typed = line.split()[1] if len(line.split()) > 1 else ""
        print("\n".join(name for name in COMMANDS if name.startswith(typed)))
        return 0
    os.environ["COMP_LINE"] = match[1] + match[3]
    cursor = integer(os.environ, "COMP_POINT", 0, remedy="the shell's completion sets it: unset {name}")
    os.environ["COMP_POINT"] = str(max(0, cursor - len(match[2])))
    return with_hydra(list(argv), lambda tree, arguments: 0)


if __name__ == "__main__":
    main()
