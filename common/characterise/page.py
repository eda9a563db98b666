"""The page of ``mlperf-suite characterise``: one HTML file that loads nothing from the network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.characterise.observations import Observation, Verdict
from common.characterise.roofline import Position, Roofline
from common.characterise.variants import ON_A_CPU
from common.characterise.workload import Characterised, Known
from common.report.cards import html_page
from common.report.markup import Html, join, number, table, tag

TITLE = "Characterisation of MLPerf workloads"
LARGEST = 10
"""Number of kernels in the table of a workload."""
KINDS = 7
"""Number of kinds of work with a part of their own in a bar; the last colour is for all others."""
NAMED_FROM = 0.09
"""Smallest fraction of a bar at which a part shows its name."""
LONGEST_NAME = 90
CLASSES: dict[Verdict, str] = {"confirmed": "good", "not confirmed": "bad", "not measured here": "plain"}
Shown = Callable[[Characterised], object]


def page(workloads: Sequence[Characterised], judged: Sequence[Observation], rates: str, command: str) -> str:
    """Return the page.

    Args:
        judged: observations of the study with their verdicts.
        rates: sentence about the machine's rates and where they come from.
        command: command line that made the page.
    """
    device = next((figures["device"] for each in workloads if (figures := each.figures()) is not None), "no device")
    body = join(
        tag("header", tag("p", device, class_="eyebrow"), tag("h1", TITLE), tag("p", rates, class_="said")),
        tag("main", *map(_observation, judged), _side_by_side(workloads), *map(_workload, workloads)),
        tag("footer", tag("p", f"Written by {command}. The page is one file and loads nothing from the network.")),
    )
    return html_page(TITLE, body)


def _observation(each: Observation) -> Html:
    return tag(
        "section",
        tag("h2", each.heading),
        tag("p", tag("span", each.verdict, class_=f"chip {CLASSES[each.verdict]}")),
        tag("p", each.criterion, class_="note"),
        tag("ul", *(tag("li", text) for text in each.figures), class_="reasons"),
        class_="card",
    )


def _side_by_side(workloads: Sequence[Characterised]) -> Html:
    most = max((max(each.counts, default=1) for each in workloads), default=1)
    counts = sorted({gpus for each in workloads for gpus in each.counts})
    rows: dict[str, Shown] = {
        "recipe": lambda each: each.plan.jobs[0].scale,
        "precision": lambda each: each.plan.precision or "fp32, PyTorch's default",
        "micro-batch": lambda each: _of_report(each, lambda figures: figures["micro_batch"]),
        "step, ms": lambda each: _of_report(each, lambda figures: number(figures["step_ms"])),
        "samples/s": lambda each: _shown(each.rate(), number),
        "time of a step with any kernel": _busy,
        "step's share of its roofline": _share,
        "products in formats of tensor cores": _tensor_cores,
        "peak memory, GB": _memory,
        "power, W": lambda each: _shown(each.power(), number),
        "energy, J per sample": _energy,
    }
    for gain in workloads[0].gains() if workloads else ():
        rows[_without_format(gain)] = lambda each, gain=gain: _gain(each, gain)  # type: ignore[misc]
    for gpus in counts:
        rows[f"busy host processors, {_gpus(gpus)}"] = lambda each, gpus=gpus: _shown(  # type: ignore[misc]
            each.host_cores(gpus), "{:.2f}".format
        )
    for gpus in [count for count in counts if count > 1]:
        rows[f"efficiency, {_gpus(gpus)}"] = lambda each, gpus=gpus: _shown(  # type: ignore[misc]
            each.efficiency(gpus), "{:.1%}".format
        )
        rows[f"only communication, {_gpus(gpus)}"] = lambda each, gpus=gpus: _shown(  # type: ignore[misc]
            each.exposed(gpus), "{:.1%}".format
        )
        rows[f"sent over NVLink in a step, MB, {_gpus(gpus)}"] = lambda each, gpus=gpus: _shown(  # type: ignore[misc]
            each.sent_bytes(gpus), lambda value: number(value / 1e6)
        )
    if most > 1:
        rows["step without direct links, times as long"] = lambda each: _shown(
            each.slowdown_without_links(), "{:.2f}".format
        )
    cells = tuple((name, *(cell(each) for each in workloads)) for name, cell in rows.items())
    head = ("", *(each.benchmark for each in workloads))
    return tag(
        "section",
        tag("h2", "Side by side"),
        table(head, cells, "Workloads side by side"),
        tag("p", "Ratios are of samples per second; above 1 is a gain.", class_="note"),
        class_="card",
    )


def _gpus(count: int) -> str:
    return "1 GPU or rank" if count == 1 else f"{count} GPUs or ranks"


def _without_format(gain: str) -> str:
    """Return the name of a gain for all workloads, whose 16-bit formats can differ."""
    return gain.replace("bf16", "16 bits").replace("fp16", "16 bits")


def _gain(each: Characterised, name: str) -> str:
    gains = {_without_format(own): gain for own, gain in each.gains().items()}
    return _shown(gains[_without_format(name)], "{:.2f}".format)


def _shown(known: Known, form: Callable[[float], str]) -> str:
    return known.why if known.value is None else form(known.value)


def _of_report(each: Characterised, cell: Callable[[Mapping[str, Any]], object]) -> object:
    figures = each.figures()
    return each.rate().why if figures is None else cell(figures)


def _of_roofline(each: Characterised, cell: Callable[[Roofline], str]) -> str:
    found = each.roofline()
    return each.rate().why if found is None else cell(found)


def _busy(each: Characterised) -> str:
    if each.cpu:
        return f"not measured: {ON_A_CPU}"
    return _of_roofline(each, lambda found: f"{found.busy_ms / found.step_ms:.0%}")


def _share(each: Characterised) -> str:
    if each.hardware is None:
        return "not measured: the rates of this machine are unknown (--system)"
    return _of_roofline(
        each,
        lambda found: (
            f"{'' if found.known > 0.995 else 'at least '}{found.share:.1%} (from {found.known:.0%} of the kernel time)"
        ),
    )


def _tensor_cores(each: Characterised) -> str:
    if each.cpu:
        return f"not measured: {ON_A_CPU}"
    return _of_roofline(
        each,
        lambda found: f"{found.tensor_cores:.1%} (of {found.products_known:.0%} of the kernel time this is known)",
    )


def _memory(each: Characterised) -> str:
    figures = each.figures()
    if figures is None:
        return each.rate().why
    host = max(rank["host_memory_bytes"] for rank in figures["by_rank"])
    of_gpu = "" if figures["reserved_bytes"] is None else f"{figures['reserved_bytes'] / 1e9:.1f} on the GPU, "
    return f"{of_gpu}{host / 1e9:.1f} on the host"


def _energy(each: Characterised) -> str:
    figures = each.figures()
    if figures is None or figures["joules"] is None:
        return _shown(each.power(), lambda power: "not measured: this GPU does not count its energy")
    return number(figures["joules"] / figures["samples"])


def _workload(each: Characterised) -> Html:
    found = each.roofline()
    kernels = "operators" if each.cpu else "kernels"
    failures = tuple(each.failures().items())
    absent = tuple(each.plan.absent.items())
    return tag(
        "section",
        tag("h2", each.benchmark),
        None if found is None else join(tag("p", f"Time of all {kernels} by kind", class_="note"), _bar(found)),
        None if found is None else _kernels(each.benchmark, found, kernels),
        table(("failed measurement", "error"), failures, f"{each.benchmark}: failed measurements")
        if failures
        else None,
        table(("not measured", "reason"), absent, f"{each.benchmark}: not measured here") if absent else None,
        class_="card",
    )


def _bar(found: Roofline) -> Html:
    largest = dict(itertools.islice(found.mix.items(), KINDS))
    rest = sum(found.mix.values()) - sum(largest.values())
    parts = [*largest.items(), *([("all others", rest)] if rest > 0 else [])]
    spans = [
        tag(
            "span",
            kind if share >= NAMED_FROM else None,
            style=f"flex:{share:.4f} 1 0;--tone:var(--c{index})",
            title=f"{kind}: {share:.1%}",
        )
        for index, (kind, share) in enumerate(parts)
    ]
    legend = [
        tag("li", tag("i", style=f"--tone:var(--c{index})"), f"{kind} ", tag("b", f"{share:.1%}"))
        for index, (kind, share) in enumerate(parts)
    ]
    said = "; ".join(f"{kind} {share:.1%}" for kind, share in parts)
    return join(
        tag("div", *spans, class_="bar", role="img", aria_label=f"Kernel mix: {said}"),
        tag("ul", *legend, class_="legend"),
    )


def _kernels(benchmark: str, found: Roofline, kernels: str) -> Html:
    head = (
        kernels[:-1],
        "kind",
        "launches",
        "ms",
        "of roofline",
        "limit",
        "MB",
        "GFLOP",
        "FLOP/byte",
        "format",
        "work from",
    )
    largest = found.positions[:LARGEST]
    counted = any(position.counters is not None for position in largest)
    head = (*head, *(("moved by ncu, GB/s", "tensor cores busy by ncu") if counted else ()))
    rows = tuple((*_row(position), *(_counted(position) if counted else ())) for position in largest)
    title = f"{benchmark}: the {len(rows)} largest {kernels} of a step"
    return join(tag("p", title, class_="note"), table(head, rows, title))


def _counted(each: Position) -> tuple[str, str]:
    if each.counters is None:
        return "unknown", "unknown"
    return f"{each.counters.bytes_per_second / 1e9:,.0f}", f"{each.counters.tensor:.0%}"


def _row(each: Position) -> tuple[object, ...]:
    name = each.kernel if len(each.kernel) <= LONGEST_NAME else each.kernel[: LONGEST_NAME - 1] + "…"
    intensity = each.flops / each.bytes if each.flops and each.bytes else None
    return (
        tag("span", name, class_="path"),
        each.kind,
        each.launches,
        f"{each.ms:.3f}",
        "unknown" if each.share is None else f"{each.share:.0%}",
        each.limit or "unknown",
        "unknown" if each.bytes is None else f"{each.bytes / 1e6:,.1f}",
        "unknown" if each.flops is None else f"{each.flops / 1e9:,.1f}",
        "" if intensity is None else f"{intensity:,.1f}",
        each.precision or "unknown",
        each.source or "unknown",
    )
