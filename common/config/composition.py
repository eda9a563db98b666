"""Compose one tree of settings from ``configs/`` and command-line overrides, with Hydra.

Functions import Hydra only when they need it, so that reading the names of scales stays fast.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from common.config.override import did_you_mean, parsed, quoting_hint
from common.config.yaml_files import CONFIGS, entry_names, explain, workload_file
from common.errors import ConfigError, SuiteError, print_error
from common.untrusted.variables import check_variables

if TYPE_CHECKING:
    from hydra.conf import HydraConf
    from hydra.errors import MissingConfigException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

FULL_ERROR = "HYDRA_FULL_ERROR"
GROUPS = ("benchmark=", "scale=", "system=", "hparams=")
"""How overrides that choose a file of `configs/`, or an entry of one, begin."""


def scales_of(benchmark: str) -> list[str]:
    """Return the names of scales for which ``benchmark`` has a recipe, sorted."""
    return entry_names(workload_file("recipe", benchmark), "scales")


def _sets_of(benchmark: str) -> list[str]:
    """Return the choices of the group ``hparams`` for ``benchmark``, sorted."""
    names = entry_names(workload_file("hparams", benchmark), "sets")
    return [f"{benchmark}/{name}" for name in names]


def completions(overrides: Sequence[str]) -> list[str] | None:
    """Return completions of the last override, if its group's choices depend on the benchmark.

    For other groups and keys return None; Hydra completes them.
    """
    group, equals, begun = overrides[-1].partition("=") if overrides else ("", "", "")
    benchmark = _benchmark(overrides)
    choices = {"scale": scales_of(benchmark), "hparams": _sets_of(benchmark)}
    if not equals or group not in choices:
        return None
    return [f"{group}={name}" for name in choices[group] if name.startswith(begun)]


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed configuration for ``overrides`` as plain containers, without Hydra's command line.

    Raises:
        ConfigError: an override is wrong.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from common.config.workload_files import serve_groups

    check_variables(overrides)
    serve_groups()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("train", list(overrides), return_hydra_config=True)
        choices = composed.hydra.runtime.choices
        del composed.hydra
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain_composition(error, overrides)) from error
    return _tree(tree, choices)


def settings_help(command: str, overrides: Sequence[str]) -> str:
    """Return the help text of ``command``: groups, settings of ``configs/train.yaml``, and settings of the benchmark.

    Raises:
        ConfigError: an override is wrong.
    """
    from omegaconf import OmegaConf

    tree = compose([text for text in overrides if "=" in text and not text.startswith("-")])
    name = tree["benchmark"]["name"]
    text = (CONFIGS / "train.yaml").read_text()
    shared = text[text.index("data_dir:") : text.index("hydra:")].strip()
    own = {key: value for key, value in tree.items() if key not in (*yaml.safe_load(shared), "recipe")}
    return f"""usage: mlperf-suite {command} [KEY=VALUE ...]

Groups (files below configs/). Each sets many of the settings below; a setting on the command line overrides it.
benchmark: {", ".join(path.stem for path in sorted((CONFIGS / "benchmark").glob("*.yaml")))}
scale: {", ".join(scales_of(name))} (for {name}; for all benchmarks: `mlperf-suite list`)
system: {", ".join(path.stem for path in sorted((CONFIGS / "system").glob("*.yaml")))}
hparams: {", ".join(_sets_of(name))}

Settings and their defaults. The recipe of a benchmark may change them:

{shared}

Settings of {name}, with the values of this command line; benchmarks/{name}/README.md explains them:

{OmegaConf.to_yaml(OmegaConf.create(own)).strip()}

