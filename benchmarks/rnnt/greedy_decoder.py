"""Greedy decoding of many utterances at once.

At each frame, the most probable class is taken. A token is recorded and fed to the prediction network, and the same
frame is evaluated again. Blank advances to the next frame. Decoding leaves a frame after ``frame_symbols`` tokens,
and ends an utterance after ``symbols`` tokens. (MLPerf training rules, RNN-T; Graves, arXiv:1211.3711, section 2.4.)

Each utterance has its own position. To avoid branches, each iteration does the same for all rows, and masks select
the values that change. The prediction changes only with a token, so an iteration evaluates several frames at once and
advances to the first that emits one; the number of iterations is about the number of tokens. A few iterations form
one CUDA graph. After each replay, the index of the last active row is copied to the host, and read during the next
replay, so the device never waits; the last replay then changes nothing. When the utterances at the end are done,
graphs with fewer rows follow. With the longest utterance first, few rows are active for most of the time.

Legend: N utterances, S frames, A frames evaluated at once, J width of the joint network, V classes, M maximum tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.rnnt.lstm import State
from benchmarks.rnnt.model import START, Rnnt
from common.evaluation.forward import ForwardPass


@dataclass(frozen=True)
class DecodingLimits:
    """Limits of decoding.

    Attributes:
        blank: index of the blank class.
        frame_symbols: maximum tokens per frame.
        symbols: M, maximum tokens per utterance.
    """

    blank: int
    frame_symbols: int
    symbols: int


@dataclass(frozen=True)
class DecodingPositions:
    """Decoding position of each utterance; all (N,) on the device.

    Attributes:
        time_N: next frame to evaluate, int64.
        here_N: tokens that this frame has emitted so far, int64.
        count_N: tokens of the utterance so far, int64.
        active_N: whether the utterance is active, bool.
    """

    time_N: Tensor
    here_N: Tensor
    count_N: Tensor
    active_N: Tensor

    def first(self, rows: int) -> DecodingPositions:
        """Return the positions of the first ``rows`` utterances."""
        return DecodingPositions(*(part[:rows] for part in (self.time_N, self.here_N, self.count_N, self.active_N)))


class GreedyDecoder:
    """Decoder of up to N utterances with up to S frames.

    Args:
        model: network to decode.
        utterances, frames, width: N, S, J.
        look_ahead: A.
        unroll: iterations per graph, which are also the iterations between two checks for active rows.
        halvings: number of additional graphs, for half of the rows, a quarter, and so on.
        capture: whether to replay the iterations as CUDA graphs; without a GPU they run eagerly.
        pool: memory pool, may be shared with graphs that never run at the same time.

    Attributes:
        f_SNJ: input: the encoder's part of the joint network; frames beyond an utterance's length are ignored.
        length_N: input: frames of each utterance, int64, 0 for none; fastest with the longest first.
        token_NM: output: tokens, int64; undefined beyond an utterance's count.
        count_N: output: number of tokens, int64.
        replays: graph replays, or eager runs, of the last decoding.
    """

    def __init__(
        self,
        model: Rnnt,
        limits: DecodingLimits,
        utterances: int,
        frames: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        look_ahead: int = 4,
        unroll: int = 4,
        halvings: int = 3,
        capture: bool = True,
        pool: Any = None,
    ) -> None:
        self._network, self._limits = model, limits
        self._look_ahead, self._unroll = look_ahead, unroll
        self.f_SNJ = torch.zeros((frames, utterances, width), dtype=dtype, device=device)
        self.length_N = torch.zeros(utterances, dtype=torch.int64, device=device)
        # The extra column receives the writes of rows that emit no token.
        self._tokens = torch.zeros((utterances, limits.symbols + 1), dtype=torch.int64, device=device)
        self.token_NM = self._tokens[:, : limits.symbols]
        time_N, here_N, count_N = (torch.zeros_like(self.length_N) for _ in range(3))
        self._positions = DecodingPositions(time_N, here_N, count_N, torch.zeros_like(self.length_N, dtype=torch.bool))
        self.count_N = self._positions.count_N
        self._row_N = torch.arange(utterances, device=device)
        self._ahead_A = torch.arange(look_ahead, device=device)
        self._start_N = torch.full_like(self.length_N, START)
        self._g_NJ = torch.zeros((utterances, width), dtype=dtype, device=device)
        hidden_LNH, cell_LNH = self._network.initial_state(utterances)
        self._state: State = (hidden_LNH.clone(), cell_LNH.clone())
        self._active_rows = torch.zeros((), dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._host_rows = [torch.zeros((), dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in self._host_rows] if on_gpu else []
        inputs = {"f": self.f_SNJ, "lengths": self.length_N}
        self._passes = {
            rows: ForwardPass(model, functools.partial(self._iterate, rows), inputs, capture, pool)
            for rows in _halved(utterances, halvings)
        }
        self.replays = 0

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run the iterations and, on a GPU, capture them."""
        self._begin()
        for forward in self._passes.values():
            forward.warm_up()

    @torch.no_grad()
    def __call__(self) -> None:
        """Decode ``f_SNJ`` and ``length_N``; returns when the last tokens are queued.

        The network must be in evaluation mode, with the weights of the encoding.
        """
        self._begin()
        self.replays, rows = 0, len(self.length_N)
        self._replay(rows)
        while rows:
            self._replay(rows)  # runs while the host waits for the one before
            rows = self._rows_to_continue()

    def close(self) -> None:
        """Free the graphs."""
        for forward in self._passes.values():
            forward.close()

    def _replay(self, rows: int) -> None:
        """Queue iterations of at least the first ``rows`` rows, and a copy of the number of rows still needed."""
        slot = self.replays % len(self._host_rows)
        self._passes[min(of for of in self._passes if of >= rows)]()
        self._host_rows[slot].copy_(self._active_rows, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self.replays += 1

    def _rows_to_continue(self) -> int:
        """Wait for the replay before the last one, and return its number of rows up to the last active one."""
        slot = self.replays % len(self._host_rows)
        if self._events:
            self._events[slot].synchronize()
        return int(self._host_rows[slot])

    def _begin(self) -> None:
        """Go to the first frame of every utterance."""
        positions = self._positions
        for numbers_N in (positions.time_N, positions.here_N, positions.count_N):
            numbers_N.zero_()
        positions.active_N.copy_(self.length_N > 0)
        g_NJ, state = self._network.predict_step(self._start_N, self._network.initial_state(len(self._start_N)))
        self._g_NJ.copy_(g_NJ)
        for kept, part in zip(self._state, state, strict=True):
            kept.copy_(part)

    def _iterate(self, rows: int, inputs: dict[str, Tensor]) -> None:
        for _ in range(self._unroll):
            self._step(rows)
        active_N = self._positions.active_N[:rows]
        self._active_rows.copy_((self._row_N[:rows] + 1).where(active_N, 0).amax())

    def _step(self, rows: int) -> None:
        """Find the next token of each of the first ``rows`` utterances, or advance by A frames without one."""
        positions, limits, length_N = self._positions.first(rows), self._limits, self.length_N[:rows]
        time_NA = positions.time_N[:, None] + self._ahead_A
        class_NA = self._classes(time_NA)
        emits_NA = (class_NA != limits.blank) & (time_NA < length_N[:, None])
        none = self._look_ahead
        ahead_N = self._ahead_A.where(emits_NA, none).amin(dim=1)  # frames before the first that emits a token
        emits_N = (ahead_N < none) & positions.active_N
        token_N = class_NA.gather(1, ahead_N.clamp(max=none - 1)[:, None]).squeeze(1)
        column_N = positions.count_N.where(emits_N, limits.symbols)
        self._tokens[:rows].scatter_(1, column_N[:, None], token_N[:, None])
        # A newly reached frame has emitted no token yet.
        here_N = (positions.here_N.where(ahead_N == 0, 0) + 1).where(emits_N, 0)
        full_N = here_N == limits.frame_symbols
        positions.here_N.copy_(here_N.where(~full_N, 0))
        positions.time_N.add_(ahead_N + full_N)
        positions.count_N.add_(emits_N)
        positions.active_N.copy_((positions.time_N < length_N) & (positions.count_N < limits.symbols))
        self._predict(token_N, emits_N)

    def _classes(self, time_NA: Tensor) -> Tensor:
        """Return the most probable classes of the first utterances at some frames; undefined beyond the last frame."""
        frames, utterances, width = self.f_SNJ.shape
        rows = len(time_NA)
        index_NA = time_NA.clamp(max=frames - 1) * utterances + self._row_N[:rows, None]
        f_NAJ = self.f_SNJ.view(-1, width).index_select(0, index_NA.flatten()).view(*index_NA.shape, width)
        return self._network.joint.logits(f_NAJ, self._g_NJ[:rows, None]).argmax(dim=-1)

    def _predict(self, token_N: Tensor, emits_N: Tensor) -> None:
        """Advance the prediction network where a token was emitted."""
        rows = len(token_N)
        g_NJ, hidden_LNH, cell_LNH = self._g_NJ[:rows], self._state[0][:, :rows], self._state[1][:, :rows]
        stepped_NJ, after = self._network.predict_step(token_N.where(emits_N, 0), (hidden_LNH, cell_LNH))
        emits_N1 = emits_N[:, None]
        pairs = [(g_NJ, stepped_NJ), (hidden_LNH, after[0]), (cell_LNH, after[1])]
        for kept, new in pairs:
            torch.where(emits_N1, new, kept, out=kept)  # broadcasts over the layers


def _halved(rows: int, halvings: int) -> list[int]:
    """Return ``rows``, half of them, and so on, rounded up to multiples of 8."""
    halves = (-(-rows // (8 << halving)) * 8 for halving in range(halvings + 1))
    return sorted({min(rows, half) for half in halves}, reverse=True)
