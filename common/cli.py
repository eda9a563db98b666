"""The command line: ``mlperf-suite COMMAND …``."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from benchmarks import WORKLOADS
from common.distributed.host_group import leave
from common.errors import ConfigError, DataError, SuiteError
from common.ranks import FULL_DISK, Start, on_ranks, report

FULL_ERROR = "HYDRA_FULL_ERROR"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"

USAGE = """usage: mlperf-suite COMMAND …

  train     train a benchmark from init_start to run_stop     mlperf-suite train benchmark=resnet scale=demo
  list      the workloads, their scales, targets and rounds
  download  fetch or check the raw data                       mlperf-suite download benchmark=resnet --help
  generate  write stand-in data in the raw data's own format  mlperf-suite generate benchmark=resnet scale=demo
  prepare   turn raw data into the format that training reads
  verify    check prepared data against their manifest
  bench     measure the training step and the whole run       mlperf-suite bench benchmark=resnet scale=1xH200
  doctor    qualify this machine, or every node of a job      mlperf-suite doctor --help
  check     judge logs, a series, or a submission's tree      mlperf-suite check runs/resnet/…/mlperf.log
  summarize the score of a series of runs                     mlperf-suite summarize results/
  package   the submission tree of MLCommons' checkers        mlperf-suite package --help
  report    a page with pictures of runs, or a comparison     mlperf-suite report results/

train and bench take Hydra's overrides and flags (--help, --cfg job, --multirun, …). Tab completion:
  eval "$(mlperf-suite train -sc install=bash)"
