"""From a command line to one tree of settings: Hydra composes ``configs/`` and the overrides.

The group ``scale`` is the table ``configs/scales.yaml``. Hydra is imported by what composes: whoever only reads names
of scales waits for nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from common.config.override import quoting_hint
from common.config.strict_yaml import explain
from common.errors import ConfigError, SuiteError, print_error
from common.untrusted.variables import check_variables

if TYPE_CHECKING:
    from omegaconf import DictConfig

FULL_ERROR = "HYDRA_FULL_ERROR"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def scales_of(benchmark: str) -> list[str]:
    """The scales that ``benchmark`` has a recipe for."""
    recipes = (CONFIGS / "recipe" / benchmark).glob("*.yaml")
    return sorted({path.stem for path in recipes} & _scales().keys())


def _scales() -> dict[str, dict[str, Any]]:
    """Name of a scale to its entry in the table."""
    scales: dict[str, dict[str, Any]] = yaml.safe_load((CONFIGS / "scales.yaml").read_text())
    return scales


def _register_scales() -> None:
    """Make Hydra's group ``scale`` of the table."""
    from hydra.core.config_store import ConfigStore

    for name, entry in _scales().items():
        ConfigStore.instance().store(name, entry, group="scale", provider="scales.yaml")


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration for ``overrides`` as plain containers, without Hydra's command line.

    Raises:
        ConfigError: an override is wrong.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_variables(overrides)
    _register_scales()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra.compose("train", list(overrides), return_hydra_config=True)
        choices = composed.hydra.runtime.choices
        del composed.hydra
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain_composition(error, overrides)) from error
    return _tree(tree, choices)


def with_hydra(argv: list[str], task: Callable[[dict[str, Any], list[str]], int]) -> int:
    """Compose the configuration that ``argv`` says and run ``task`` with it and the arguments that compose it again.

    In a sweep these are the ones of the single job.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    codes: list[int] = []
    full_error = os.environ.get(FULL_ERROR)

    def job(composed: DictConfig) -> None:
        _set_variable(FULL_ERROR, full_error)
        codes.append(0)
        try:
            chosen = HydraConfig.get()
            tree = _tree(OmegaConf.to_container(composed, resolve=True), chosen.runtime.choices)
            arguments = list(chosen.overrides.task) if chosen.mode == RunMode.MULTIRUN else argv
            if chosen.mode == RunMode.MULTIRUN and not any(text.startswith("output_dir=") for text in arguments):
                # Hydra gives all jobs of a sweep the same ${now}.
                tree["output_dir"] = f"{tree['output_dir']}-{chosen.job.num}"
            codes.append(task(tree, arguments))
        except OmegaConfBaseException as error:
            problem = ConfigError(str(error).splitlines()[0])
            print_error(problem)
            codes.append(problem.exit_code)
        except SuiteError as error:
            print_error(error)
            codes.append(error.exit_code)

    check_variables(argv)
    before = sys.argv
    sys.argv = [before[0], *_flags_first(argv)]
    _register_scales()
    os.environ[FULL_ERROR] = "1"  # Hydra raises its errors instead of printing them over many lines
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        if codes or full_error == "1":
            raise
        raise ConfigError(_explain_composition(error, argv)) from error
    finally:
        sys.argv = before
        _set_variable(FULL_ERROR, full_error)
    return max(codes, default=0)


def _tree(composed: Any, choices: Mapping[str, str]) -> dict[str, Any]:
    """The composed settings, and the file of the recipe that was chosen, which the log names."""
    assert isinstance(composed, dict)
    return {
        **{str(key): value for key, value in composed.items()},
        "config_file": f"configs/recipe/{choices['recipe']}.yaml",
    }


FLAGS_WITH_VALUES = frozenset(
    ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir")
)


def _flags_first(argv: Sequence[str]) -> list[str]:
    """Return Hydra's flags, such as ``--multirun``, and then the overrides: Hydra takes no override behind a flag."""
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


def _explain_composition(error: Exception, overrides: Sequence[str]) -> str:
    """What was wrong with ``overrides``, in one line that names the key."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if isinstance(error, yaml.YAMLError):
        return explain(error)
    if isinstance(error, OverrideParseException):
        hint = quoting_hint(str(error.override))
        return f"{error.override!r} is no override of the form key=value; in Hydra's words: {_second_line(error)}{hint}"
    swept = [text for text in overrides if str(error).startswith(f"Ambiguous value for argument '{text}'")]
    if swept:
        return f"{swept[0]!r} has commas, which separate the values of a sweep (--multirun){quoting_hint(swept[0])}"
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
            return (
                f"scale={name}: {benchmark} has no recipe for it; it has recipes for {', '.join(scales_of(benchmark))}"
            )
        if group == "scale":
            return f"scale={name}: unknown; {_scales_in_words(overrides) or f'the choices are {choices}'}"
        return f"{group}={name}: unknown; the choices are {choices}"
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return f"{error.__cause__.full_key}: unknown configuration key; see `mlperf-suite train --cfg job`"
    return " ".join(str(error).splitlines()[:2])


def _scales_in_words(overrides: Sequence[str]) -> str:
    """Which scales the benchmark has that ``overrides`` name; "" if they name none that has any."""
    named = [text.removeprefix("benchmark=") for text in overrides if text.startswith("benchmark=")]
    scales = scales_of(named[-1]) if named else []
    return f"{named[-1]} has {', '.join(scales)}; `mlperf-suite list` has those of all" if scales else ""


def _second_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    return lines[0] if lines else "no reason given"
