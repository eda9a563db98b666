"""Measure an evaluation of RNN-T on a GPU: ``python -m benchmarks.rnnt.evaluate_bench``.

The set is as large as dev-clean, with lengths like its utterances', and is noise that lies on the device, as audio does
from the second evaluation on. The network has random weights, but for two hidden units of the joint network, which make
it write as many tokens a second as people say. Timed are features, encoder, decoding, gathering and scoring, captured
as in a run; then some of the utterances are decoded one token after another, as the rules' reference does. Arguments
are overrides, such as ``reader.eval_batch=680`` or ``model.decode_look_ahead=8``.
"""

from __future__ import annotations

import math
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt import tokenizer
from benchmarks.rnnt.config import RnntConfig
from benchmarks.rnnt.data import PADDING, EvalBatches
from benchmarks.rnnt.decoder import START
from benchmarks.rnnt.evaluate import Transcription, WordErrorRate
from benchmarks.rnnt.model import Rnnt
from benchmarks.rnnt.preparer import Preparer
from benchmarks.rnnt.stand_in import eval_seconds
from benchmarks.rnnt.workload import SpeechRecognition
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.contract.evaluation import Predictions, Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.ops.bench.stopwatch import require_gpu

TIMES = 5
TOKENS_A_SECOND = 4.6
"""Of LibriSpeech's transcripts."""

WORDS_A_SECOND = 2.8
"""Of dev-clean's: 54,402 words in 5.4 h."""

ALONE = 12
"""Utterances that are decoded one token after another."""

OPEN, CLOSED = 4.0, -4.0
"""Biases of gates that let everything through, or nothing."""

SHIFT = 1.3
"""What a token makes the next one of its kind rarer by, and one of the other kind likelier: deviations of the audio."""


class Noise:
    """An evaluation set of noise on the device; a :class:`common.data.batches.EvalSource`.

    Args:
        samples_N: of each utterance.
        own: the workload's configuration.
        device: where the audio is.
    """

    def __init__(self, samples_N: NDArray[np.int64], own: RnntConfig, device: torch.device) -> None:
        self.eval_samples, batch = len(samples_N), own.reader.eval_batch
        shard = EvalBatches(samples_N, own.reader.eval_buckets, own.facts, batch)
        self._batches = []
        for position in range(shard.batches):
            real = shard.samples(position)
            utterance_B = np.array([*real, *[shard.stand_in] * (batch - len(real))])
            length_B = samples_N[utterance_B]
            room_B = -(-length_B // 8) * 8  # they begin where the reader's do
            offset_B = np.cumsum(room_B) - room_B
            number_B = np.where(np.arange(batch) < len(real), utterance_B, PADDING)
            tensors = {
                "audio": torch.randint(-3000, 3001, (int(room_B.sum()),), dtype=torch.int16, device=device),
                "audio_lengths": torch.from_numpy(length_B),
                "audio_offsets": torch.from_numpy(offset_B),
                "speeds": torch.ones(batch, dtype=torch.float64),
                "resampled_lengths": torch.from_numpy(length_B),
                "utterance_seeds": torch.from_numpy(utterance_B),
                "utterance": torch.from_numpy(number_B),
            }
            moved = {name: tensor.to(device) for name, tensor in tensors.items()}
            self._batches.append(HostBatch(moved, batch, position, shard.key(position)))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[HostBatch]:
        return iter(self._batches)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Measured:
    """What an evaluation takes, medians in seconds.

    Attributes:
        audio_seconds: of the set.
        tokens: that were found.
        encode: features and encoder.
        decode: greedy decoding.
        replays: of the decoder's graph in it.
        predict: all of it, with gathering, until the tokens are on the host.
        score: texts, and their word errors.
        alone: decoding of the whole set one token after another, estimated from a few utterances.
        alike: of these, how many have the same tokens.
        compared: how many these are.
    """

    audio_seconds: float
    tokens: int
    encode: float
    decode: float
    replays: int
    predict: float
    score: float
    alone: float
    alike: int
    compared: int

    @property
    def faster(self) -> float:
        """How many times as long the evaluation takes if each utterance is decoded token by token."""
        return (self.encode + self.alone + self.score) / (self.predict + self.score)


def measure(workload: SpeechRecognition, times: int = TIMES) -> Measured:
    """Evaluate made-up utterances, as many as the benchmark has."""
    own, device = workload.own, workload.layout.device
    facts, count = own.facts, workload.cfg.benchmark.eval_samples
    most = facts.largest_resampled(max(own.reader.eval_buckets))
    drawn_N = eval_seconds(count, np.random.default_rng(1)) * facts.sample_rate
    samples_N = np.minimum(drawn_N, most).astype(np.int64)
    seconds = float(samples_N.sum()) / facts.sample_rate
    source = Noise(samples_N, own, device)
    preparer = Preparer(facts, own.model.features, own.model.implementations["audio"], device, workload.dtype)
    evaluation = Transcription(
        workload.model, own, lambda root: source, count, workload.layout, preparer, workload.cfg.cuda_graphs
    )
    give_weights(workload.model)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):
        evaluation.warm_up()
        evaluation.open_data(Path())
        workload.model.eval()
        find_rate(workload.model, evaluation, round(TOKENS_A_SECOND * seconds))
        weights = Weights({name: weight.detach().clone() for name, weight in workload.model.named_parameters()})
        encode = _median(evaluation.encode, times, stream)
        decode = _median(evaluation.decoder, times, stream)
        alone, alike, compared = one_after_another(workload.model, evaluation, stream)
        workload.model.train()
        predictions: list[Predictions | None] = []
        predict = _median(lambda: predictions.append(evaluation.predict(weights)), times, stream)
    found = predictions[-1]
    assert found is not None, "there is one rank"
    scorer = scorer_of(round(WORDS_A_SECOND * seconds / count), count, facts.blank)
    score = _median(lambda: scorer.score(found), times, None)
    replays = evaluation.decoder.replays
    evaluation.close()
    return Measured(
        audio_seconds=seconds, tokens=len(found.values["tokens"]), encode=encode, decode=decode,
        replays=replays, predict=predict, score=score, alone=alone, alike=alike, compared=compared,
    )  # fmt: skip


