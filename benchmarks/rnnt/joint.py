"""Joint network: combines outputs of encoder and prediction network to logits of the classes.

Legend: S frames, N = U + 1 token positions, U tokens, B utterances, E and P widths of encoder and prediction network,
J width of the joint network, V classes.
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
    """Module of ``joint_net(dropout(relu(joint_enc(encoded) + joint_pred(predicted))))`` and its transducer loss.

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
            generator: CPU generator.
            device, dtype: device and dtype of later use; parameters are created on the CPU in fp32.
            site: call site of the dropout in the network.
            batch_split: number of parts in which rows go through the last layer, to save memory.
            implementations: the option ``model.implementations``.

        Raises:
            UnsupportedImplementation: a requested implementation cannot be used.
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
        """Return f (..., J) from the encoder's output (..., E)."""
        f: Tensor = self.joint_enc(encoded)
        return f

    def predicted(self, predicted: Tensor) -> Tensor:
        """Return g (..., J) from the prediction network's output (..., P)."""
        g: Tensor = self.joint_pred(predicted)
        return g

    def logits(self, f_BJ: Tensor, g_BJ: Tensor) -> Tensor:
        """Return the logits (B, V) of pairs of one f and one g, without dropout. For decoding."""
        logits_BV: Tensor = self.joint_net(F.relu(f_BJ + g_BJ))
        return logits_BV

    def loss(self, f_SBJ: Tensor, g_NBJ: Tensor, tokens_BU: Tensor, rows: PackedRows, seed: Tensor) -> Tensor:
        """Return the loss of each utterance; with dropout in training mode.

        Args:
            f_SBJ, g_NBJ: results of :meth:`encoded` and :meth:`predicted`; padding is not read, and its gradient is
                zero.
            tokens_BU: integers; not read beyond an utterance's length.
            rows: rows of the utterances, from :func:`benchmarks.rnnt.packed_rows.packed_rows`.
            seed: seed of dropout, one int64 on the device.

        Returns:
            (B,) fp32 (fp64 for fp64); infinite for utterances without frames, which includes all if the batch exceeds
            the capacity of ``rows``.
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