"""


def main() -> None:
    """Entry point of the console command; exits with the error's code, or 0."""
    leave(lambda: run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code. One message, and no traceback, for errors made by hand."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else ConfigError.exit_code
    command, rest = argv[0], list(argv[1:])
    try:
        if command in ("-sc", "--shell-completion"):
            return _complete(argv)
        if command not in COMMANDS:
            raise ConfigError(f"no command {command!r}; the commands are {', '.join(COMMANDS)}")
        return COMMANDS[command](rest)
    except SuiteError as error:
        report(error)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def train(argv: list[str]) -> int:
    """``train``: compose, validate, start the ranks of this node if nobody has, and train."""

    def work(start: Start) -> int:
        from common.conclusion import await_conclusion, conclude
        from common.distributed.roles import Role
        from common.evaluator import Evaluator
        from common.trainer import Trainer

        if Role.of(start.place, start.run.evaluation.ranks).name == "evaluate":
            Evaluator(start.run, start.session, start.place, start.device).evaluate()
            await_conclusion()
            return 0
        trainer = Trainer(start.run, start.session, start.place, start.device, start.began_ms)
        trainer.train()
        return conclude(trainer)

    return _with_hydra(argv, lambda tree, arguments: on_ranks("train", arguments, tree, work))


def bench(argv: list[str]) -> int:
    """``bench``: the step alone on a synthetic batch, and the run through the data path."""

    def work(start: Start) -> int:
        from common.bench import bench as measure

        return measure(start.run, start.session, start.place, start.device)

    return _with_hydra(argv, lambda tree, arguments: on_ranks("bench", arguments, tree, work))


def list_workloads(argv: list[str]) -> int:
    """``list``: a table of the workloads."""
    from common.mlperf.rules import newest_ruleset, rules_for

    if argv:
        raise ConfigError("list takes no arguments")
    print(f"{'benchmark':<12}{'target':<30}{'runs':<6}{'last round':<12}scales")
    for name in sorted(WORKLOADS):
        settings = OmegaConf.load(CONFIGS / "benchmark" / f"{name}.yaml")
        rules = rules_for(name, newest_ruleset(name))
        scales = _scales(name)
        sign = ">=" if settings.direction == "higher" else "<="
        target = f"{settings.metric} {sign} {settings.target:g}"
        print(f"{name:<12}{target:<30}{rules.runs:<6}{rules.last_round:<12}{', '.join(scales)}")
    return 0


def _scales(benchmark: str) -> list[str]:
    """The scales that ``benchmark`` has a recipe for."""
    recipes = (CONFIGS / "recipe" / benchmark).glob("*.yaml")
    return sorted(path.stem for path in recipes if (CONFIGS / "scale" / path.name).exists())


def _module_command(path: str) -> Callable[[list[str]], int]:
    """A command that a module's ``main(argv)`` implements; imported when it is called."""

    def run_command(argv: list[str]) -> int:
        code: int = importlib.import_module(path).main(argv)
        return code

    return run_command


def _data_command(command: str) -> Callable[[list[str]], int]:
    def run_command(argv: list[str]) -> int:
        names = [argument.removeprefix("benchmark=") for argument in argv if argument.startswith("benchmark=")]
        if len(names) != 1:
            raise ConfigError(f"{command}: say for which benchmark: mlperf-suite {command} benchmark=NAME …")
        if names[0] not in WORKLOADS:
            raise ConfigError(f"benchmark={names[0]}: unknown; the workloads are {', '.join(sorted(WORKLOADS))}")
        scales = [argument.removeprefix("scale=") for argument in argv if argument.startswith("scale=")]
        rest = [argument for argument in argv if not argument.startswith(("benchmark=", "scale="))]
        if scales and command == "generate":
            rest = [*_stand_in_arguments(names[0], scales[-1]), *rest]
        package = WORKLOADS[names[0]].partition(":")[0].rpartition(".")[0]
        prepare = importlib.import_module(f"{package}.prepare")
        try:
            code: int = prepare.main(command, rest)
        except BrokenPipeError:
            raise
        except OSError as error:
            remedy = "make room and run it again" if error.errno in FULL_DISK else "see to it and run it again"
            raise DataError(f"{command}: {error}; {remedy}") from error
        return code

    return run_command


def _stand_in_arguments(benchmark: str, scale: str) -> list[str]:
    if scale not in _scales(benchmark):
        raise ConfigError(f"scale={scale}: {benchmark} has recipes for {', '.join(_scales(benchmark))}")
    recipe = OmegaConf.load(CONFIGS / "recipe" / benchmark / f"{scale}.yaml")
    arguments = OmegaConf.select(recipe, "stand_in")
    if not arguments:
        raise ConfigError(f"generate: the recipe scale={scale} of {benchmark} is not for stand-in data")
    return [str(argument) for argument in arguments]


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "list": list_workloads,
    "download": _data_command("download"),
    "generate": _data_command("generate"),
    "prepare": _data_command("prepare"),
    "verify": _data_command("verify"),
    "bench": bench,
    "doctor": _module_command("common.doctor.command"),
    "check": _module_command("common.submission.check"),
    "summarize": _module_command("common.submission.summarize"),
    "package": _module_command("common.submission.package"),
    "report": _module_command("common.observe.report.command"),
}


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration for ``overrides`` as plain containers, without Hydra's command line.

    Raises:
        ConfigError: an override is wrong.
    """
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("train", list(overrides))
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain_composition(error)) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _with_hydra(argv: list[str], task: Callable[[dict[str, Any], list[str]], int]) -> int:
    """Compose the configuration that ``argv`` says and run ``task`` with it and the arguments that compose it again.

    In a sweep these are the ones of the single job.
    """
    codes: list[int] = []
    full_error = os.environ.get(FULL_ERROR)

    def job(composed: DictConfig) -> None:
        _set_variable(FULL_ERROR, full_error)
        codes.append(0)
        try:
            tree = OmegaConf.to_container(composed, resolve=True)
            assert isinstance(tree, dict)
            chosen = HydraConfig.get()
            arguments = list(chosen.overrides.task) if chosen.mode == RunMode.MULTIRUN else argv
            if chosen.mode == RunMode.MULTIRUN and not any(text.startswith("output_dir=") for text in arguments):
                # Hydra gives all jobs of a sweep the same ${now}.
                tree["output_dir"] = f"{tree['output_dir']}-{chosen.job.num}"
            codes.append(task({str(key): value for key, value in tree.items()}, arguments))
        except OmegaConfBaseException as error:
            problem = ConfigError(str(error).splitlines()[0])
            report(problem)
            codes.append(problem.exit_code)
        except SuiteError as error:
            report(error)
            codes.append(error.exit_code)

    before = sys.argv
    sys.argv = [before[0], *argv]
    os.environ[FULL_ERROR] = "1"  # Hydra raises its errors instead of printing them over many lines
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if codes or full_error == "1":
            raise
        raise ConfigError(_explain_composition(error)) from error
    finally:
        sys.argv = before
        _set_variable(FULL_ERROR, full_error)
    return max(codes, default=0)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _explain_composition(error: Exception) -> str:
    """What was wrong with the overrides, in one line that names the key."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is no override of the form key=value; in Hydra's words: {_second_line(error)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        choices = ", ".join(error.options or ()) or "none"
        if error.missing_cfg_file.startswith("hparams/"):
            folder = CONFIGS / "hparams"
            every = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/*.yaml"))
            asked = error.missing_cfg_file.removeprefix("hparams/")
            return f"hparams={asked}: unknown; the choices are {', '.join(every)}"
        if group.startswith("recipe/"):
            benchmark = group.removeprefix("recipe/")
            return f"scale={name}: {benchmark} has no recipe for it; it has recipes for {', '.join(_scales(benchmark))}"
        return f"{group}={name}: unknown; the choices are {choices}"
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return f"{error.__cause__.full_key}: unknown configuration key; see `mlperf-suite train --cfg job`"
    return " ".join(str(error).splitlines()[:2])


def _second_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    return lines[0] if lines else "no reason given"


def _complete(argv: Sequence[str]) -> int:
    """Hydra's completion knows one program without subcommands: hide ours from it."""
    line = os.environ.get("COMP_LINE", "")
    match = re.match(r"(\S+\s+)(\S+\s)(.*)", line)
    if match is None or match[2].strip() not in ("train", "bench"):
        typed = line.split()[1] if len(line.split()) > 1 else ""
        print("\n".join(name for name in COMMANDS if name.startswith(typed)))
        return 0
    os.environ["COMP_LINE"] = match[1] + match[3]
    os.environ["COMP_POINT"] = str(max(0, int(os.environ.get("COMP_POINT", "0")) - len(match[2])))
    return _with_hydra(list(argv), lambda tree, arguments: 0)


if __name__ == "__main__":
    main()
