"""Turn the results of all ranks into units, findings and the JSON document, on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from common.doctor.examine import Report
from common.doctor.findings import Finding, MeasuredUnit, find, join_names
from common.doctor.findings_table import count_checks
from common.doctor.host import suite_version
from common.doctor.limits import Limits
from common.doctor.reading import Reading, Readings


@dataclass(frozen=True)
class Rank:
    """Identity of a rank, which it sends before any check can fail.

    Attributes:
        node, name: index and name of the machine.
        device: ``cuda`` or ``cpu``.
    """

    rank: int
    local_rank: int
    node: int
    name: str
    device: str

    @property
    def where(self) -> str:
        """Name of the rank's GPU in messages; without a GPU, name of its machine."""
        return f"{self.name} GPU {self.local_rank}" if self.device == "cuda" else self.name


@dataclass(frozen=True)
class Together:
    """Results of one rank's measurements with other ranks.

    Attributes:
        failed: message if a measurement failed or hangs; else empty.
    """

    node: Readings = field(default_factory=dict)
    job: Readings = field(default_factory=dict)
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the results as a JSON object, for the store."""
        figures = {"node": self.node, "job": self.job}
        return {
            "failed": self.failed,
            **{scope: {name: reading.to_json() for name, reading in found.items()} for scope, found in figures.items()},
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Together:
        """Return the results from the output of :meth:`to_json`."""
        node, job = (
            {name: Reading.from_json(value) for name, value in entry[scope].items()} for scope in ("node", "job")
        )
        return cls(node, job, entry["failed"])


@dataclass(frozen=True)
class Results:
    """Results of all ranks, in the order of the ranks; None for a rank that did not answer.

    Attributes:
        reports: results of the checks of single ranks.
        together: results of the measurements with other ranks.
        offsets: seconds that the clock of each node after the first is ahead of the first node's clock; empty if not
            measured.
        why_alone: reason why no measurements with other ranks were made; empty if they were.
        timeout_seconds: longest wait for an answer.
    """

    ranks: Sequence[Rank | None]
    reports: Sequence[Report | None]
    together: Sequence[Together | None]
    offsets: Sequence[float]
    why_alone: str
    timeout_seconds: float


def with_own_names(ranks: Sequence[Rank | None]) -> list[Rank | None]:
    """Return the ranks; if several machines have the same name, their index is appended to it."""
    nodes: dict[str, set[int]] = {}
    for rank in ranks:
        if rank is not None:
            nodes.setdefault(rank.name, set()).add(rank.node)
    return [
        replace(rank, name=f"{rank.name}/{rank.node}") if rank and len(nodes[rank.name]) > 1 else rank for rank in ranks
    ]


def ranks_by_node(ranks: Sequence[Rank | None]) -> list[list[int]]:
    """Return the known ranks of each machine, in the order of the machines."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        if rank is not None:
            nodes.setdefault(rank.node, []).append(rank.rank)
    return [sorted(nodes[node]) for node in sorted(nodes)]


def why_alone(ranks: Sequence[Rank | None], reports: Sequence[Report | None]) -> str:
    """Return the reason why measurements over all ranks are impossible; empty if they are possible."""
    if len(ranks) == 1:
        return "this is the only rank"
    if None in ranks or None in reports:
        return "a rank does not answer"
    if len({rank.device for rank in ranks if rank}) > 1:
        return "some ranks have no GPU that can be used"
    return ""


def units_of(results: Results) -> list[MeasuredUnit]:
    """Return the units: nodes, then GPUs in the order of their ranks, then the job if it has readings."""
    nodes, job = [], dict[str, Reading]()
    for index, members in enumerate(ranks_by_node(results.ranks)):
        readings: Readings = {}
        for number in members:
            report, measured = results.reports[number], results.together[number]
            readings |= report.node if report else {}
            readings |= measured.node if measured else {}
            job |= measured.job if measured else {}
        readings["gpus"] = _gpus([rank for number in members if (rank := results.ranks[number])], results.reports)
        copies = [report.host_copy_gbs for number in members if (report := results.reports[number])]
        rates = [rate for rate in copies if rate is not None]
        if rates and len(rates) == len(members):
            readings["memory_bandwidth_gbs"] = Reading(sum(rates))
        if 0 < index <= len(results.offsets):
            readings["clock_offset_ms"] = Reading(1000 * results.offsets[index - 1])
        first = results.ranks[members[0]]
        assert first is not None
        nodes.append(MeasuredUnit("node", first.name, readings))
    gpus = [
        MeasuredUnit("gpu", rank.where, report.gpu, report.model)
        for rank, report in zip(results.ranks, results.reports, strict=True)
        if rank and report and report.gpu
    ]
    return [*nodes, *gpus, *([MeasuredUnit("job", "all ranks", job)] if job else [])]


