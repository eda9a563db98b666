"""Build and check ``systems/<system>.json`` from the facts that `doctor` found on the nodes and the submission's YAML.

Every value is text, because the checkers join fields as text and crash on numbers. If a fact differs between nodes,
that is an error, unless the YAML gives the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from common.mlperf.refusals import Refusal
from common.submission.settings import SystemSettings
from common.submission.tree_agreement import count_of, read_object

FIELDS = (
    "submitter",
    "division",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_model_name",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_memory_capacity",
    "host_memory_configuration",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "framework",
    "other_software_stack",
    "operating_system",
    "sw_notes",
)
"""Fields that the system description checker requires. It accepts empty text."""

DIVISIONS = ("closed", "open")
_UNANSWERED = (
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_interconnect_topology",
    "hw_notes",
    "sw_notes",
)
"""Fields that may be empty by the table of the submission rules. One of the first two must have an answer."""

_JOINED = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
)
"""Fields that the system description checker joins as text. It crashes on any other type."""

REPORT_BYTES = 64 * 2**20
"""Largest size in bytes of a `doctor` file; enough for thousands of nodes."""
_PER_NODE = ("accelerators_per_node", "host_processors_per_node")
_NEGATIVE = re.compile(r"\s*[-\u2212]\s*\d")
_OWN = ("submitter", "division", "status", "system_name")
_SOFTWARE = "other_software_stack"
_NOTES = ("hw_notes", "sw_notes")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Description:
    """A system description, with notes on fields that are empty."""

    fields: dict[str, Any]
    notes: tuple[str, ...]


def division_of(fields: Mapping[str, Any]) -> str:
    """Return the division in lower case, as the package checker needs it. The example in the rules has ``Closed``."""
    return str(fields.get("division")).casefold()


def description_refusals(fields: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a refusal for each value that the rules or the system description checker forbid, or that is impossible."""
    for name in _JOINED:
        if name in fields and not isinstance(fields[name], str):
            text = f"{name} is {_shown(fields[name])}: write text, {json.dumps(str(fields[name]))[:80]}"
            yield Refusal("description-wrong", text)
    if division_of(fields) not in DIVISIONS:
        text = f"division is {str(fields.get('division'))[:80]!r}, not closed or open"
        yield Refusal("description-wrong", text)
    nodes = fields.get("number_of_nodes", "")
    if nodes != "" and not (count_of(nodes) or 0) > 0:
        text = f'number_of_nodes is {_shown(nodes)}: write a plain decimal number of at least 1, such as "8"'
        yield Refusal("description-count", text)
    for name in _PER_NODE:
        if _NEGATIVE.match(str(fields.get(name))):
            text = f'{name} is {_shown(fields[name])}: write a number of at least 0, such as "8"'
            yield Refusal("description-count", text)


