"""Greedy decoding of many utterances at once.

At a frame the most probable class is taken: a token is written down, becomes the prediction network's input, and the
frame is looked at again; blank leads to the next frame. A frame that has given ``frame_symbols`` tokens is left, and an
utterance that has ``symbols`` is done. (MLPerf training rules, RNN-T; Graves, arXiv:1211.3711, section 2.4.)

Every utterance is at a place of its own, so there are no branches: each iteration does the same for all rows, and masks
say whose values change. The prediction changes with a token alone, so an iteration looks at several frames at once and
goes to the first that gives one: it takes about as many iterations as there are tokens, not tokens and frames. A few
iterations are one CUDA graph. Which utterance is the last that goes on is copied to the host after each replay and read
during the next, so that the device never waits; the last replay then changes nothing. Once the utterances behind one
are done, graphs of fewer rows follow: with the longest utterance first, rows are few for most of the time.

Legend: N utterances, S frames, A frames looked at at once, J width of the joint network, V classes, M most symbols.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from common.evaluation.forward import ForwardPass

START = -1
"""The label before the first token: the prediction network's input is then zeros."""

State = tuple[Tensor, Tensor]
"""Of the prediction network: (layers, N, width) each."""


class JointNetwork(Protocol):
    """What makes classes of frames and predictions."""

    def logits(self, f: Tensor, g: Tensor) -> Tensor:
        """(..., V) of (..., J) and (..., J), which broadcast."""


class Transducer(Protocol):
    """What is decoded: a network in evaluation mode, whose functions wait for nothing."""

    joint: JointNetwork

    def initial_state(self, batch: int) -> State:
        """Of the prediction network, before the first step."""

    def predict_step(self, label_N: Tensor, state: State) -> tuple[Tensor, State]:
        """The prediction (N, J) after one more label, int64, and the state then."""


@dataclass(frozen=True)
class Limits:
    """How decoding goes, and where it ends.

    Attributes:
        blank: the class that is no token.
        frame_symbols: tokens after which a frame is left.
        symbols: M, tokens after which an utterance is done.
    """

    blank: int
    frame_symbols: int
    symbols: int


@dataclass(frozen=True)
class Places:
    """Where each utterance is; all (N,) on the device.

    Attributes:
        time_N: the frame that is looked at next, int64.
        here_N: tokens that this frame has given, int64.
        count_N: tokens in all, int64.
        going_N: whether it goes on, bool.
    """

    time_N: Tensor
    here_N: Tensor
    count_N: Tensor
    going_N: Tensor

    def first(self, rows: int) -> Places:
        """Those of the first ``rows`` utterances."""
        return Places(*(part[:rows] for part in (self.time_N, self.here_N, self.count_N, self.going_N)))


