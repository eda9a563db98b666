# mypy: allow-untyped-defs
"""Triton kernels of the transducer loss, except the products.

- ``combine`` computes the statistics of the logits from partial results of the product.
- ``recursion`` computes alpha and beta in one program each per utterance. Element u of a block is token position u.
  The program loops over the anti-diagonals: element u is at frame step - u, its own last value belongs to the
  previous frame, and that of element u - 1 to the previous token. beta counts frames and tokens from the end, so both
  use the same code. One warp exchanges values by shuffles, without a barrier, and prefetches probabilities of later
  steps. 310 frames and 125 tokens take 434 steps.
- ``transitions`` computes the occupancy of each arc from alpha and beta.
- ``gradient`` reads logits, writes their gradient, which may overwrite them, and sums the gradient of the bias.

For 192 utterances of real lengths (2.45 million rows of 1,024 logits in 16 bit), ``gradient`` moves 10 GB if all rows
are chosen, 2.3 ms at 4.3 TB/s on an H200; the others move 0.2 GB. Offsets of logits need 64 bits, because there are
2.5 billion.

Shapes: R rows, V classes, B utterances, U tokens, N = U + 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_LABEL: tl.constexpr = tl.constexpr(-1)
NO_ROW: tl.constexpr = tl.constexpr(-2)
IMPOSSIBLE: tl.constexpr = tl.constexpr(-1e30)
"""Logarithm of probability zero; finite, so that differences are not NaN."""


@triton.jit
def chosen(rank_ptr, first, size):
    """Return the first rank and the number of chosen rows among ``size`` rows from ``first``."""
    begin = tl.load(rank_ptr + tl.maximum(first - 1, 0), mask=first > 0, other=0)
    return begin, tl.load(rank_ptr + first + size - 1) - begin


@triton.jit
def _rows_of_utterance(frames_ptr, tokens_ptr, offsets_ptr, BLOCK: tl.constexpr):
    """Return utterance, frames, columns, first row, and this program's rows relative to it."""
    utterance = tl.program_id(1)
    frames = tl.load(frames_ptr + utterance)
    columns = tl.load(tokens_ptr + utterance) + 1
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return utterance, frames, columns, tl.load(offsets_ptr + utterance), own


