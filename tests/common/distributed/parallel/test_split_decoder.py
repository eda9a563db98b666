"""A decoder split over two and four gloo ranks, by tensors, by context and by both, equals the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import split_decoder_oracle as oracle
import torch
import torch.nn.functional as F
from split_decoder_ranks import CLIPPED_FIRST, LAYOUTS, run_rank

from tests.gloo_ranks import on_ranks

TOLERANCE = 1e-10
WORLD_OF = {name: world for world, layouts in LAYOUTS.items() for name in layouts}
SPLIT_ROWS = [name for name, world in WORLD_OF.items() if "cp" in LAYOUTS[world][name]]

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What every rank has found, by the number of ranks."""
    return {world: on_ranks(run_rank, world, tmp_path_factory.mktemp("ranks")) for world in LAYOUTS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return oracle.one_micro_batch()


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, Any]]:
    return {when: oracle.train(when) for when in ("before_reduction", "after_reduction")}


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("name", WORLD_OF)
@pytest.mark.parametrize("frozen", [False, True])
def test_result_losses_and_gradients_are_those_of_one_rank(ranks, expected, name, frozen):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"micro-batch/{frozen}/{name}"]
        for what in ("loss", "losses", "hidden"):
            assert_equal(found[what], expected[what])
        wanted = {n: g for n, g in expected["gradients"].items() if "lora" in n or not frozen}
        assert found["gradients"].keys() == wanted.keys()
        for parameter, gradient in wanted.items():
            assert_equal(found["gradients"][parameter], gradient)


@pytest.mark.parametrize(
    ("when", "name"),
    [*(("after_reduction", name) for name in WORLD_OF), *(("before_reduction", name) for name in CLIPPED_FIRST)],
)
def test_adapters_train_as_on_one_rank(ranks, trained, name, when):
    wanted = trained[when]
    assert min(trained["after_reduction"]["norms"]) > 2 * oracle.MAX_NORM, "clipping must do something"
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"train/{when}/{name}"]
        assert found["weights"].keys() == wanted["weights"].keys()
        for parameter, weight in wanted["weights"].items():
            assert_equal(found["weights"][parameter], weight)
        if when == "after_reduction":
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)


def test_replicas_that_share_the_update_train_as_on_one_rank(ranks, trained):
    for rank in ranks[4]:
        found = rank["train/shards/dp2xtp2"]
        for parameter, weight in trained["after_reduction"]["weights"].items():
            assert_equal(found["weights"][parameter], weight)


@pytest.mark.parametrize("name", SPLIT_ROWS)
def test_a_called_backward_pass_of_attention_gives_autograds_gradients(ranks, name):
    for rank in ranks[WORLD_OF[name]]:
        found = rank[f"attention/{name}"]
        for called, recorded in zip(found["called"], found["autograd"], strict=True):
            assert_equal(called, recorded)


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_tokens_move_in_any_dtype(ranks, world, dtype):
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    everyone = torch.cat([own * (rank + 1) for rank in range(world)])
    for index, rank in enumerate(ranks[world]):
        found = rank["movements"]
        assert torch.equal(found[f"gathered {dtype}"], everyone)
        if dtype != torch.float8_e4m3fn:
            assert torch.equal(found[f"scattered {dtype}"], own * (index + 1) * world)


@pytest.mark.parametrize("world", LAYOUTS)
def test_ranks_agree_on_scales_that_no_token_overflows(ranks, world):
    assert [rank["movements"]["scales"] for rank in ranks[world]] == [[2.0, 10.0 - world]] * world


@pytest.mark.parametrize("world", LAYOUTS)
def test_a_head_in_half_precision_has_the_losses_of_its_logits_in_fp32(ranks, world):
    tokens_BS, labels_BS, _ = oracle.inputs(0)
    hidden_TE = (oracle.weights()["embedding.weight"].bfloat16()[tokens_BS.flatten().long()] * 2).requires_grad_()
    head_VE = oracle.weights()["head.weight"].bfloat16().requires_grad_()
    logits_TV = (hidden_TE @ head_VE.t()).float()
    labels_T = labels_BS.flatten().long()
    losses_T = F.cross_entropy(logits_TV, labels_T, ignore_index=-1, reduction="none")
    (losses_T * torch.linspace(0, 2, labels_T.numel())).sum().backward()
    for rank in ranks[world]:
        found = rank["head"]
        for case in ("learns", "frozen"):
            assert found[f"{case}.losses"].dtype == torch.float32
            torch.testing.assert_close(found[f"{case}.losses"], losses_T.detach(), rtol=1e-5, atol=1e-5)
            assert_close_in_half(found[f"{case}.hidden"], hidden_TE.grad)
        assert_close_in_half(found["head"], head_VE.grad)
    bits = [rank["head"]["learns.losses"] for rank in ranks[world]]
    assert all(torch.equal(losses, bits[0]) for losses in bits), "every rank has the same losses"


def assert_close_in_half(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 0.01
