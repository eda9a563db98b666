"""Stack of LSTM layers with dropout after each.

Parameters have the names and shapes of ``torch.nn.LSTM``, so its weights can be loaded.

Legend: T frames, B rows, I inputs, H width, L layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.rnnt.ops import lstm
from benchmarks.rnnt.ops.lstm import LstmWeights
from common.ops import dropout
from common.ops.operation import AUTO, OperationRequest

_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

State = tuple[Tensor, Tensor]
"""Hidden and cell state, (L, B, H) each."""


class Initial(NamedTuple):
    """Initialisation of the weights: uniform within ``1 / sqrt(H)``, then the following changes in this order.

    Attributes:
        forget_bias: value of the forget gates' ``bias_ih``.
        hidden_bias_scale: factor of the forget gates' ``bias_hh``.
        scale: factor of all parameters.
    """

    forget_bias: float
    hidden_bias_scale: float
    scale: float


class LstmStack(nn.Module):
    """LSTM layers, each followed by dropout in training mode.

    Args:
        inputs, width, layers: I, H, L.
        dropout_p: probability of dropout between layers and after the last.
        generator: CPU generator for the initial weights.
        implementation: requested implementation of :mod:`benchmarks.rnnt.ops.lstm`.
        real_inputs: number of inputs that are not padding, which are the first ones; None: all. The others must be
            zero in every frame.

    Attributes:
        choice: name of the chosen implementation.

    Raises:
        UnsupportedImplementation: the requested implementation cannot be used.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        layers: int,
        dropout_p: float,
        initial: Initial,
        generator: torch.Generator,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        implementation: str = AUTO,
        real_inputs: int | None = None,
    ) -> None:
        super().__init__()
        self._real_inputs = inputs if real_inputs is None else real_inputs
        self.inputs, self.width, self.layers, self.dropout = inputs, width, layers, dropout_p
        for layer in range(layers):
            of_layer = inputs if layer == 0 else width
            for kind in _KINDS:
                shape = {"weight_ih": (4 * width, of_layer), "weight_hh": (4 * width, width)}.get(kind, (4 * width,))
                self.register_parameter(f"{kind}_l{layer}", nn.Parameter(torch.empty(shape)))
        self.draw(initial, generator)
        self.to(device, dtype)
        device = self.weights(0).ih_GI.device
        requests = [
            OperationRequest(device, dtype, {"inputs": of_layer, "width": width})
            for of_layer in (inputs, width)[: min(layers, 2)]
        ]
        chosen = [lstm.LSTM.select(implementation, request) for request in requests]
        self.choice = ", ".join(dict.fromkeys(each.name for each in chosen))
        self._functions = [chosen[min(layer, 1)].function for layer in range(layers)]
        self._drop = dropout.DROPOUT.select(AUTO, OperationRequest(device, dtype)).function

    @torch.no_grad()
    def draw(self, initial: Initial, generator: torch.Generator) -> None:
        """Draw the initial weights.

        Columns of ``weight_ih_l0`` for padding start at zero. Their gradient is zero because the inputs are, so they
        stay zero and do not change any norm: updates are the same as without these columns.
        """
        bound = 1 / math.sqrt(self.width)
        forget = slice(self.width, 2 * self.width)
        for layer in range(self.layers):
            weights = self.weights(layer)
            real = self._real_inputs if layer == 0 else self.width
            weights.ih_GI[:, real:] = 0.0
            for weight in (weights.ih_GI[:, :real], *weights[1:]):
                weight.uniform_(-bound, bound, generator=generator)
            weights.bias_ih_G[forget] = initial.forget_bias
            weights.bias_hh_G[forget] *= initial.hidden_bias_scale
            for weight in weights:
                weight *= initial.scale

    def weights(self, layer: int) -> LstmWeights:
        """Return the parameters of one layer."""
        return LstmWeights(*(self.get_parameter(f"{kind}_l{layer}") for kind in _KINDS))

    def forward(self, x_TBI: Tensor, lengths_B: Tensor, seed: Tensor, site: int) -> Tensor:
        """Return the output of the last layer: (T, B, H), 0 beyond each row's length.

        Args:
            lengths_B: frames of each row, int32 on the device.
            seed: seed of dropout, one int64 on the device; only read in training.
            site: call site of the first layer's dropout in the network; the other layers use the next numbers.
        """
        y = x_TBI
        seed = seed.reshape(())
        p = self.dropout if self.training else 0.0
        for layer, function in enumerate(self._functions):
            y = function(y, self.weights(layer), lengths_B)
            if p:
                y = self._drop(y, p, seed, site + layer)
        return y

    def initial_state(self, batch: int) -> State:
        """Return the zero state before the first frame, (L, B, H) each."""
        like = self.weights(0).hh_GH
        return like.new_zeros(self.layers, batch, self.width), like.new_zeros(self.layers, batch, self.width)

    def step(self, x_BI: Tensor, state: State) -> tuple[Tensor, State]:
        """Process one more frame, without dropout, for decoding.

        Args:
            state: state before the frame, (L, B, H) each.

        Returns:
            The output of the last layer, (B, H), and the new state.
        """
        y_BH, states = x_BI, []
        for layer in range(self.layers):
            before = [part_LBH[layer] for part_LBH in state]
            after: tuple[Tensor, Tensor] = torch._VF.lstm_cell(y_BH, before, *self.weights(layer))
            y_BH = after[0]
            states.append(after)
        h, c = zip(*states, strict=True)
        return y_BH, (torch.stack(h), torch.stack(c))