Flags: --cfg job prints the configuration and runs nothing. --multirun (-m) runs once for each of several values, which
commas separate. --hydra-help lists the other flags.
"""


def with_hydra(argv: list[str], task: Callable[[dict[str, Any], list[str]], int]) -> int:
    """Compose the configuration from ``argv`` and run ``task(tree, arguments)``. Return the largest exit code.

    ``arguments`` compose the same configuration again; in a sweep, those of the single job.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from common.config.workload_files import serve_groups

    codes: list[int] = []
    failures: list[OSError] = []
    full_error = os.environ.get(FULL_ERROR)

    def job(composed: DictConfig) -> None:
        _set_variable(FULL_ERROR, full_error)
        codes.append(0)
        try:
            chosen = HydraConfig.get()
            tree = _tree(OmegaConf.to_container(composed, resolve=True), chosen.runtime.choices)
            folders = [source.path for source in chosen.runtime.config_sources if source.provider == "command-line"]
            of_a_job = [*(f"--config-dir={folder}" for folder in folders), *chosen.overrides.task]
            arguments = of_a_job if chosen.mode == RunMode.MULTIRUN else argv
            if chosen.mode == RunMode.MULTIRUN and not any(text.startswith("output_dir=") for text in arguments):
                # All jobs of a sweep get the same ${now} from Hydra.
                tree["output_dir"] = f"{tree['output_dir']}-{chosen.job.num}"
            codes.append(task(tree, arguments))
        except OmegaConfBaseException as error:
            problem = ConfigError(_explain_interpolation(error))
            print_error(problem)
            codes.append(problem.exit_code)
        except SuiteError as error:
            print_error(_with_origin(error, chosen) if isinstance(error, ConfigError) else error)
            codes.append(error.exit_code)
        except OSError as error:  # such as a pipe that nobody reads any more; Hydra would print a traceback
            failures.append(error)

    check_variables(argv)
    before = sys.argv
    sys.argv = [before[0], *_flags_first(argv)]
    serve_groups()
    os.environ[FULL_ERROR] = "1"  # makes Hydra raise its errors instead of printing them over many lines
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        if codes or full_error == "1":
            raise
        raise ConfigError(_explain_composition(error, argv)) from error
    finally:
        sys.argv = before
        _set_variable(FULL_ERROR, full_error)
    if failures:
        raise failures[0]
    return max(codes, default=0)


def _with_origin(error: ConfigError, chosen: HydraConf) -> ConfigError:
    """Return an error about a setting with the file that sets it; ``error`` itself if the command line or none does."""
    from common.config.workload_files import WorkloadFiles

    setting = re.match(r"([\w.]+)[=:]", str(error))
    key = "" if setting is None else setting[1]
    names = {text.partition("=")[0].lstrip("+~") for text in chosen.overrides.task} - set(chosen.runtime.choices)
    if not key or any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in names):
        return error
    folders = [
        WorkloadFiles(source.provider, f"file://{source.path}")
        for source in chosen.runtime.config_sources
        if source.schema == "file"
    ]
    for group in ("recipe", "hparams"):
        if group not in chosen.runtime.choices:  # a recipe need not choose a set of hyperparameters
            continue
        path = f"{group}/{chosen.runtime.choices[group]}"
        inner = key if group == "recipe" else key.removeprefix("hparams.")
        folder = next((folder for folder in folders if folder.is_config(path)), None)
        file = None if folder is None else folder.origin(path, inner)
        if file is not None:
            return ConfigError(f"{error}; {file} sets {key}")
    return error


