"""Which part of a weight each rank holds, and what cannot be sharded."""

from __future__ import annotations

import pytest
import torch

from common.distributed.layout import Layout
from common.distributed.tensor_parallel.layers import (
    Adapter,
    ColumnParallelLinear,
    RowParallelLinear,
    partial_parameters,
)
from common.distributed.tensor_parallel.overlap import build_products
from common.distributed.tensor_parallel.ranks import TensorParallel, gate_up_parts, qkv_parts
from common.distributed.tensor_parallel.vocabulary import VocabularyParallelEmbedding
from common.distributed.tensor_split import TensorSplit
from common.errors import ConfigError, UnsupportedImplementation

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, FEED_FORWARD, VOCABULARY = 3, 4, 2, 2, 6, 10
ADAPTER = Adapter(5, 4.0)


pytestmark = pytest.mark.usefixtures("groups_are_their_ranks")


def rank_of_tp(index: int, size: int = 2) -> TensorParallel:
    return TensorParallel.from_layout(Layout({"tp": size}, index))


def splits(parallel: TensorParallel) -> dict[str, TensorSplit]:
    """How the layers of a decoder say that the ranks share them."""
    layers: dict[str, torch.nn.Module] = {
        "qkv": ColumnParallelLinear(HIDDEN, qkv_parts(HEADS, KV_HEADS, HEAD_SIZE, parallel), parallel, adapter=ADAPTER),
        "gate_up": ColumnParallelLinear(HIDDEN, gate_up_parts(FEED_FORWARD, parallel), parallel),
        "output": RowParallelLinear(HEADS * HEAD_SIZE, HIDDEN, parallel, adapter=ADAPTER),
        "down": RowParallelLinear(FEED_FORWARD, HIDDEN, parallel),
        "embedding": VocabularyParallelEmbedding(VOCABULARY, HIDDEN, parallel),
    }
    return {f"{layer}.{name}": split for layer, module in layers.items() for name, split in module.splits.items()}


ROWS_OF_RANK_1 = {
    # query heads 2 and 3, key head 1, value head 1, of two rows each
    "qkv.weight": (0, [4, 5, 6, 7, 10, 11, 14, 15], (16, 3)),
    "qkv.lora_b": (0, [4, 5, 6, 7, 10, 11, 14, 15], (16, 5)),
    "gate_up.weight": (0, [3, 4, 5, 9, 10, 11], (12, 3)),
    "output.weight": (1, [4, 5, 6, 7], (3, 8)),
    "output.lora_a": (1, [4, 5, 6, 7], (5, 8)),
    "down.weight": (1, [3, 4, 5], (3, 6)),
    "embedding.weight": (0, [5, 6, 7, 8, 9], (10, 3)),
}


@pytest.mark.parametrize("name", ROWS_OF_RANK_1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_rank_has_whole_heads_and_matching_pieces(name, dtype):
    dim, indices, shape = ROWS_OF_RANK_1[name]
    full = torch.arange(shape[0] * shape[1]).view(shape).float().to(dtype)
    local = splits(rank_of_tp(1))[name].local_of(full)
    assert torch.equal(local.float(), full.float().index_select(dim, torch.tensor(indices)))
    assert local.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ROWS_OF_RANK_1)
def test_the_parts_of_all_ranks_make_the_whole(name):
    full = torch.randn(ROWS_OF_RANK_1[name][2])
    both = [splits(rank_of_tp(index))[name] for index in range(2)]
    assert torch.equal(both[0].full_of([split.local_of(full) for split in both]), full)


def test_only_sharded_parameters_have_a_split():
    assert splits(rank_of_tp(1)).keys() == ROWS_OF_RANK_1.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: qkv_parts(4, 2, 16, p), "layout.tp=4 does not divide the 2 key/value heads"),
        (lambda p: qkv_parts(6, 4, 16, p), "layout.tp=4 does not divide the 6 query heads"),
        (lambda p: gate_up_parts(10, p), "layout.tp=4 does not divide the 10 feed-forward units"),
        (lambda p: ColumnParallelLinear(3, (8, 6), p), "layout.tp=4 does not divide 6"),
        (lambda p: RowParallelLinear(6, 3, p), "layout.tp=4 does not divide 6"),
        (lambda p: VocabularyParallelEmbedding(10, 3, p), "layout.tp=4 does not divide 10"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide_are_an_error_of_the_layout(make, message):
    with pytest.raises(ConfigError, match=message):
        make(rank_of_tp(0, 4))


def test_tensors_of_another_shape_are_refused():
    split = TensorSplit.sharded((4, 3), 0, (4,), 2, 0)
    with pytest.raises(ValueError, match=r"a tensor \(3, 4\) where \(4, 3\) is split"):
        split.local_of(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"where 2 of \(2, 3\) make one"):
        split.full_of([torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="5 tokens cannot be sharded evenly over 2 ranks"):
        rank_of_tp(0).own_tokens(torch.zeros(5, 2))


def test_layers_say_whose_gradients_are_parts_of_a_sum():
    parallel, adapter = rank_of_tp(1), Adapter(2, 4.0)
    model = torch.nn.ModuleDict(
        {
            "qkv": ColumnParallelLinear(3, (8, 4, 4), parallel, adapter=adapter, bias=True),
            "output": RowParallelLinear(8, 3, parallel, adapter=adapter, bias=True),
            "down": RowParallelLinear(6, 3, parallel),
        }
    )
    tp = ("tp",)
    assert partial_parameters(model) == {"qkv.lora_a": tp, "output.lora_b": tp, "output.bias": tp}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {
        "qkv.weight": (8, 3), "qkv.bias": (8,), "qkv.lora_a": (2, 3), "qkv.lora_b": (8, 2),
        "output.weight": (3, 4), "output.bias": (3,), "output.lora_a": (2, 4), "output.lora_b": (3, 2),
        "down.weight": (3, 3),
    }  # fmt: skip


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_frozen_weight_keeps_no_input(layer):
    alone = TensorParallel()
    made = layer(3, (4,), alone) if layer is ColumnParallelLinear else layer(3, 4, alone)
    kept = {}
    for learns in (True, False):
        made.weight.requires_grad_(learns)
        x = torch.randn(5, 3, requires_grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.data_ptr()), lambda n: n):
            made(x)
        kept[learns] = [pointer for pointer in saved if pointer != made.weight.data_ptr()]
        assert (x.data_ptr() in kept[learns]) == learns
    assert kept[False] == []


def test_without_gpus_that_map_each_others_memory_tokens_move_by_collectives():
    device = torch.device("cpu")
    assert build_products(TensorParallel(), device).name == "collective"
    assert build_products(rank_of_tp(0), device).name == "collective"
    with pytest.raises(UnsupportedImplementation, match="'symmetric_memory' cannot be used: it needs CUDA devices"):
        build_products(rank_of_tp(0), device, "symmetric_memory")
    with pytest.raises(UnsupportedImplementation, match="choose one of auto, symmetric_memory, collective"):
        build_products(rank_of_tp(0), device, "pigeon")
