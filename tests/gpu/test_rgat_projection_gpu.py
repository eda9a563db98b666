"""R-GAT's products on a GPU: against float64, captured, repeatable, and with offsets beyond int32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rgat.graph import BlockShape, SampledBlock
from benchmarks.rgat.ops import projection
from benchmarks.rgat.ops.projection import triton as projection_triton
from benchmarks.rgat.ops.projection.reference import Projection
from tests.benchmarks.rgat.projection_oracle import Case, assert_close, case, expected, only_filled, results
from tests.benchmarks.rgat.random_blocks import SCHEMA, random_block
from tests.gpu.captures import captured

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SHAPE = random_block(0, seeds=300, graph=3000, slack=400).shape


def on_gpu(seed: int) -> SampledBlock:
    """A block of several thousand rows, always in the same shape."""
    block = random_block(seed, seeds=300, graph=3000, shape=SHAPE)
    return SampledBlock.of(SHAPE, {name: tensor.cuda() for name, tensor in block.tensors().items()})


def poison() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    held = [torch.full((1 << 20 << power,), float("nan"), device="cuda") for power in range(7)]
    del held


def run(function: Projection, given: Case) -> dict[str, Tensor]:
    poison()
    return results(function, given)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("size", [(512, 4, 128), (200, 3, 48)], ids=str)
def test_products_of_fp16_equal_float64(size: tuple[int, int, int], level: int) -> None:
    given = case(on_gpu(level), level, *size, torch.float16, torch.float16)
    formula = expected(given)._asdict()
    for key, value in only_filled(run(projection.PROJECTION.function("triton"), given), given).items():
        assert_close(value, formula[key], 1e-3 if key.startswith("term") else 2e-3, key)


@pytest.mark.parametrize("name", projection.PROJECTION.names)
def test_captured_products_follow_the_blocks_counts_and_give_the_same_bits(name: str) -> None:
    function = projection.PROJECTION.function(name)
    given = case(on_gpu(0), 2, 512, 4, 128, torch.bfloat16, torch.bfloat16)
    graph, found = captured(lambda: run(function, given))
    for seed in (1, 2):
        other = case(on_gpu(seed), 2, 512, 4, 128, torch.bfloat16, torch.bfloat16)
        for key, tensor in given.block.tensors().items():
            tensor.copy_(other.block.tensors()[key])
        for key in ("x_NK", "weight_RKD", "att_source_RAd", "v_RKA", "dz_MD", "dterm_TA"):
            getattr(given, key).copy_(getattr(other, key))
        for tensor in found.values():
            tensor.fill_(float("nan"))
        graph.replay()
        eager = only_filled(run(function, other), other)
        for key, value in only_filled(found, other).items():
            assert value.isfinite().all(), key
            if name == "triton":
                assert torch.equal(value, eager[key]), key
            else:
                assert_close(value, eager[key].double(), 1e-2, key)


def test_inputs_and_rows_of_more_than_2_31_elements() -> None:
    """The last rows of the last relation give what they give alone."""
    inputs, nodes = 1024, 2_200_000
    room = BlockShape(
        SCHEMA,
        nodes=((300, 0, 0), (nodes, 400, 20)),
        edges=((0,) * 5,),
        rows=((nodes, 0, 0, 300, 10),),
    )
    block = SampledBlock.empty(room, torch.device("cuda"))
    for tensor in block.tensors().values():
        tensor.zero_()
    block.node_counts.copy_(torch.tensor(room.nodes))
    block.row_counts.copy_(torch.tensor(room.rows))
    block.rows[:nodes] = torch.randperm(nodes, device="cuda")
    assert nodes * inputs > 1 << 31
    x_NK = torch.randint(0, 120, (room.node_offsets(1)[-1], inputs), dtype=torch.uint8, device="cuda")
    x_NK = x_NK.view(torch.float8_e4m3fn)
    weight = torch.randn((5, inputs, 512), device="cuda", dtype=torch.bfloat16)
    att = torch.randn((5, 4, 128), device="cuda")
    z, term = projection_triton.project(x_NK, block, 1, weight, att)
    first = room.row_offsets(1)[0]
    for own in (slice(0, 100), slice(nodes - 100, nodes)):
        node = block.rows[own].long()
        formula = x_NK.view(torch.uint8)[node].view(x_NK.dtype).double() @ weight[0].double()
        assert_close(z[first:][own], formula, 1e-2, "z")
        assert_close(term[first:][own], (formula.view(-1, 4, 128) * att[0]).sum(2), 1e-3, "term")
    dz = torch.randn_like(z)
    dweight = projection_triton.weight_gradient(x_NK, dz, block, 1, torch.float32)
    node = block.rows[:nodes].long()
    formula = torch.zeros((inputs, 512), dtype=torch.float64, device="cuda")
    for own in torch.arange(nodes, device="cuda").split(200_000):
        x_MK = x_NK.view(torch.uint8)[node[own]].view(x_NK.dtype)
        formula += x_MK.double().T @ dz[own].double()
    assert_close(dweight[0], formula, 1e-4, "weight gradient")
