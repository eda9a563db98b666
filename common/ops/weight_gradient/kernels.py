# mypy: allow-untyped-defs
"""Triton kernel of a product in FP8 that is added to what is there.

Of a weight's gradient the sum goes over the tokens, along which both operands run in memory. Operands and gradient move
as tiles through the tensor memory accelerator (compute capability 9.0). A tile's sum is added either by the accelerator
on its way to memory (REDUCE: the L2 cache adds, rounded to the gradient's dtype first), or by the program, which then
has to wait for the old tile.

Arithmetic bounds it: 2 O I T operations on 2 O I bytes read, and as many written, of bf16; with T = 4,096 tokens at
1,250 TFLOP/s on an H200 the gradient's traffic is 0.6 TB/s of 4.3, beneath the products.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_gradient_kernel(
    dy_tiles,  # descriptor of (O, T) FP8, tiles (BLOCK_O, BLOCK_T)
    x_tiles,  # descriptor of (I, T) FP8, tiles (BLOCK_I, BLOCK_T)
    gradient_tiles,  # descriptor of (O, I), tiles (BLOCK_O, BLOCK_I / 2)
    dy_inverse_ptr,  # 0-d fp32
    x_inverse_ptr,  # 0-d fp32
    outputs, inputs, tokens,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    REDUCE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Grid (programs,), each going over every ``programs``-th tile; GROUP rows of tiles share columns in the cache."""
    rows = tl.cdiv(outputs, BLOCK_O)
    columns = tl.cdiv(inputs, BLOCK_I)
    factor = tl.load(dy_inverse_ptr) * tl.load(x_inverse_ptr)
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=FLATTEN):
        first_row = tile // (GROUP * columns) * GROUP
        height = tl.minimum(rows - first_row, GROUP)
        row = (first_row + tile % (GROUP * columns) % height) * BLOCK_O
        column = tile % (GROUP * columns) // height * BLOCK_I
        total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for token in range(0, tokens, BLOCK_T):
            dy = dy_tiles.load([row, token])
            x = x_tiles.load([column, token])
            total = tl.dot(dy, x.T, total)
        # in halves, so that less shared memory is between the sum and its way out
        halves = tl.permute(tl.reshape(total * factor, (BLOCK_O, 2, BLOCK_I // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        if REDUCE:
            gradient_tiles.atomic_add([row, column], left.to(gradient_tiles.dtype))
            gradient_tiles.atomic_add([row, column + BLOCK_I // 2], right.to(gradient_tiles.dtype))
        else:
            before = gradient_tiles.load([row, column]).to(tl.float32)
            gradient_tiles.store([row, column], (before + left).to(gradient_tiles.dtype))
            before = gradient_tiles.load([row, column + BLOCK_I // 2]).to(tl.float32)
            gradient_tiles.store([row, column + BLOCK_I // 2], (before + right).to(gradient_tiles.dtype))
