"""Verdicts on the study's observations from synthetic measurements."""

from __future__ import annotations

import pytest
from synthetic_workloads import characterised, figures, kernels, rank

from common.characterise.observations import distance, observations


def verdicts(*workloads):
    return [each.verdict for each in observations(workloads)]


MIX, LINKS, SCALING, HOST, FORMATS, COMPILERS = range(6)


def test_kernel_mixes_differ_by_the_time_in_other_kinds():
    assert distance({"a": 0.5, "b": 0.5}, {"a": 0.25, "c": 0.75}) == pytest.approx(0.75)
    gemm = characterised("a", {("", 1): figures(100.0, kernels=kernels({"gemm": 9.0, "memcpy": 1.0}))})
    both = characterised("b", {("", 1): figures(100.0, kernels=kernels({"gemm": 5.0, "memcpy": 5.0}))})
    near = characterised("c", {("", 1): figures(100.0, kernels=kernels({"gemm": 8.0, "memcpy": 2.0}))})
    found = observations([gemm, both])[MIX]
    assert found.verdict == "confirmed"
    assert found.figures[-1] == "The mixes of a and b differ most, by 40%; the median pair by 40%."
    assert verdicts(gemm, near)[MIX] == "not confirmed"
    assert verdicts(gemm)[MIX] == "not measured here"


def test_links_matter_if_a_step_through_host_memory_takes_longer():
    measured = {("", 1): figures(100.0), ("", 2): figures(190.0, rank(sent_bytes=1e6), rank(sent_bytes=3e6))}
    slow = characterised("a", {**measured, ("host-links", 2): figures(95.0)})
    found = observations([slow])[LINKS]
    assert found.verdict == "confirmed"
    assert found.figures == [
        "a: a step through host memory takes 2.00 times as long.",
        "a: 2 GPUs send 4.0 MB over NVLink in a step.",
    ]
    assert verdicts(characterised("a", {**measured, ("host-links", 2): figures(180.0)}))[LINKS] == "not confirmed"
    failed = characterised("a", {**measured, ("host-links", 2): "exit code 1: no shared memory"})
    found = observations([failed])[LINKS]
    assert (found.verdict, found.figures[0]) == ("not measured here", "a: failed, see the error below.")
    assert failed.failures() == {"a-2-host-links": "exit code 1: no shared memory"}


def test_efficiency_varies_between_two_workloads():
    good = characterised("a", {("", 1): figures(100.0), ("", 4): figures(396.0)})
    poor = characterised("b", {("", 1): figures(100.0), ("", 4): figures(360.0)})
    near = characterised("c", {("", 1): figures(100.0), ("", 4): figures(388.0)})
    found = observations([good, poor])[SCALING]
    assert found.verdict == "confirmed"
    assert found.figures == [
        "a: scaling efficiency 99.0% on the most GPUs.",
        "b: scaling efficiency 90.0% on the most GPUs.",
    ]
    assert verdicts(good, near)[SCALING] == "not confirmed"
    assert verdicts(good)[SCALING] == "not measured here"


def test_the_use_of_host_processors_must_grow_for_every_workload():
    grows = characterised("a", {("", 1): figures(100.0), ("", 2): figures(200.0, rank(0.75), rank(0.75))})
    stays = characterised("b", {("", 1): figures(100.0), ("", 2): figures(200.0, rank(0.5), rank(0.5))})
    assert verdicts(grows)[HOST] == "confirmed"
    assert verdicts(grows, stays)[HOST] == "not confirmed"
    assert "a: busy processors by number of GPUs: 1: 0.50, 2: 1.50." in observations([grows])[HOST].figures
    alone = characterised("a", {("", 1): figures(100.0)}, absent={"gpus": "only one GPU"})
    found = observations([alone])[HOST]
    assert (found.verdict, found.figures[0]) == ("not measured here", "a: not measured: only one GPU.")


def test_the_fastest_format_counts():
    measured = {("", 1): figures(400.0), ("fp32", 1): figures(100.0), ("tf32", 1): figures(200.0)}
    fp8 = characterised("a", {**measured, ("bf16", 1): figures(300.0)}, precision="fp8")
    gains = fp8.gains()
    assert gains["bf16 over fp32"].value == 3.0
    assert gains["bf16 over TF32"].value == 1.5
    assert gains["FP8 over bf16"].value == pytest.approx(4 / 3)
    assert gains["FP8 over fp32"].value == 4.0
    assert observations([fp8])[FORMATS].figures[0] == "a: 4.00 times as fast as in fp32."
    small = characterised("b", {("", 1): figures(120.0), ("fp32", 1): figures(100.0)})
    assert (verdicts(fp8)[FORMATS], verdicts(small)[FORMATS]) == ("confirmed", "not confirmed")


def test_formats_of_tensor_cores_are_not_measured_on_a_cpu():
    measured = {("", 1): figures(400.0), ("fp32", 1): figures(100.0)}
    found = observations([characterised("a", measured, cpu=True)])[FORMATS]
    assert found.verdict == "not measured here"


def test_compilers_gain_by_the_median_workload():
    measured = {("", 1): figures(400.0), ("reference", 1): figures(100.0)}
    much = characterised("a", {**measured, ("compiled", 1): figures(200.0)})
    little = characterised("b", {**measured, ("compiled", 1): figures(110.0)})
    assert verdicts(much)[COMPILERS] == "confirmed"
    assert verdicts(little)[COMPILERS] == "not confirmed"
    assert verdicts(characterised("c", measured))[COMPILERS] == "not measured here"
    assert little.gains()["our kernels over PyTorch's"].value == 4.0


def test_a_measurement_that_updated_nothing_is_a_failure():
    found = characterised("a", {("", 1): figures(100.0), ("fp32", 1): figures(90.0, updated=False)})
    assert found.gains()["bf16 over fp32"].why == "failed, see the error below"
    assert found.failures() == {"a-1-fp32": "the last gradients were not finite, so that nothing was updated"}