@torch.no_grad()
def give_weights(model: Rnnt) -> None:
    """Draw weights with which a token comes whenever something in the audio has gone up, or down, since the last one.

    Even tokens are of the one kind, odd ones of the other. The prediction network's first feature says of which kind
    the last token was, and the joint network's first two units compare that with a direction of what the encoder says.
    Everything else is random, and says which token of a kind it is.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        deviation = parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
    for stack in (model.pre_rnn, model.post_rnn):
        for layer in range(stack.layers):
            stack.weights(layer).ih_GI.mul_(2.0)
            stack.weights(layer).bias_ih_G[stack.width : 2 * stack.width] = CLOSED  # noise has no memory
    rnn, joint = model.dec_rnn, model.joint
    for layer in range(rnn.layers):
        weights = rnn.weights(layer)
        weights.hh_GH.zero_()
        for gate, bias in enumerate((OPEN, CLOSED, 0.0, OPEN)):
            rows = slice(gate * rnn.width, (gate + 1) * rnn.width)
            weights.bias_ih_G[rows] = bias
            if bias:
                weights.ih_GI[rows] = 0.0
        first = 2 * rnn.width  # the first feature of what a cell takes in
        weights.ih_GI[first] = 0.0
        weights.ih_GI[first, 0] = OPEN
        weights.bias_hh_G.zero_()
    kind_V = 1.0 - 2.0 * (torch.arange(len(model.pred_embed.weight)) % 2).to(model.pred_embed.weight)
    model.pred_embed.weight[:, 0] = kind_V
    _, state = model.predict_step(torch.zeros(1, dtype=torch.int64, device=kind_V.device), model.initial_state(1))
    said = float(state[0][-1, 0, 0])
    joint.joint_enc.weight[1] = -joint.joint_enc.weight[0]
    joint.joint_pred.weight[:2] = 0.0
    joint.joint_pred.weight[0, 0], joint.joint_pred.weight[1, 0] = -SHIFT / said, SHIFT / said
    joint.joint_net.weight[:, :2] = 0.0
    joint.joint_net.weight[:-1, 0] = 20.0 * (kind_V > 0)
    joint.joint_net.weight[:-1, 1] = 20.0 * (kind_V < 0)
    joint.joint_net.bias[-1] = 8.0  # more than what is random comes to


@torch.no_grad()
def find_rate(model: Rnnt, evaluation: Transcription, tokens: int, steps: int = 12) -> None:
    """Choose how far the audio must go up or down, so that all utterances together have about so many tokens.

    Raises:
        RuntimeError: what the encoder says is not finite.
    """
    decoder, joint = evaluation.decoder, model.joint
    joint.joint_enc.bias[:2] = 0.0
    evaluation.encode()
    real_SN = torch.arange(len(decoder.f_SNJ), device=decoder.length_N.device)[:, None] < decoder.length_N
    heard = decoder.f_SNJ[:, :, 0][real_SN].float()
    deviation, mean = float(heard.std()), float(heard.mean())
    if not math.isfinite(deviation):
        raise RuntimeError("the encoder gives numbers that are not finite: its LSTM or the features are wrong")
    joint.joint_enc.weight[:2] /= deviation
    joint.joint_enc.bias[0], joint.joint_enc.bias[1] = -mean / deviation, mean / deviation
    evaluation.encode()
    low, high = -4.0, 4.0
    for _ in range(steps):
        joint.joint_pred.bias[:2] = -SHIFT - (low + high) / 2
        decoder()
        if int(decoder.count_N.sum()) > tokens:
            low = (low + high) / 2
        else:
            high = (low + high) / 2


@torch.no_grad()
def one_after_another(
    model: Rnnt, evaluation: Transcription, stream: torch.cuda.Stream | None
) -> tuple[float, int, int]:
    """Seconds of the set token by token, by those of a few utterances; how many of these are alike; how many they are.

    A step is a look at a frame: there are as many as frames and tokens.
    """
    decoder, limits = evaluation.decoder, evaluation.limits
    lengths, counts, written = decoder.length_N.tolist(), decoder.count_N.tolist(), decoder.token_NM.tolist()
    real = [row for row, length in enumerate(lengths) if length]
    chosen = real[:: max(1, len(real) // ALONE)][:ALONE]
    seconds, steps, alike = 0.0, 0, 0
    for row in chosen:
        f_SJ = decoder.f_SNJ[: lengths[row], row].clone()
        token_by_token(model, f_SJ[:2], limits.blank, limits.frame_symbols, limits.symbols)
        if stream is not None:
            stream.synchronize()
        began = time.perf_counter()
        tokens = token_by_token(model, f_SJ, limits.blank, limits.frame_symbols, limits.symbols)
        seconds += time.perf_counter() - began
        steps += lengths[row] + len(tokens)
        alike += tokens == written[row][: counts[row]]
    return seconds / steps * (sum(lengths) + sum(counts)), alike, len(chosen)


def token_by_token(model: Rnnt, f_SJ: Tensor, blank: int, frame_symbols: int, symbols: int) -> list[int]:
    """The tokens of one utterance as the rules' reference finds them: the host asks for each."""
    tokens: list[int] = []
    g_1J, state = model.predict_step(torch.full((1,), START, device=f_SJ.device), model.initial_state(1))
    for f_J in f_SJ:
        for _ in range(frame_symbols):
            best = int(model.joint.logits(f_J[None], g_1J).argmax())
            if best == blank:
                break
            tokens.append(best)
            if len(tokens) == symbols:
                return tokens
            g_1J, state = model.predict_step(torch.full((1,), best, device=f_SJ.device), state)
    return tokens


