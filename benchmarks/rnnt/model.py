"""RNN-T: an encoder of the audio, a prediction network over the tokens so far, and a joint network.

Graves, arXiv:1211.3711, in the size of the MLPerf reference. Encoder: two LSTM layers, joining of every two frames,
three more layers. Prediction network: two layers over embedded tokens; its input is zero before the first token.
Joint network: sum of both, ReLU, dropout, and one layer over all classes, of which blank is the last.

The prediction network runs first. Its backward pass is therefore last, and overlaps the reduction of the encoder's
gradients, 88 % of all.

Shapes: T spliced frames, S joined frames, U tokens, N = U + 1 token positions, B utterances, F features, V classes; H,
P and J widths of encoder, prediction and joint network, L layers. All lengths are on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.rnnt.config import Facts, ModelConfig
from benchmarks.rnnt.lstm import Initial, LstmStack, State
from benchmarks.rnnt.ops.joint import JOINT
from benchmarks.rnnt.ops.transducer_loss import TRANSDUCER_LOSS, joint_loss
from benchmarks.rnnt.packed_rows import PackedRows, packed_rows
from common.ops.dropout.reference import DropoutMask
from common.ops.operation import OPTION, OperationRequest, asked_for, choose

JOINED = 2
"""Frames that the encoder joins to one."""

START = -1
"""Label before the first token, for which the input of the prediction network is zero."""

PARTS = ("pre_rnn", "post_rnn", "pred_embed", "dec_rnn", "joint_pred", "joint_enc", "joint_net")
"""Names of the network's parts in the rules' logs."""

IN_ORDER = (
    "pred_embed",
    "dec_rnn",
    "joint.joint_pred",
    "pre_rnn",
    "post_rnn",
    "joint.joint_enc",
    "joint.joint_net",
)
"""The same parts, as module names, in the order of the forward pass."""


class Joint(nn.Module):
    """Module of ``joint_net(dropout(relu(joint_enc(encoded) + joint_pred(predicted))))`` and its transducer loss.

    Args:
        generator: CPU generator. Weights and biases are drawn from U(-1/sqrt(inputs), 1/sqrt(inputs)).
        device, dtype: device and dtype of later use; parameters are created on the CPU in fp32.
        site: call site of the dropout in the network.

    Attributes:
        choices: implementation of each operation.

    Raises:
        UnsupportedImplementation: a requested implementation cannot be used.
    """

    def __init__(
        self,
        facts: Facts,
        config: ModelConfig,
        generator: torch.Generator,
        device: torch.device,
        dtype: torch.dtype,
        site: int,
    ) -> None:
        super().__init__()
        self.joint_enc = _linear(facts.encoder_width, facts.joint_width, generator)
        self.joint_pred = _linear(facts.prediction_width, facts.joint_width, generator)
        self.joint_net = _linear(facts.joint_width, facts.classes, generator)
        self._dropout, self._site, self._parts = facts.joint_dropout, site, config.batch_split
        request = OperationRequest(device, dtype, {"width": facts.joint_width, "classes": facts.classes})
        chosen = choose(config.implementations, {"joint": JOINT, "transducer_loss": TRANSDUCER_LOSS}, request)
        self.choices = {name: choice.name for name, choice in chosen.items()}
        self._joint, self._loss = chosen["joint"].function, chosen["transducer_loss"].function

    def encoded(self, encoded: Tensor) -> Tensor:
        """Return f (..., J) from the encoder's output (..., H)."""
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
        """Return the transducer loss of each utterance; with dropout in training mode.

        Args:
            f_SBJ, g_NBJ: results of :meth:`encoded` and :meth:`predicted`; padding is not read, and its gradient is
                zero.
            tokens_BU: integers; not read beyond an utterance's length.
            seed: seed of dropout, one int64 on the device.

        Returns:
            (B,) losses, fp32 (fp64 for fp64); infinite for utterances without frames. If the batch exceeds the
            capacity of ``rows``, all losses are infinite.
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


class Rnnt(nn.Module):
    """The whole network.

    Args:
        init_scale: factor of the LSTMs' drawn weights and biases.
        generator: CPU generator for the weights.
        device, dtype: device and dtype of the weights after initialisation.

    Attributes:
        choices: implementation of each operation.

    Raises:
        UnsupportedImplementation: a requested implementation cannot be used.
    """

    def __init__(
        self,
        facts: Facts,
        config: ModelConfig,
        init_scale: float,
        generator: torch.Generator,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        requested_lstm = config.implementations["lstm"]
        initial = Initial(facts.forget_bias, facts.hidden_bias_scale, init_scale)

        def stack(inputs: int, width: int, layers: int, dropout: float, real: int | None = None) -> LstmStack:
            with asked_for(f"{OPTION}.lstm", requested_lstm):
                return LstmStack(
                    inputs, width, layers, dropout, initial, generator, device, dtype, requested_lstm, real
                )

        width, predicted = facts.encoder_width, facts.prediction_width
        # Created on "meta", so that the default initialisation does not advance the global generator.
        self.pred_embed = nn.Embedding(facts.blank, predicted, device="meta").to_empty(device="cpu")
        nn.init.normal_(self.pred_embed.weight, generator=generator)
        self.dec_rnn = stack(predicted, predicted, facts.prediction_layers, facts.prediction_dropout)
        self.pre_rnn = stack(config.features, width, facts.pre_layers, facts.encoder_dropout, facts.features)
        self.post_rnn = stack(JOINED * width, width, facts.post_layers, facts.encoder_dropout)
        # Call sites of dropout: one for every layer of each LSTM, and one for the joint network.
        self._post_site = facts.pre_layers
        self._prediction_site = self._post_site + facts.post_layers
        joint_site = self._prediction_site + facts.prediction_layers
        self.joint = Joint(facts, config, generator, device, dtype, joint_site)
        self.to(device, dtype)
        lstm = "+".join(dict.fromkeys(part.choice for part in (self.pre_rnn, self.post_rnn, self.dec_rnn)))
        self.choices = {"lstm": lstm, **self.joint.choices}

    def in_order(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, in the order of the forward pass."""
        named = dict(self.named_parameters())
        return {
            name: parameter for part in IN_ORDER for name, parameter in named.items() if name.startswith(f"{part}.")
        }

    def loss(self, tensors: Mapping[str, Tensor], capacity: int | None) -> Tensor:
        """Return the negative log-likelihood of each utterance's tokens, (B,), fp32 (fp64 for fp64); capturable.

        Args:
            tensors: ``features`` (T, B, F), ``feature_lengths`` (B,), ``tokens`` (B, U), ``token_lengths`` (B,) and
                dropout's ``seed`` (1,).
            capacity: capacity of packed rows; None: the maximum for these shapes.
        """
        features_TBF, frames_B, seed = tensors["features"], tensors["feature_lengths"], tensors["seed"]
        tokens_BU, tokens_B = tensors["tokens"], tensors["token_lengths"]
        g_NBJ = self._predict(tokens_BU, tokens_B, seed)
        f_SBJ, joined_B = self._encode(features_TBF, frames_B, seed)
        rows = packed_rows(joined_B, tokens_B, len(f_SBJ), tokens_BU.shape[1], capacity)
        return self.joint.loss(f_SBJ, g_NBJ, tokens_BU, rows, seed)

    def _predict(self, tokens_BU: Tensor, tokens_B: Tensor, seed: Tensor) -> Tensor:
        embedded_UBP = self.pred_embed(tokens_BU.T)
        embedded_NBP = F.pad(embedded_UBP, (0, 0, 0, 0, 1, 0))  # zeros before the first token
        predicted_NBP = self.dec_rnn(embedded_NBP, tokens_B + 1, seed, self._prediction_site)
        return self.joint.predicted(predicted_NBP)

    def _encode(self, features_TBF: Tensor, frames_B: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        joined_B = (frames_B + JOINED - 1) // JOINED
        joined_SBK = join_frames(self.pre_rnn(features_TBF, frames_B, seed, 0))
        encoded_SBH = self.post_rnn(joined_SBK, joined_B, seed, self._post_site)
        return self.joint.encoded(encoded_SBH), joined_B

    def encode(self, features_TBF: Tensor, frames_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's input of the joint network (S, B, J), and joined frames of each utterance (B,).

        Decoding uses it in evaluation mode; in training mode dropout would be active.
        """
        seed = torch.zeros(1, dtype=torch.int64, device=features_TBF.device)
        return self._encode(features_TBF, frames_B, seed)

    def initial_state(self, utterances: int) -> State:
        """Return the state of the prediction network before the first token: (L, B, P) twice."""
        return self.dec_rnn.initial_state(utterances)

    def predict_step(self, tokens_B: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the prediction network's input of the joint network (B, J) after one more token, and the new state.

        Args:
            tokens_B: int64; :data:`START` before the first token.
            state: state before the token.
        """
        embedded_BP = self.pred_embed(tokens_B.clamp(min=0)) * (tokens_B != START).unsqueeze(1)
        predicted_BP, state = self.dec_rnn.step(embedded_BP, state)
        return self.joint.predicted(predicted_BP), state


def join_frames(x_TBH: Tensor) -> Tensor:
    """Return every two frames side by side, (ceil(T / 2), B, 2 H). An odd last frame is padded with zeros."""
    if len(x_TBH) % JOINED:
        x_TBH = F.pad(x_TBH, (0, 0, 0, 0, 0, 1))
    return x_TBH.unflatten(0, (-1, JOINED)).transpose(1, 2).flatten(2)


def training_flops(facts: Facts, frames: int, tokens: int) -> float:
    """Return the FLOPs of training on one utterance of ``frames`` spliced frames and ``tokens`` tokens.

    They count as three forward passes, with 2 FLOPs per multiply-add.
    """

    def lstm(inputs: int, width: int, layers: int) -> int:
        return 4 * width * (inputs + width + (layers - 1) * 2 * width)

    joined, steps, width, joint = -(-frames // JOINED), tokens + 1, facts.encoder_width, facts.joint_width
    products = frames * lstm(facts.features, width, facts.pre_layers)
    products += joined * lstm(JOINED * width, width, facts.post_layers)
    products += steps * lstm(facts.prediction_width, facts.prediction_width, facts.prediction_layers)
    products += joined * width * joint + steps * facts.prediction_width * joint
    products += joined * steps * joint * facts.classes
    return 6.0 * products