@triton.jit
def transducer_labels_kernel(
    tokens_BU_ptr,  # (B, U), rows row_stride apart
    label_ptr,  # (R,) int32, holds NO_ROW
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the label of each row. Grid (ceil(S * N / BLOCK), B)."""
    utterance, frames, columns, start, own = _rows_of_utterance(frames_ptr, tokens_ptr, offsets_ptr, BLOCK)
    token = own % columns
    exists = own < frames * columns
    label_of_row = tokens_BU_ptr + utterance.to(tl.int64) * row_stride + token
    label = tl.load(label_of_row, mask=exists & (token < columns - 1), other=NO_LABEL)
    tl.store(label_ptr + start + own, label.to(tl.int32), mask=exists)


@triton.jit
def transducer_combine_kernel(
    logits_ptr,  # (R, V)
    partial_ptr,  # (TILES, R) fp32: log-sum-exp of each part of the columns
    label_ptr,  # (R,)
    lse_ptr, blank_ptr, of_label_ptr,  # (R,) fp32
    R,
    V: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of each used row from partial log-sum-exps. Grid (ceil(R / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(label_ptr + row, mask=row < R, other=NO_ROW)
    exists = label != NO_ROW
    largest = tl.load(partial_ptr + row, mask=exists, other=0.0)
    for tile in tl.static_range(1, TILES):
        largest = tl.maximum(largest, tl.load(partial_ptr + tile * R + row, mask=exists, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in tl.static_range(TILES):
        total += tl.exp(tl.load(partial_ptr + tile * R + row, mask=exists, other=0.0) - largest)
    lse = largest + tl.log(total)
    begin = logits_ptr + row.to(tl.int64) * V
    blank = tl.load(begin + (V - 1), mask=exists, other=0.0).to(tl.float32)
    of_label = tl.load(begin + tl.maximum(label, 0), mask=exists, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse, mask=exists)
    tl.store(blank_ptr + row, blank - lse, mask=exists)
    tl.store(of_label_ptr + row, tl.where(label >= 0, of_label - lse, IMPOSSIBLE), mask=exists)


@triton.jit(do_not_specialize=["R"])
def transducer_recursion_kernel(
    blank_ptr, label_ptr,  # (R,) fp32
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    found_ptr,  # (2, R) fp32: alpha and beta
    total_ptr,  # (B,) fp32
    R,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write alpha (program 0), or beta and the total (program 1), of an utterance. Grid (2, B)."""
    backward, utterance = tl.program_id(0), tl.program_id(1)
    frames, tokens = tl.load(frames_ptr + utterance), tl.load(tokens_ptr + utterance)
    columns, start = tokens + 1, tl.load(offsets_ptr + utterance)
    token = tl.arange(0, BLOCK_N)
    shifted = tl.maximum(token - 1, 0)
    # rows at step 0, relative to the utterance's first one; arcs of alpha begin at previous rows
    offset = tl.where(backward == 1, (frames - 1 + token) * columns + tokens - token, token - token * columns)
    stride = tl.where(backward == 1, -columns, columns)
    before_blank, before_label = tl.where(backward == 1, 0, columns), tl.where(backward == 1, 0, 1)
    least = 1 - backward  # first frame that a blank can reach
    blank_ptr += start
    label_ptr += start
    found_ptr += backward * R.to(tl.int64) + start
    before = tl.where(token == 0, 0.0, IMPOSSIBLE)
    for step in tl.range(0, frames + tokens, num_stages=STAGES):
        frame = step - token
        inside = (frame >= 0) & (frame < frames) & (token < columns)
        here = offset + step * stride
        blank = tl.load(blank_ptr + here - before_blank, mask=inside & (frame >= least), other=0.0)
        label = tl.load(label_ptr + here - before_label, mask=inside & (token > 0), other=IMPOSSIBLE)
        waited = before + blank
        emitted = tl.gather(before, shifted, 0) + label
        before = tl.maximum(waited, emitted) + tl.log(1.0 + tl.exp(-tl.abs(waited - emitted)))
        tl.store(found_ptr + here, before, mask=inside)
    total = tl.sum(tl.where(token == tokens, before, 0.0), 0)
    if backward == 1:
        tl.store(total_ptr + utterance, tl.where(frames > 0, total, float("-inf")))


@triton.jit(do_not_specialize=["R"])
def transducer_transitions_kernel(
    blank_ptr, label_ptr,  # (R,) fp32
    found_ptr,  # (2, R) fp32: alpha and beta
    total_ptr,  # (B,) fp32
    d_loss_ptr,  # (B,) fp32
    frames_ptr, tokens_ptr,  # (B,) int32
    offsets_ptr,  # (B + 1,) int64
    by_blank_ptr, by_label_ptr,  # (R,) fp32
    R,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the occupancies of each row's arcs times the loss's gradient. Grid (ceil(S * N / BLOCK), B)."""
    utterance, frames, columns, start, own = _rows_of_utterance(frames_ptr, tokens_ptr, offsets_ptr, BLOCK)
    if tl.program_id(0) * BLOCK >= frames * columns:
        return
    exists = own < frames * columns
    frame, last_token = own // columns, own % columns == columns - 1
    last_frame = frame == frames - 1
    row = start + own
    beta_ptr = found_ptr + R.to(tl.int64)
    before = tl.load(found_ptr + row, mask=exists, other=0.0) - tl.load(total_ptr + utterance)
    blank = tl.load(blank_ptr + row, mask=exists, other=0.0)
    label = tl.load(label_ptr + row, mask=exists, other=0.0)
    waited = tl.load(beta_ptr + row + columns, mask=exists & (frame < frames - 1), other=IMPOSSIBLE)
    waited = tl.where(last_frame & last_token, 0.0, waited)
    emitted = tl.load(beta_ptr + row + 1, mask=exists & (own % columns < columns - 1), other=IMPOSSIBLE)
    d_loss = tl.load(d_loss_ptr + utterance)
    tl.store(by_blank_ptr + row, d_loss * tl.exp(before + blank + waited), mask=exists)
    tl.store(by_label_ptr + row, d_loss * tl.exp(before + label + emitted), mask=exists)


@triton.jit
def transducer_chosen_kernel(
    live_ptr,  # (R,) bool
    rank_ptr,  # (R,) int32
    row_ptr,  # (R,) int32
    R,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the list of chosen rows. Grid (ceil(R / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(live_ptr + row, mask=row < R, other=0) != 0
    rank = tl.load(rank_ptr + row, mask=live, other=1)
    tl.store(row_ptr + rank - 1, row, mask=live)


@triton.jit
def transducer_gradient_kernel(
    logits_ptr,  # (size, V)
    d_logits_ptr,  # (size, V), may be logits_ptr
    lse_ptr,  # (size,) fp32
    by_blank_ptr, by_label_ptr,  # (size,) fp32
    label_ptr,  # (size,)
    partial_ptr,  # (programs, V) fp32
    rank_ptr, row_ptr,  # (R,) int32
    first, size,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the chosen rows' logits, and its partial sums. Grid (programs,)."""
    begin, count = chosen(rank_ptr, first, size)
    column = tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_R), tl.num_programs(0), num_stages=STAGES):
        rank = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        exists = rank < count
        row = tl.load(row_ptr + begin + rank, mask=exists, other=0) - first
        offset = row.to(tl.int64)[:, None] * V + column[None, :]
        mask = exists[:, None] & (column < V)[None, :]
        logits = tl.load(logits_ptr + offset, mask=mask, other=float("-inf")).to(tl.float32)
        lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
        by_blank = tl.load(by_blank_ptr + row, mask=exists, other=0.0)
        by_label = tl.load(by_label_ptr + row, mask=exists, other=0.0)
        label = tl.load(label_ptr + row, mask=exists, other=NO_ROW)
        gradient = tl.exp(logits - lse[:, None]) * (by_blank + by_label)[:, None]
        gradient -= tl.where((column == V - 1)[None, :], by_blank[:, None], 0.0)
        gradient -= tl.where(column[None, :] == label[:, None], by_label[:, None], 0.0)
        total += gradient
        tl.store(d_logits_ptr + offset, gradient.to(d_logits_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + tl.program_id(0) * V + column, tl.sum(total, 0), mask=column < V)