def scorer_of(words: int, utterances: int, vocabulary: int) -> WordErrorRate:
    """A scorer that expects so many utterances of so many words each, of a tokenizer made for it."""
    random = np.random.default_rng(1)
    letters = np.array(list(string.ascii_lowercase))
    spoken = ["".join(random.choice(letters, random.integers(1, 9))) for _ in range(4000)]
    texts = [
        " ".join(spoken[place] for place in random.integers(len(spoken), size=max(1, words))) for _ in range(utterances)
    ]
    scorer = WordErrorRate(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.model")
        path.write_bytes(tokenizer.train([*texts, *spoken], vocabulary))
        scorer.expect(texts, tokenizer.Tokenizer(path, vocabulary))
    return scorer


def _median(function: Callable[[], object], times: int, stream: torch.cuda.Stream | None) -> float:
    """Seconds that ``function`` takes until the stream is done with it, after a first time."""
    found = []
    for _ in range(1 + times):
        began = time.perf_counter()
        function()
        if stream is not None:
            stream.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def main(arguments: Sequence[str]) -> None:
    """Print what an evaluation takes with the overrides that ``arguments`` are.

    Raises:
        SystemExit: PyTorch sees no GPU.
    """
    require_gpu("benchmarks.rnnt.evaluate_bench")
    torch.backends.cudnn.benchmark = True
    run, _ = loading.load(compose(["benchmark=rnnt", "scale=1xH200", *arguments]), lambda _: SpeechRecognition)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {run.precision}")
    print(described(run, measure(SpeechRecognition(run, Layout(run.layout, device=torch.device("cuda"), seed=1)))))


def described(run: RunConfig, found: Measured) -> str:
    """The lines that tell of it."""
    own: RnntConfig = run.workload
    total = found.predict + found.score
    return (
        f"{run.benchmark.eval_samples:,} utterances of {found.audio_seconds / 3600:.2f} h, {found.tokens:,} tokens, in "
        f"batches of {own.reader.eval_batch}, {own.model.decode_look_ahead} frames at a look, "
        f"{own.model.decode_unroll} looks a graph\n"
        f"an evaluation: {total:.3f} s, of which {found.score:.3f} s score what was recognised\n"
        f"features and encoder {found.encode:.3f} s; decoding {found.decode:.3f} s in {found.replays} replays; all "
        f"until the tokens are on the host {found.predict:.3f} s\n"
        f"decoded token by token: about {found.alone:.0f} s, so that an evaluation took {found.faster:.0f} times as "
        f"long; {found.alike} of {found.compared} utterances have the same tokens"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