def findings_of(
    results: Results, units: Sequence[MeasuredUnit], limits: Limits, checks: frozenset[str]
) -> list[Finding]:
    """Return all findings; those that make the machines unfit come first.

    Args:
        units: result of :func:`units_of`.
        checks: names of the requested checks. Those that were not made give findings too.
    """
    found = [*_silent(results), *_stuck(results), *find(units, limits), *_left_out(results, checks)]
    return sorted(found, key=lambda finding: not finding.unfit)


def document(
    results: Results, units: Sequence[MeasuredUnit], findings: Sequence[Finding], system: str
) -> dict[str, Any]:
    """Return the content of the JSON file: facts and readings of nodes, ranks and the job, and all findings.

    Args:
        system: name of the system whose limits were used.
    """

    def figures(scope: str, where: str) -> dict[str, Any]:
        found = [unit.readings for unit in units if (unit.scope, unit.where) == (scope, where)]
        return {name: reading.to_json() for readings in found for name, reading in readings.items()}

    nodes: dict[str, Any] = {}
    ranks = []
    for number, (rank, report) in enumerate(zip(results.ranks, results.reports, strict=True)):
        if rank is not None:
            node = nodes.setdefault(rank.name, {"facts": {}, "measurements": figures("node", rank.name)})
            node["facts"] |= report.facts if report else {}
        ranks.append(
            {
                "rank": number,
                "local_rank": rank.local_rank if rank else None,
                "node": rank.name if rank else None,
                "gpu": report.model if report else "",
                "bus_id": report.bus_id if report else "",
                "measurements": figures("gpu", rank.where) if rank and report and report.gpu else {},
            }
        )
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "suite": suite_version(),
        "system": system,
        "nodes": nodes,
        "ranks": ranks,
        "job": figures("job", "all ranks"),
        "checks": count_checks(units),
        "findings": [vars(finding) for finding in findings],
        "ok": not any(finding.unfit for finding in findings),
    }


def _gpus(ranks: Sequence[Rank], reports: Sequence[Report | None]) -> Reading:
    """Return the number of ranks of a node with a GPU; a failure if any GPU cannot be used."""
    for rank in ranks:
        report = reports[rank.rank]
        if report is not None and report.unusable:
            return Reading(failed=report.unusable)
    return Reading(sum(rank.device == "cuda" for rank in ranks))


def _where(number: int, rank: Rank | None) -> str:
    return f"{rank.where} (rank {number})" if rank else f"rank {number}"


def _silent(results: Results) -> list[Finding]:
    found = []
    answers = zip(results.ranks, results.reports, results.together, strict=True)
    for number, (rank, report, measured) in enumerate(answers):
        if rank is None or report is None or measured is None:
            doing = "at all" if rank is None else "with its own checks" if report is None else "after the collectives"
            where = _where(number, rank)
            text = f"{where} did not answer {doing}, within {results.timeout_seconds:.0f} s of the others"
            found.append(Finding("no answer", where, "", text, True))
    return found


def _stuck(results: Results) -> list[Finding]:
    """Return findings about collectives that hang or failed, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for number, (rank, measured) in enumerate(zip(results.ranks, results.together, strict=True)):
        if measured is not None and measured.failed:
            by_reason.setdefault(measured.failed, []).append(_where(number, rank))
    found = []
    for why, ranks in by_reason.items():
        named = "all ranks" if len(ranks) == len(results.ranks) else join_names(ranks)
        found.append(Finding("failed", ranks[0] if len(ranks) == 1 else "", "", f"{named}: {why}", True))
    return found


def _left_out(results: Results, checks: frozenset[str]) -> list[Finding]:
    """Return findings about requested checks that are impossible on this hardware or number of ranks."""
    texts = []
    if not any(rank and rank.device == "cuda" for rank in results.ranks) and checks & {"gpu", "compute"}:
        texts.append("state and speed of GPUs: no GPU here")
    if results.why_alone and checks & {"collectives", "clock"}:
        texts.append(f"collectives and clock offsets: {results.why_alone}")
    return [Finding("not made", "", "", text, False) for text in texts]