class GreedyDecoder:
    """Decodes up to N utterances of up to S frames.

    Args:
        model: a network that is a :class:`Transducer`.
        limits: of the tokens.
        utterances, frames, width: N, S, J.
        look_ahead: A.
        unroll: iterations in one graph, and between two looks at who goes on.
        halvings: there are graphs of all rows, of half of them, and so on, this often.
        device, dtype: of the network.
        capture: replay the iterations as CUDA graphs; without a GPU they run eagerly.
        pool: memory pool that the graphs share with others, which do not run meanwhile.

    Attributes:
        f_SNJ: the encoder's part of the joint network, in; the frames from an utterance's length on are not looked at.
        length_N: frames of each utterance, int64, in; 0 for none. Best the longest first.
        token_NM: found tokens, int64, out; those from an utterance's count on mean nothing.
        count_N: how many, int64, out.
        replays: of graphs, or as many eager runs, that the last decoding took.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Limits,
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
        self._network, self._limits = cast(Transducer, model), limits
        self._look_ahead, self._unroll = look_ahead, unroll
        self.f_SNJ = torch.zeros((frames, utterances, width), dtype=dtype, device=device)
        self.length_N = torch.zeros(utterances, dtype=torch.int64, device=device)
        # What is written where no token comes goes into a column of its own.
        self._written = torch.zeros((utterances, limits.symbols + 1), dtype=torch.int64, device=device)
        self.token_NM = self._written[:, : limits.symbols]
        time_N, here_N, count_N = (torch.zeros_like(self.length_N) for _ in range(3))
        self._places = Places(time_N, here_N, count_N, torch.zeros_like(self.length_N, dtype=torch.bool))
        self.count_N = self._places.count_N
        self._row_N = torch.arange(utterances, device=device)
        self._ahead_A = torch.arange(look_ahead, device=device)
        self._start_N = torch.full_like(self.length_N, START)
        self._g_NJ = torch.zeros((utterances, width), dtype=dtype, device=device)
        hidden_LNH, cell_LNH = self._network.initial_state(utterances)
        self._state: State = (hidden_LNH.clone(), cell_LNH.clone())
        self._going_rows = torch.zeros((), dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._told = [torch.zeros((), dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in self._told] if on_gpu else []
        inputs = {"f": self.f_SNJ, "lengths": self.length_N}
        self._passes = {
            rows: ForwardPass(model, functools.partial(self._iterate, rows), inputs, capture, pool)
            for rows in _halved(utterances, halvings)
        }
        self.replays = 0

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run the iterations, and record them on a GPU."""
        self._begin()
        for forward in self._passes.values():
            forward.warm_up()

    @torch.no_grad()
    def __call__(self) -> None:
        """Decode what is in ``f_SNJ`` and ``length_N``; returns once the last tokens are on their way.

        The network is in evaluation mode and has the weights that were encoded with.
        """
        self._begin()
        self.replays, rows = 0, len(self.length_N)
        self._replay(rows)
        while rows:
            self._replay(rows)  # runs while the one before is looked at
            rows = self._rows_that_went_on()

    def close(self) -> None:
        """Free the graphs."""
        for forward in self._passes.values():
            forward.close()

    def _replay(self, rows: int) -> None:
        """Queue iterations of the first ``rows`` rows or more, and that they tell which is the last that goes on."""
        slot = self.replays % len(self._told)
        self._passes[min(of for of in self._passes if of >= rows)]()
        self._told[slot].copy_(self._going_rows, non_blocking=True)
        if self._events:
            self._events[slot].record()
        self.replays += 1

    def _rows_that_went_on(self) -> int:
        """Rows up to the last that went on after the replay before the last one; waits for that."""
        slot = self.replays % len(self._told)
        if self._events:
            self._events[slot].synchronize()
        return int(self._told[slot])

    def _begin(self) -> None:
        """Go to the first frame of every utterance."""
        places = self._places
        for numbers_N in (places.time_N, places.here_N, places.count_N):
            numbers_N.zero_()
        places.going_N.copy_(self.length_N > 0)
        g_NJ, state = self._network.predict_step(self._start_N, self._network.initial_state(len(self._start_N)))
        self._g_NJ.copy_(g_NJ)
        for kept, part in zip(self._state, state, strict=True):
            kept.copy_(part)

    def _iterate(self, rows: int, inputs: dict[str, Tensor]) -> None:
        for _ in range(self._unroll):
            self._step(rows)
        going_N = self._places.going_N[:rows]
        self._going_rows.copy_((self._row_N[:rows] + 1).where(going_N, 0).amax())

    def _step(self, rows: int) -> None:
        """The next token of each of the first ``rows`` utterances, or as many frames without one as are looked at."""
        places, limits, length_N = self._places.first(rows), self._limits, self.length_N[:rows]
        time_NA = places.time_N[:, None] + self._ahead_A
        class_NA = self._classes(time_NA)
        tells_NA = (class_NA != limits.blank) & (time_NA < length_N[:, None])
        none = self._look_ahead
        ahead_N = self._ahead_A.where(tells_NA, none).amin(dim=1)  # frames to go to the first token
        tells_N = (ahead_N < none) & places.going_N
        token_N = class_NA.gather(1, ahead_N.clamp(max=none - 1)[:, None]).squeeze(1)
        column_N = places.count_N.where(tells_N, limits.symbols)
        self._written[:rows].scatter_(1, column_N[:, None], token_N[:, None])
        # A frame that was moved to has given none before.
        here_N = (places.here_N.where(ahead_N == 0, 0) + 1).where(tells_N, 0)
        full_N = here_N == limits.frame_symbols
        places.here_N.copy_(here_N.where(~full_N, 0))
        places.time_N.add_(ahead_N + full_N)
        places.count_N.add_(tells_N)
        places.going_N.copy_((places.time_N < length_N) & (places.count_N < limits.symbols))
        self._predict(token_N, tells_N)

    def _classes(self, time_NA: Tensor) -> Tensor:
        """The most probable class of the first utterances at some frames; beyond an utterance's last one, any."""
        frames, utterances, width = self.f_SNJ.shape
        rows = len(time_NA)
        place_NA = time_NA.clamp(max=frames - 1) * utterances + self._row_N[:rows, None]
        f_NAJ = self.f_SNJ.view(-1, width).index_select(0, place_NA.flatten()).view(*place_NA.shape, width)
        return self._network.joint.logits(f_NAJ, self._g_NJ[:rows, None]).argmax(dim=-1)

    def _predict(self, token_N: Tensor, tells_N: Tensor) -> None:
        """Take one more step of the prediction network where a token came."""
        rows = len(token_N)
        g_NJ, hidden_LNH, cell_LNH = self._g_NJ[:rows], self._state[0][:, :rows], self._state[1][:, :rows]
        stepped_NJ, after = self._network.predict_step(token_N.where(tells_N, 0), (hidden_LNH, cell_LNH))
        tells_N1 = tells_N[:, None]
        pairs = [(g_NJ, stepped_NJ), (hidden_LNH, after[0]), (cell_LNH, after[1])]
        for kept, new in pairs:
            torch.where(tells_N1, new, kept, out=kept)  # broadcast over the layers


def _halved(rows: int, halvings: int) -> list[int]:
    """``rows``, half of them, and so on, in whole vectors of 8."""
    halves = (-(-rows // (8 << halving)) * 8 for halving in range(halvings + 1))
    return sorted({min(rows, half) for half in halves}, reverse=True)
