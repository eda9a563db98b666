"""YAML files that users write, read with one message for every mistake.

PyYAML keeps the last of two equal keys and says nothing. OmegaConf, which reads ``configs/``, refuses them, and so does
:func:`load_yaml`.
"""

from __future__ import annotations

from typing import Any

import yaml

from common.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader``, but a key that is given twice in one mapping is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in known:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value[:80]!r} is given twice; remove one", problem_mark=key.start_mark
                )
            known.add((key.tag, key.value))
        return node


def load_yaml(text: str, origin: str) -> Any:
    """Return the content of ``text`` as plain Python values.

    Args:
        text: the YAML.
        origin: file or option, for messages.

    Raises:
        ConfigError: the text is no valid YAML, or gives a key twice; the message names the line.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(explain(error, origin)) from error  # PyYAML's constructors raise all of these


def explain(error: Exception, origin: str | None = None) -> str:
    """Return file, line and problem of an error of PyYAML in one sentence; ``origin`` replaces the name of the file."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{origin}: is no valid YAML: {error}"
    mark = error.problem_mark
    return f"{origin or mark.name}, line {mark.line + 1}: is no valid YAML: {error.problem or error.context}"
