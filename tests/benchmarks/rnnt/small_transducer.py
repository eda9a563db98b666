"""A small transducer for tests of decoders, and a decoder that follows the rules token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.rnnt.greedy_decoder import DecodingLimits
from benchmarks.rnnt.lstm import State

BLANK = 6
WIDTH, LAYERS, JOINT = 5, 2, 8


class SmallJoint(nn.Module):
    """Joint network: ReLU of the sum, and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(JOINT, BLANK + 1)

    def logits(self, f: Tensor, g: Tensor) -> Tensor:
        return self.last(torch.relu(f + g))


class SmallTransducer(nn.Module):
    """Transducer with random weights. ``blank`` is added to the logit of blank."""

    def __init__(self, seed: int, blank: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(BLANK, WIDTH)
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(LAYERS))
        self.to_joint = nn.Linear(WIDTH, JOINT)
        self.joint = SmallJoint()
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        with torch.no_grad():
            self.joint.last.bias[BLANK] += blank
        self.to(dtype)

    def initial_state(self, batch: int) -> State:
        zeros = self.to_joint.weight.new_zeros(LAYERS, batch, WIDTH)
        return zeros, zeros.clone()

    def predict_step(self, label_N: Tensor, state: State) -> tuple[Tensor, State]:
        y_NH = self.embedding(label_N.clamp(min=0)) * (label_N >= 0)[:, None]
        hidden, cells = [], []
        for layer, cell in enumerate(self.cells):
            y_NH, c_NH = cell(y_NH, (state[0][layer], state[1][layer]))
            hidden.append(y_NH)
            cells.append(c_NH)
        return self.to_joint(y_NH), (torch.stack(hidden), torch.stack(cells))


@torch.no_grad()
def token_by_token(model: SmallTransducer, f_SJ: Tensor, limits: DecodingLimits) -> list[int]:
    """Return the tokens of one utterance, decoded greedily as the rules describe."""
    tokens: list[int] = []
    g_1J, state = model.predict_step(torch.tensor([-1], device=f_SJ.device), model.initial_state(1))
    for f_J in f_SJ:
        for _ in range(limits.frame_symbols):
            token = int(model.joint.logits(f_J[None], g_1J).argmax())
            if token == limits.blank:
                break
            tokens.append(token)
            if len(tokens) == limits.symbols:
                return tokens
            g_1J, state = model.predict_step(torch.tensor([token], device=f_SJ.device), state)
    return tokens
