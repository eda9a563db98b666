"""The joint network: what the encoder says of a frame and the prediction network of the tokens before, to classes.

Legend: S frames, N tokens before, with none at all, U tokens, B utterances, E P widths of both networks, J of the joint
network, V classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.rnnt.ops.joint import JOINT
from benchmarks.rnnt.ops.transducer_loss import TRANSDUCER_LOSS, joint_loss
from benchmarks.rnnt.packed_rows import PackedRows
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import OperationRequest, choose


class Joint(nn.Module):
    """``joint_net(dropout(relu(joint_enc(encoded) + joint_pred(predicted))))``, and the transducer's loss of it.

    Attributes:
        choices: implementation of each operation.
    """

    def __init__(
        self,
        encoder_width: int,
        prediction_width: int,
        width: int,
        classes: int,
        dropout: float,
        generator: torch.Generator,
        *,
        device: torch.device,
        dtype: torch.dtype,
        site: int,
        batch_split: int = 1,
        implementations: Mapping[str, str] | None = None,
    ) -> None:
        """Draw weights and biases from U(-1/sqrt(inputs), 1/sqrt(inputs)).

        Args:
            encoder_width, prediction_width, width, classes: E, P, J and V.
            dropout: probability.
            generator: on the CPU.
            device, dtype: where and in what it is going to be used; parameters are made on the CPU in fp32.
            site: number of the dropout's call site in the network.
            batch_split: rows are taken through the last layer in so many parts, which takes less memory.
            implementations: ``model.implementations``.

        Raises:
            UnsupportedImplementation: an implementation that is asked for cannot be used.
        """
        super().__init__()
        self.joint_enc = _linear(encoder_width, width, generator)
        self.joint_pred = _linear(prediction_width, width, generator)
        self.joint_net = _linear(width, classes, generator)
        self._dropout, self._site, self._parts = dropout, site, batch_split
        request = OperationRequest(device, dtype, {"width": width, "classes": classes})
        chosen = choose(implementations or {}, {"joint": JOINT, "transducer_loss": TRANSDUCER_LOSS}, request)
        self.choices = {name: choice.name for name, choice in chosen.items()}
        self._joint, self._loss = chosen["joint"].function, chosen["transducer_loss"].function

    def encoded(self, encoded: Tensor) -> Tensor:
        """The encoder's results (..., E) as f, (..., J)."""
        f: Tensor = self.joint_enc(encoded)
        return f

    def predicted(self, predicted: Tensor) -> Tensor:
        """The prediction network's results (..., P) as g, (..., J)."""
        g: Tensor = self.joint_pred(predicted)
        return g

    def logits(self, f_BJ: Tensor, g_BJ: Tensor) -> Tensor:
        """Of pairs of one f and one g, without dropout: (B, V). For decoding."""
        logits_BV: Tensor = self.joint_net(F.relu(f_BJ + g_BJ))
        return logits_BV

    def loss(self, f_SBJ: Tensor, g_NBJ: Tensor, tokens_BU: Tensor, rows: PackedRows, seed: Tensor) -> Tensor:
        """Loss of each utterance; dropout while training.

        Args:
            f_SBJ, g_NBJ: by :meth:`encoded` and :meth:`predicted`; padding is not read, and gets a gradient of zero.
            tokens_BU: integers; what lies beyond an utterance's length is not read.
            rows: of the utterances, by :func:`benchmarks.rnnt.packed_rows.packed_rows`.
            seed: of dropout; one int64 on the device.

        Returns:
            (B,) fp32, fp64 of fp64; infinite for an utterance without frames, as all are in a batch of more rows than
            ``rows`` has room for.
        """
        dropout = DropoutMask(self._dropout if self.training else 0.0, seed.reshape(()), self._site)
        weight_VJ, bias_V = self.joint_net.weight, self.joint_net.bias
        return joint_loss(
            self._joint, self._loss, f_SBJ, g_NBJ, weight_VJ, bias_V, tokens_BU, rows, dropout, self._parts
        )


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    bound = inputs**-0.5
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.uniform_(-bound, bound, generator=generator)
    return layer
