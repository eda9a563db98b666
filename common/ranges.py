"""Ranges of configuration values, checked where the values are: in a dataclass's ``__post_init__``."""

from __future__ import annotations

from common.errors import ConfigError


def require(section: str, values: object, **ranges: tuple[bool, str]) -> None:
    """Refuse the first value that is out of its range.

    Args:
        section: path of ``values`` in the configuration, such as ``benchmark.facts``.
        values: what holds the attributes.
        ranges: name of an attribute to whether it is in its range, and what is needed.

    Raises:
        ConfigError: naming section, attribute, value and what is needed.
    """
    for name, (holds, needed) in ranges.items():
        if not holds:
            raise ConfigError(f"{section}.{name}={getattr(values, name)}: {needed}")
