"""Observations of a study of the suite, compared with the measurements on this machine.

The study is S. Verma et al., "Demystifying the MLPerf Training Benchmark Suite", ISPASS 2020. It states tendencies
without thresholds; those below are ours.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from common.characterise.variants import ON_A_CPU
from common.characterise.workload import Characterised, Known

Verdict = Literal["confirmed", "not confirmed", "not measured here"]

MIX_DIFFERS = 0.3
"""Kernel mixes differ if at least this fraction of the kernel time is in other kinds of work."""
LINKS_MATTER = 1.1
"""Dedicated links matter if a step without them takes this many times as long, for at least one workload."""
EFFICIENCY_VARIES = 0.05
"""Difference of the scaling efficiency between the best and the worst workload."""
HOST_GROWS = 1.2
"""The use of host processors grows if a GPU of several keeps this many times as many busy, for every workload."""
FORMATS_GAIN = 1.5
"""Narrower formats gain much if the median workload is this many times as fast as in fp32."""
COMPILERS_GAIN = 1.2
"""Compilers gain much if the median workload is this many times as fast with compiled operations."""


@dataclass(frozen=True)
class Observation:
    """One observation of the study.

    Attributes:
        heading: the observation, as a sentence.
        criterion: condition under which it counts as confirmed.
        figures: figures of this machine as sentences, or reasons why there are none.
    """

    heading: str
    criterion: str
    verdict: Verdict
    figures: Sequence[str]


def observations(workloads: Sequence[Characterised]) -> list[Observation]:
    """Return all observations with the verdict of the measurements."""
    return [judge(workloads) for judge in (_mix, _links, _scaling, _host, _formats, _compilers)]


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the fraction of the kernel time that two kernel mixes spend in different kinds of work, 0 to 1."""
    return sum(abs(one.get(kind, 0.0) - other.get(kind, 0.0)) for kind in {*one, *other}) / 2


def _verdict(confirmed: bool) -> Verdict:
    return "confirmed" if confirmed else "not confirmed"


def _mix(workloads: Sequence[Characterised]) -> Observation:
    heading = "Kernel benchmarks are not enough, since applications differ in their kernel mix"
    criterion = f"Two workloads spend at least {MIX_DIFFERS:.0%} of their kernel time in different kinds of work."
    mixes = {each.benchmark: found.mix for each in workloads if (found := each.roofline()) is not None}
    if len(mixes) < 2:
        return Observation(heading, criterion, "not measured here", ["This needs the kernels of two workloads."])
    pairs = {(a, b): distance(mixes[a], mixes[b]) for a, b in itertools.combinations(mixes, 2)}
    (a, b), most = max(pairs.items(), key=lambda item: item[1])
    figures = [
        f"{name}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in itertools.islice(mix.items(), 3))
        for name, mix in mixes.items()
    ]
    figures.append(f"The mixes of {a} and {b} differ most, by {most:.0%}; the median pair by "
                   f"{statistics.median(pairs.values()):.0%}.")  # fmt: skip
    return Observation(heading, criterion, _verdict(most >= MIX_DIFFERS), figures)


def _links(workloads: Sequence[Characterised]) -> Observation:
    heading = "Training on several GPUs needs dedicated links with low latency"
    criterion = (
        f"Without direct links between GPUs, the step of a workload takes {LINKS_MATTER:g} times as long or more."
    )
    values, figures = _each(
        workloads, Characterised.slowdown_without_links, "a step through host memory takes {:.2f} times as long"
    )
    for each in workloads:
        most = max(each.counts, default=1)
        if most > 1 and (sent := each.sent_bytes(most).value) is not None:
            figures.append(f"{each.benchmark}: {most} GPUs send {sent / 1e6:,.1f} MB over NVLink in a step.")
        if most > 1 and (exposed := each.exposed(most).value) is not None:
            figures.append(f"{each.benchmark}: only communication runs in {exposed:.1%} of a step of {most} GPUs.")
    return _judged(heading, criterion, values, lambda found: max(found) >= LINKS_MATTER, figures)


