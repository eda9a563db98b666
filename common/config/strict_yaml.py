"""Read YAML files that users write, and report every mistake in one sentence.

PyYAML silently keeps the last of two equal keys. OmegaConf (for ``configs/``) and :func:`load_yaml` reject them.
"""

from __future__ import annotations

from typing import Any

import yaml

from common.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that rejects duplicate keys in a mapping."""

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
        origin: file or option that the text comes from, for messages.

    Raises:
        ConfigError: the text is not valid YAML or has a duplicate key; the message names the line.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(explain(error, origin)) from error  # PyYAML's constructors raise all of these


def explain(error: Exception, origin: str | None = None) -> str:
    """Return file, line and problem of a PyYAML error in one sentence. ``origin`` replaces the file name."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{origin}: is no valid YAML: {error}"
    mark = error.problem_mark
    return f"{origin or mark.name}, line {mark.line + 1}: is no valid YAML: {error.problem or error.context}"
