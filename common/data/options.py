"""Options of a data command: the annotated parameters of its function, or the fields of its options class.

``vocabulary: Annotated[int, Option("pieces of the tokenizer", least=1)] = 1024`` declares ``--vocabulary``, its type,
default and help, and the check of its value. A parameter whose type is a dataclass has one option per field.

=====================================  =====================================
type of a parameter                    on the command line
=====================================  =====================================
``bool``                               a flag
``Path``                               a path; ``~`` is the home directory
``Literal``                            one of the choices
``tuple[int, int]``                    two values
``tuple[int, ...]``, ``Sequence``      one or more values
``list``                               an option that can be repeated
=====================================  =====================================

``X | None`` is parsed like ``X``. A parameter without a default is required.
"""

from __future__ import annotations

import inspect
import math
import os
import types
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from common.errors import ConfigError

REQUIRED = inspect.Parameter.empty
"""Default of a parameter that must be given."""


@dataclass(frozen=True)
class Option:
    """Annotation of a parameter: what its name, type and default do not say.

    Attributes:
        help: text for ``--help``, to which the default is appended.
        name: name on the command line; by default the parameter's name with dashes.
        parse: converts the text of the value; by default, the type does.
        metavar: placeholder of the value, or of each value, in the help.
        least, most: range of the value, or of each of several values; both ends are allowed. None is always allowed.
    """

    help: str = ""
    name: str = ""
    choices: Collection[str] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | tuple[str, ...] | None = None
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function or a field of an options class.

    Attributes:
        kind: type, without None.
        default: default value, or ``REQUIRED``.
    """

    name: str
    kind: Any
    default: Any
    option: Option = Option()

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.option.name or f"--{self.name.replace('_', '-')}"

    def add_to(self, parser: ArgumentParser) -> None:
        """Add the option to ``parser``."""
        about: dict[str, Any] = {"dest": self.name, "help": self._help().replace("%", "%%")}  # argparse formats it
        about |= {"required": True} if self.default is REQUIRED else {"default": self.default}
        if self.kind is bool:
            parser.add_argument(self.flag, action="store_true", **about)
            return
        origin, entries = get_origin(self.kind), get_args(self.kind)
        kind = entries[0] if entries else self.kind
        about["type"] = self.option.parse or (_path if kind is Path else kind)
        if choices := self._choices():
            about |= {"choices": choices, "type": str}
        elif origin is list:
            about["action"] = "append"
        elif entries and self.option.parse is None:
            fixed = origin is tuple and entries[-1] is not Ellipsis
            about["nargs"] = len(entries) if fixed else "+"
        parser.add_argument(self.flag, metavar=self.option.metavar, **about)

    def check(self, value: Any) -> None:
        """Check that a value is allowed.

        Raises:
            ConfigError: naming the option, the value and the allowed values.
        """
        choices, least, most = self._choices(), self.option.least, self.option.most
        if value is None:
            return
        if choices and value not in choices:
            raise ConfigError(f"{self.flag}={value}: one of {', '.join(choices)}")
        values = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(each) for each in values if isinstance(each, float)):
            raise ConfigError(f"{self.flag}={value}: a finite number")
        if (least, most) != (-math.inf, math.inf) and not all(least <= each <= most for each in values):
            shown = " ".join(map(str, values))
            needed = f"{least} to {most}" if most < math.inf else f"at least {least}"
            raise ConfigError(f"{self.flag}={shown}: {needed}")

    def _choices(self) -> list[str]:
        return list(self.option.choices or (get_args(self.kind) if get_origin(self.kind) is Literal else ()))

    def _help(self) -> str:
        if isinstance(self.default, (bool, type(None))) or self.default in ("", REQUIRED) or is_dataclass(self.default):
            return self.option.help
        separator = " " if self.option.parse is None else ","
        shown = separator.join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return f"{self.option.help} (default {shown})".lstrip()


class Options:
    """Base of options classes, which are dataclasses. Objects with a value out of its range cannot be made."""

    def __post_init__(self) -> None:
        for parameter in parameters_of(type(self)):
            parameter.check(getattr(self, parameter.name))


def parameters_of(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of a function, or the fields of a dataclass."""
    hints = get_type_hints(function, include_extras=True)
    for name, declared in inspect.signature(function).parameters.items():
        if declared.kind is not inspect.Parameter.VAR_KEYWORD:
            kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
            if get_origin(kind) in (Union, types.UnionType):
                (kind,) = (part for part in get_args(kind) if part is not type(None))
            option = next((mark for mark in marks if isinstance(mark, Option)), Option())
            yield Parameter(name, kind, declared.default, option)


def options_of(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the options of a function: its parameters, with the fields in place of a dataclass."""
    for parameter in parameters_of(function):
        yield from parameters_of(parameter.kind) if _is_class(parameter) else (parameter,)


def parse(parser: ArgumentParser, options: Sequence[Parameter], argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options by name, and the arguments that are no options.

    Raises:
        ConfigError: a value is out of its range.
    """
    for option in options:
        option.add_to(parser)
    found, strays = parser.parse_known_args(argv)
    values = vars(found)
    for option in options:
        value = values[option.name]
        values[option.name] = tuple(value) if isinstance(value, list) and get_origin(option.kind) is not list else value
        option.check(values[option.name])
    return values, strays


def call(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call ``function`` with the values of its options, by name.

    Raises:
        ConfigError: the values are inconsistent.
    """
    arguments = {}
    for parameter in parameters_of(function):
        if _is_class(parameter):
            fields = (field.name for field in parameters_of(parameter.kind))
            arguments[parameter.name] = parameter.kind(**{name: values[name] for name in fields})
        else:
            arguments[parameter.name] = values[parameter.name]
    return function(**arguments)


def comma_separated(text: str) -> tuple[int, ...]:
    """Parse text such as ``96,160``."""
    return tuple(int(part) for part in text.split(","))


def _path(text: str) -> Path:
    """Return a path with a name. ``~`` is the home directory, because shells do not replace it behind ``--option=``."""
    path = Path(os.path.expanduser(text))
    if path.name in ("", ".."):
        path = Path(os.path.abspath(path))  # a folder beside ``.`` needs its name
    if not text or not path.name:
        raise ArgumentTypeError(f"{text!r} is no path of a file or folder below the root")
    return path


def _is_class(parameter: Parameter) -> bool:
    """Whether a parameter of a function is an options class."""
    return parameter.option == Option() and is_dataclass(parameter.kind)