def description_remarks(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on unusual values in a description. They do not forbid anything."""
    for name, value in fields.items():
        if not isinstance(value, str) and name not in (*_JOINED, _SOFTWARE):
            yield f"{name[:80]} is {_shown(value)}, which is no text"
    if fields.get("division") != division_of(fields) in DIVISIONS:
        yield f"division is {_shown(fields['division'])}; the package checker was shown {division_of(fields)!r}"
    accelerators = fields.get("accelerators_per_node", "")
    if accelerators != "" and count_of(accelerators) is None:
        yield f"accelerators_per_node is {_shown(accelerators)}, no plain number: it is not compared with the logs"
    empty = [name for name in FIELDS if fields.get(name) in ("", {}) and name not in _UNANSWERED]
    if count_of(accelerators) == 0:
        empty = [name for name in empty if not name.startswith("accelerator_")]
    if not fields.get("host_processor_core_count") and not fields.get("host_processor_vcpu_count"):
        empty.append("host_processor_core_count")
    if empty:
        yield f"{', '.join(empty)} left empty: the submission rules ask for a meaningful answer"


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def describe(name: str, system: SystemSettings, submitter: str, doctors: Sequence[Path]) -> Description:
    """Return the description of one system.

    Args:
        doctors: files in which `doctor` described the nodes, one per series; may be empty.

    Raises:
        ConfigError: a field in the YAML is unknown or not text, or the number of nodes is not known.
        DataError: a `doctor` file is damaged, or nodes or series differ.
    """
    where = f"systems.{name}.fields"
    _check_fields(where, system.fields)
    nodes = {f"{path.name}: {host}": facts for path in doctors for host, facts in _nodes(path).items()}
    counts = {path: str(len(_nodes(path))) for path in doctors}
    found = _common_facts(nodes, system.fields)
    number = system.fields.get("number_of_nodes") or _same_count(name, counts)
    fields: dict[str, Any] = {
        **dict.fromkeys(FIELDS, ""),
        **found,
        **system.fields,
        _SOFTWARE: {**found.get(_SOFTWARE, {}), **system.fields.get(_SOFTWARE, {})},
        "submitter": submitter,
        "division": system.division,
        "status": system.status,
        "system_name": system.system_name,
        "number_of_nodes": number,
    }
    empty = [field for field in FIELDS if not fields[field] and field not in (*_NOTES, *_OWN)]
    notes = [f"systems/{name}.json: {', '.join(empty)} left empty; fill in under {where}"] if empty else []
    if not system.system_name:
        notes.append(f"systems/{name}.json: system_name is empty; fill in systems.{name}.system_name")
    if not doctors:
        notes.append(f"systems/{name}.json: no file of `doctor` was found; nothing in it was measured")
    return Description(fields, tuple(notes))


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    for field, value in fields.items():
        if field in _OWN:
            raise ConfigError(f"{where}.{field}: is not set here, but beside fields")
        if field == _SOFTWARE:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}.{field}: expected a section of names and versions, got {value!r}")
            _check_text(f"{where}.{field}", value)
        elif field in FIELDS or field == "framework_name":
            _check_text(where, {field: value})
        else:
            raise ConfigError(f"{where}.{field}: no field of a system description; they are {', '.join(FIELDS)}")


def _check_text(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.{name}={value}: fields are text: write {json.dumps(str(value))} in quotes")


def _nodes(path: Path) -> dict[str, Facts]:
    """Return the facts of each host from one `doctor` file."""
    nodes = read_object(path, REPORT_BYTES).get("nodes")
    if not isinstance(nodes, dict) or not all(
        isinstance(node, dict) and isinstance(node.get("facts"), dict) for node in nodes.values()
    ):
        raise DataError(f"{path}: is no file of `doctor`: it has no facts of nodes")
    nodes = {host: node["facts"] for host, node in nodes.items()}
    if not nodes:
        raise DataError(f"{path}: has no nodes")
    for host, facts in nodes.items():
        software = facts.get(_SOFTWARE, {})
        plain = {name: value for name, value in facts.items() if name != _SOFTWARE}
        wrong = [n for n, v in {**plain, **(software if isinstance(software, dict) else {_SOFTWARE: software})}.items()
                 if not isinstance(v, str)]  # fmt: skip
        if wrong:
            raise DataError(f"{path}: {wrong[0]} of {host} is not text")
    return nodes


def _common_facts(nodes: Mapping[str, Facts], fields: Mapping[str, Any]) -> Facts:
    """Return the facts that all nodes share. ``fields``, which the submission states, are not compared."""
    if not nodes:
        return {}
    flat = {node: _flat(facts) for node, facts in nodes.items()}
    stated = {(field,) for field in fields if field != _SOFTWARE} | {
        (_SOFTWARE, name) for name in fields.get(_SOFTWARE, {})
    }
    common: Facts = {_SOFTWARE: {}}
    differences = []
    for key in dict.fromkeys(key for facts in flat.values() for key in facts):
        values: dict[str, str] = {}
        for node, facts in flat.items():
            values.setdefault(facts.get(key, ""), node)
        if key not in stated and len(values) > 1:
            listed = ", ".join(f"{value!r} on {node}" for value, node in values.items())
            differences.append(f"{'.'.join(key)} is {listed}")
        target = common[_SOFTWARE] if len(key) == 2 else common
        target[key[-1]] = next(iter(values))
    if differences:
        raise DataError(
            "the nodes of a system must be alike, these are not:\n  " + "\n  ".join(differences)
            + "\nLaunch on like nodes, or say in the submission's fields what is right"
        )  # fmt: skip
    return common


def _flat(facts: Facts) -> dict[tuple[str, ...], str]:
    """Return facts with keys (field,), and entries of the software stack with keys (field, name)."""
    flat: dict[tuple[str, ...], str] = {}
    for name, value in facts.items():
        if name == _SOFTWARE:
            flat |= {(name, entry): version for entry, version in value.items()}
        elif name in FIELDS:
            flat[(name,)] = value
    return flat


def _same_count(name: str, counts: Mapping[Path, str]) -> str:
    if not counts:
        raise ConfigError(
            f"systems.{name}: there is no file of `doctor` to take the nodes from; give number_of_nodes and the other "
            f"facts under fields, or name the file under results (doctor)"
        )
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} in {path}" for path, count in counts.items())
        raise DataError(f"systems.{name}: the results are of different numbers of nodes: {listed}")
    return next(iter(counts.values()))