def _tree(composed: Any, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the composed settings together with the name of the chosen recipe, for the log."""
    assert isinstance(composed, dict)
    return {**{str(key): value for key, value in composed.items()}, "recipe": choices["recipe"]}


FLAGS_WITH_VALUES = frozenset(
    ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")
)


def _flags_first(argv: Sequence[str]) -> list[str]:
    """Return Hydra's flags, such as ``--multirun``, before the overrides: Hydra accepts no override after a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *argv], argv, strict=False):
        is_override = not argument.startswith("-") and before not in FLAGS_WITH_VALUES
        (overrides if is_override and (argument.startswith("~") or "=" in argument) else flags).append(argument)
    return [*flags, *overrides]


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _explain_interpolation(error: OmegaConfBaseException) -> str:
    """Describe a value that cannot be resolved, in one line: key, OmegaConf's message, environment variables."""
    words = str(error).splitlines()[0]
    parent: Any = error.parent_node
    if not error.full_key or parent is None:
        return words
    raw = parent._get_node(error.key)  # OmegaConf's public access would resolve the value
    names = re.findall(r"oc\.env:(\w+)", str(raw._value()))
    given = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
    return f"{error.full_key}: {words}" + (f"; correct or unset {', '.join(given)}" if given else "")


def _explain_composition(error: Exception, overrides: Sequence[str]) -> str:
    """Describe what is wrong with ``overrides``, in one line that names the key."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError

    if isinstance(error, yaml.YAMLError):
        return explain(error)
    if isinstance(error, GrammarParseError):
        return _explain_interpolation(error)
    if isinstance(error, OverrideParseException):
        hint = quoting_hint(str(error.override))
        return f"{error.override!r} is no override of the form key=value; in Hydra's words: {_second_line(error)}{hint}"
    swept = [text for text in overrides if str(error).startswith(f"Ambiguous value for argument '{text}'")]
    if swept:
        return f"{swept[0]!r} has commas, which separate the values of a sweep (--multirun){quoting_hint(swept[0])}"
    unnamed = [text for text in overrides if text.startswith(GROUPS) and not isinstance(_value(text), str | list)]
    if unnamed and str(error).startswith("Config group override must be a string"):
        return f"{unnamed[0]}: expected the name of a choice; `mlperf-suite train --help` lists the choices"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _unknown_choice(error.missing_cfg_file, error, overrides)
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(str(error.__cause__.full_key), overrides)
    if deleted := re.match(r"Could not delete from config\. '(.+)' does not exist", str(error)):
        return _unknown_key(deleted[1], overrides)
    return " ".join(str(error).splitlines()[:2])


def _value(text: str) -> object:
    """Return the value of an override that parses; "" for other text."""
    try:
        return parsed(text)[1]
    except ConfigError:
        return ""


def _unknown_choice(asked: str, error: MissingConfigException, overrides: Sequence[str]) -> str:
    """Return the message about ``asked``, a choice of a group, with those of the benchmark and the most similar one."""
    group, _, name = asked.rpartition("/")
    benchmark = _benchmark(overrides)
    known, others, words = list(error.options or ()), "", "the choices are"
    if asked.startswith("hparams/"):
        group, name, known, words = "hparams", asked.removeprefix("hparams/"), _sets_of(benchmark), f"{benchmark} has"
        scale = re.match(r"In 'recipe/(\w+)/([^']+)'", str(error))
        if scale is not None and not any(text.startswith("hparams=") for text in overrides):
            group = f"recipe/{scale[1]}.yaml: {scale[2]}.hparams_set"
    elif group == "scale" or group.startswith("recipe/"):
        group = "scale"
        if scales := scales_of(benchmark):
            known, others, words = scales, "; `mlperf-suite list` has those of all", f"{benchmark} has"
    return f"{group}={name}: unknown; {words} {', '.join(known) or 'none'}{others}{did_you_mean(name, known)}"


def _unknown_key(key: str, overrides: Sequence[str]) -> str:
    """Return the message about an unknown key, with the most similar known key."""
    groups = [text for text in overrides if text.startswith(GROUPS)]
    try:
        known = set(_keys(compose(groups), ""))
    except ConfigError:  # the groups are wrong, too: only the settings shared by all workloads are known
        known = set(_keys(yaml.safe_load((CONFIGS / "train.yaml").read_text()), ""))
    return f"{key}: unknown configuration key{did_you_mean(key, known) or '; see `mlperf-suite train --cfg job`'}"


def _keys(tree: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{path}{name}.")


def _benchmark(overrides: Sequence[str]) -> str:
    """Return the last benchmark named in ``overrides``, or the default of ``configs/train.yaml``."""
    named = [text.removeprefix("benchmark=") for text in overrides if text.startswith("benchmark=")]
    return named[-1] if named else "resnet"


def _second_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    return lines[0] if lines else "no reason given"
