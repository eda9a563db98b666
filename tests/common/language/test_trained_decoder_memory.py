"""The memory that training of a whole decoder needs, against bytes counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.llama31_8b.config import Facts
from common.errors import ConfigError
from common.language.memory import TrainedWorkspace
from common.mlperf.fixed import fixed_facts
from common.optim.memory_plan import STATE, plan

H200, H100 = 150_100_000_000, 85_000_000_000
EIGHT_B = fixed_facts(Facts, "llama31_8b")
WHOLE = TrainedWorkspace(
    architecture=EIGHT_B, tokens=8192, eval_tokens=8192, itemsize=2, master_bytes=2, shards=1, fp8=False,
    head_chunk=2048, alone=True,
)  # fmt: skip


@pytest.mark.parametrize(("masters", "shards", "bytes_each"), [(4, 1, 16), (2, 1, 14), (4, 8, 4 + 16 / 8)])
def test_bytes_of_a_weight_in_training(masters: int, shards: int, bytes_each: float) -> None:
    work = dataclasses.replace(WHOLE, master_bytes=masters, shards=shards)
    assert work.parts(0, 0)[STATE] == pytest.approx(8_030_261_248 * bytes_each)
    assert dataclasses.replace(work, tokens=0).parts(0, 0)[STATE] == 8_030_261_248 * 2


def test_fp32_gradients_take_two_bytes_more_per_weight_and_per_element_of_the_head() -> None:
    fp32_gradients = dataclasses.replace(WHOLE, gradient_bytes=4)
    assert fp32_gradients.parts(0, 0)[STATE] - WHOLE.parts(0, 0)[STATE] == 8_030_261_248 * 2
    assert fp32_gradients.transient() - WHOLE.transient() == 128_256 * 4096 * 2
    over_eight = dataclasses.replace(fp32_gradients, shards=8)
    assert over_eight.parts(0, 0)[STATE] == pytest.approx(8_030_261_248 * (2 + 4 + (2 + 8 + 6) / 8))


def test_copy_engines_take_a_shard_of_gradients_for_each_other_rank() -> None:
    over_eight = dataclasses.replace(WHOLE, master_bytes=4, shards=8, staged=7)
    assert over_eight.parts(0, 0)[STATE] == pytest.approx(8_030_261_248 * (2 + 2 + (4 + 8 + 2 + 7 * 2) / 8))


def test_a_head_that_ranks_share_adds_up_in_fp32_and_hands_on_the_gradients_dtype() -> None:
    """Under it: five residual streams of own tokens and two of all, logits and their gradient in 16 bits and fp32."""
    two, words = dataclasses.replace(WHOLE, ranks=2, alone=False), 128_256 // 2
    streams = (5 * 4096 + 2 * 8192) * 4096 * 2
    assert two.transient() == streams + 2048 * words * 6 + words * 4096 * (4 + 2)
    fp32_gradients = dataclasses.replace(two, gradient_bytes=4)
    assert fp32_gradients.transient() == streams + 2048 * words * 6 + words * 4096 * 4


def test_passes_with_graphs_of_their_own_share_no_transients() -> None:
    apart = dataclasses.replace(WHOLE, fp8=True, chunk_graphs=True)
    shared = dataclasses.replace(WHOLE, fp8=True)
    assert apart.transient() == 2 * shared.transient()
    assert plan(apart, H200, None, 0).recomputed > plan(shared, H200, None, 0).recomputed


def test_bytes_that_a_layer_keeps() -> None:
    """Two residuals, q, k, v, o, log-sum-exp, two inverse roots; gate and up in 16 bits, or FP8 as products read it."""
    shared = 2 * 2 * 4096 + 2 * 4 + 2 * (4096 + 1024 + 1024) + 2 * 4096 + 4 * 32
    assert WHOLE.layer() == 8192 * (shared + 2 * 28672)
    in_fp8 = dataclasses.replace(WHOLE, fp8=True)
    assert in_fp8.layer() == 8192 * (shared + 2 * 4096 + 28672 + 14336)
    assert dataclasses.replace(WHOLE, sharers=2).layer() == WHOLE.layer() + 8192 * 2 * 2048


def test_the_whole_network_fits_an_h200_with_remainders_for_masters() -> None:
    half, in_fp8 = plan(WHOLE, H200, None, 0), plan(dataclasses.replace(WHOLE, fp8=True), H200, None, 0)
    assert half.recomputed == 0
    assert 0 < in_fp8.recomputed < 8
    assert max(half.total, in_fp8.total) <= H200
    with_masters = plan(dataclasses.replace(WHOLE, master_bytes=4), H200, None, 0)
    assert with_masters.recomputed > 16


def test_sixty_four_h100_need_no_recomputation() -> None:
    """Cisco's published run of this layout took 71.2 GB at its peak."""
    work = dataclasses.replace(WHOLE, master_bytes=4, shards=64, fp8=True, alone=False)
    found = plan(work, H100, None, 0)
    assert found.recomputed == 0
    assert 60e9 < found.total < 80e9


def test_ranks_of_tp_share_all_but_norms() -> None:
    work = dataclasses.replace(WHOLE, fp8=True, alone=False)
    two = dataclasses.replace(work, ranks=2)
    norms = 65 * 4096
    assert two.parameters() == (8_030_261_248 - norms) // 2 + norms
    assert two.layer() == work.layer() // 2
    assert two.weights_in_fp8() == work.weights_in_fp8() // 2
    assert work.weights_in_fp8(16) == 1.5 * work.weights_in_fp8()
    assert two.reserved() - work.reserved() == 2 * 8192 * 4096 * 2, "slots in which tokens move"
    # gate and up of all tokens and half the features; turned: weight, gradient and input, whose widths are 14,336 and
    # 7,168; a weight's gradient
    assert two.scratch(False) == 8192 * 14336 * 2 + 14336 * 4096 * 3 + 8192 * (14336 + 7168)
    assert plan(two, H100, None, 0).recomputed == 0


def test_a_plan_that_does_not_fit_names_the_missing_bytes_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"GB are missing; use optimizer\.masters=remainder"):
        plan(dataclasses.replace(WHOLE, master_bytes=4, fp8=True), H200, None, 0)
    with pytest.raises(ConfigError, match="are missing"):
        plan(dataclasses.replace(WHOLE, fp8=True), H200, 0, 0)


def test_a_plan_tells_its_parts() -> None:
    words = plan(dataclasses.replace(WHOLE, fp8=True), H200, 5, 0).in_words()
    for part in ("weights in FP8 7.0", "weights, gradients and optimizer 112.4", "5 layers recompute gate and up"):
        assert part in words


def test_ranks_that_evaluate_in_fp8_have_weights_in_fp8() -> None:
    only = dataclasses.replace(WHOLE, fp8=True, tokens=0)
    products = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert only.weights_in_fp8() == products