def _scaling(workloads: Sequence[Characterised]) -> Observation:
    heading = "Scaling efficiency varies between models, so scheduling should be smart"
    criterion = f"On the most GPUs, efficiencies of two workloads differ by at least {EFFICIENCY_VARIES:.0%}."

    def efficiency(each: Characterised) -> Known:
        most = max(each.counts, default=1)
        return each.efficiency(most) if most > 1 else each.rate(gpus=2)

    values, figures = _each(workloads, efficiency, "scaling efficiency {:.1%} on the most GPUs")
    if len(values) < 2:
        figures.append("This needs two workloads on several GPUs.")
        return Observation(heading, criterion, "not measured here", figures)
    return _judged(heading, criterion, values, lambda found: max(found) - min(found) >= EFFICIENCY_VARIES, figures)


def _host(workloads: Sequence[Characterised]) -> Observation:
    heading = "The use of host processors grows with the number of GPUs"
    criterion = (
        f"Each of the most GPUs keeps at least {HOST_GROWS:g} times as many processors busy as a single GPU, for every "
        "workload."
    )

    def growth(each: Characterised) -> Known:
        most = max(each.counts, default=1)
        one, several = each.host_cores(1), each.host_cores(most) if most > 1 else each.rate(gpus=2)
        if one.value is None or several.value is None or not one.value:
            return Known(None, several.why or one.why or "not measured: one GPU keeps no processor busy")
        return Known(several.value / most / one.value)

    values, figures = _each(
        workloads, growth, "a GPU of the most GPUs keeps {:.2f} times as many processors busy as a single GPU"
    )
    for each in workloads:
        counts = {gpus: each.host_cores(gpus).value for gpus in each.counts}
        known = ", ".join(f"{gpus}: {cores:.2f}" for gpus, cores in counts.items() if cores is not None)
        if known:
            figures.append(f"{each.benchmark}: busy processors by number of GPUs: {known}.")
    figures.append("These are the processes that queue steps; reading data is not measured here.")
    return _judged(heading, criterion, values, lambda found: min(found) >= HOST_GROWS, figures)


def _formats(workloads: Sequence[Characterised]) -> Observation:
    heading = "Mixed precision and tensor cores gain much"
    criterion = f"The median workload is at least {FORMATS_GAIN:g} times as fast in its fastest format as in fp32."

    def best(each: Characterised) -> Known:
        if each.cpu:
            return Known(None, f"not measured: {ON_A_CPU}")
        gains = [gain for name, gain in each.gains().items() if name.endswith("over fp32")]
        values = [gain.value for gain in gains if gain.value is not None]
        return Known(max(values)) if values else gains[0]

    values, figures = _each(workloads, best, "{:.2f} times as fast as in fp32")
    for each in workloads:
        found = each.roofline()
        if found is not None and not each.cpu:
            figures.append(
                f"{each.benchmark}: at least {found.tensor_cores:.0%} of the kernel time are products in formats of "
                "tensor cores."
            )
    return _judged(heading, criterion, values, lambda found: statistics.median(found) >= FORMATS_GAIN, figures)


def _compilers(workloads: Sequence[Characterised]) -> Observation:
    heading = "Compilers gain much"
    criterion = f"The median workload is at least {COMPILERS_GAIN:g} times as fast with compiled operations as without."
    values, figures = _each(
        workloads,
        lambda each: each.gains()["PyTorch's compiled over not compiled"],
        "compiled operations of PyTorch are {:.2f} times as fast as those not compiled",
    )
    for name, words in (
        ("our kernels over PyTorch's compiled", "the suite's kernels are {:.2f} times as fast as compiled ones"),
        ("CUDA graphs over eager", "CUDA graphs are {:.2f} times as fast as an eager step"),
    ):
        figures += [
            f"{each.benchmark}: {words.format(gain.value)}."
            for each in workloads
            if (gain := each.gains()[name]).value is not None
        ]
    return _judged(heading, criterion, values, lambda found: statistics.median(found) >= COMPILERS_GAIN, figures)


def _each(
    workloads: Sequence[Characterised], of: Callable[[Characterised], Known], words: str
) -> tuple[list[float], list[str]]:
    """Return the known figures of all workloads, and a sentence for each workload."""
    found = {each.benchmark: of(each) for each in workloads}
    sentences = [
        f"{name}: {known.why}." if known.value is None else f"{name}: {words.format(known.value)}."
        for name, known in found.items()
    ]
    return [known.value for known in found.values() if known.value is not None], sentences


def _judged(
    heading: str,
    criterion: str,
    values: Sequence[float],
    confirmed: Callable[[Sequence[float]], bool],
    figures: Sequence[str],
) -> Observation:
    verdict: Verdict = _verdict(confirmed(values)) if values else "not measured here"
    return Observation(heading, criterion, verdict, figures)
