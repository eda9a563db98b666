"""Quote paths and free text in ``key=value`` overrides, so that Hydra's grammar returns the same text.

Code that writes an override for another program calls :func:`override`. A shell script calls
``python -m common.config.override KEY VALUE``, which prints the override, or this text for ``--help``.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from common.errors import ConfigError

# A path with a slash and only these characters is the same text with and without quotes.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*")
RENAMED = {
    "reader.augment": "model.implementations.augment",
    "reader.polygon_room": "reader.polygon_capacity",
    "reader.sample": "model.implementations.sample",
    "embeddings.implementation": "model.implementations.embedding_bags",
    "stand_in": "synthetic",
}
"""Former configuration keys to their new names, where the last part of the key has changed."""
REMOVED = {
    **{
        f"model.implementations.{name}": "PyTorch alone computes this now"
        for name in ("class_entropy", "noising", "sampling", "velocity_loss", "window_sums")
    },
    "sliding_window.share": "the evaluation chooses how many ranks share a volume",
}
"""Former configuration keys, and why they have no successor."""
_TYPED = re.compile(r"(?P<key>[+~]{0,2}[A-Za-z_][\w./@:-]*)=(?P<value>.+)", re.DOTALL)


def override(key: str, value: object) -> str:
    """Return an override that sets ``key`` to the text of ``value``, which may have any characters.

    Hydra's grammar removes quotes and backslashes, and OmegaConf replaces ``${…}``. A backslash is special only before
    a quote, before ``${`` or at the end.
    """
    text = str(value)
    if _PLAIN_PATH.fullmatch(text):
        return f"{key}={text}"
    without_interpolation = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    quoted = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), without_interpolation)
    return f'{key}="{quoted}"'


def as_typed(value: object) -> str:
    """Return a plain value as command-line text: ``true``, ``null``, or ``str(value)``."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def parsed(argument: str) -> tuple[str, Any]:
    """Return key and value of an override, parsed by Hydra.

    Raises:
        ConfigError: the override does not parse; the message shows the quoted form.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found = OverridesParser.create().parse_override(argument)
        tree = OmegaConf.to_container(OmegaConf.create({"value": found.value()}), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{argument!r} is no override of the form key=value{quoting_hint(argument)}") from error
    assert isinstance(tree, dict)
    return found.key_or_group, tree["value"]


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return the end of a message about ``key``: its new name, its removal, or a similar ``known`` key; "" for none.

    Keys may be dotted. A key with the right last part in the wrong section, or in other case, is found, too.
    """
    if key in RENAMED:
        return f"; it is {RENAMED[key]} now"
    if key in REMOVED:
        return f"; remove it: {REMOVED[key]}"
    candidates = sorted(known)
    last = key.rpartition(".")[2]
    near = [name for name in candidates if name.lower() == key.lower()]
    near = near or difflib.get_close_matches(
        key, [name for name in candidates if name.rpartition(".")[2] == last], 1, 0.0
    )
    near = near or difflib.get_close_matches(key, candidates, 1, 0.7)
    if not near:
        names = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        near = [names[name] for name in difflib.get_close_matches(last, names, 1, 0.75)]
    return f"; did you mean {near[0]}?" if near else ""


def quoting_hint(argument: str) -> str:
    """Return a hint at the quoted form for bash, as the end of a message; "" if quotes would not help."""
    typed = _TYPED.fullmatch(argument)
    if typed is None or typed["value"][0] in "[{\"'":
        return ""
    value = typed["value"]
    value = os.path.expanduser(value) if value.startswith("~") else value
    return f"; to use the value as it is, quote it, in bash: {shlex.quote(override(typed['key'], value))}"


if __name__ == "__main__":
    print(__doc__ if sys.argv[1:] == ["--help"] else override(*sys.argv[1:]))
