"""Pytest plugin ``-p tests.shifted_clock``: tests are collected as if it were one day later.

It replaces the functions for the time of day before the first test module is imported. Timers (``time.monotonic``,
``time.perf_counter``) do not change. Installed packages keep the original class ``datetime.datetime``, because compiled
ones (pandas) derive classes from it.
"""

from __future__ import annotations

import datetime
import sys
import sysconfig
import time
import types
from collections.abc import Callable
from typing import Any

DAY = datetime.timedelta(days=1)
_INSTALLED = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_real_time, _real_time_ns, _real_datetime = time.time, time.time_ns, datetime.datetime


class _AnyDatetime(type):
    """Instances of the original class, which C code still makes, count as instances of the replacement."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real_datetime)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _real_datetime)


class _Datetime(_real_datetime, metaclass=_AnyDatetime):
    """``datetime.datetime`` whose ``today`` calls ``time.time``."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Datetime:
        return super().now(tz) + DAY

    @classmethod
    def utcnow(cls) -> _Datetime:
        return super().utcnow() + DAY


class _DatetimeModule(types.ModuleType):
    """The module ``datetime``, with the replacement for code that is not installed."""

    @property
    def datetime(self) -> type[_real_datetime]:
        return _real_datetime if sys._getframe(1).f_code.co_filename.startswith(_INSTALLED) else _Datetime


def _of_seconds(function: Callable[[float], Any]) -> Callable[..., Any]:
    """Return a function of seconds since 1970 whose default is the shifted time."""
    return lambda seconds=None: function(time.time() if seconds is None else seconds)


def _of_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose last argument is a ``struct_time``, by default the shifted local time."""
    count = 1 if function is time.asctime else 2
    return lambda *arguments: function(*arguments, *(() if len(arguments) == count else (time.localtime(),)))


_Datetime.__name__ = "datetime"
time.time = lambda: _real_time() + DAY.total_seconds()
time.time_ns = lambda: _real_time_ns() + DAY // datetime.timedelta(microseconds=1) * 1000
for _function in (time.localtime, time.gmtime, time.ctime):
    setattr(time, _function.__name__, _of_seconds(_function))
for _function in (time.asctime, time.strftime):
    setattr(time, _function.__name__, _of_fields(_function))
datetime.__class__ = _DatetimeModule
