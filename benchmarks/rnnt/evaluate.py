"""RNN-T's evaluation: word error rate of the whole set, decoded greedily.

Rules: after every epoch, all utterances of dev-clean at their full length, with averaged weights; at most 30 tokens
per frame and 300 per utterance; errors and words are summed over the set (MLPerf training_rules, benchmark table; the
reference's evaluation).

Batches of utterances of similar length go through the encoder one after another. The outputs of all batches are kept
and then decoded together.

Word errors of an utterance are the minimum number of substitutions, insertions and deletions of words (Levenshtein
distance). The rate divides by the words of all references, so it can exceed 1.

Legend: N utterances of this rank, rounded up to whole batches, B of a batch, T spliced frames, S frames after the
encoder, F features, J width of the joint network, M maximum tokens, R words of a reference, W words of a hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.rnnt.config import RnntConfig
from benchmarks.rnnt.data import PADDING, FeaturePreparer
from benchmarks.rnnt.greedy_decoder import DecodingLimits, GreedyDecoder
from benchmarks.rnnt.model import JOINED, Rnnt
from benchmarks.rnnt.prepared import open_prepared
from benchmarks.rnnt.tokenizer import TranscriptTokenizer
from common.contract.evaluation import Evaluation, Predictions, Scorer, Weights
from common.data.batches import EvalSource
from common.distributed.layout import Layout
from common.errors import DataError
from common.evaluation.counts import check_whole_set
from common.evaluation.forward import ForwardPass, evaluating

CHUNK = 256
"""Number of utterances, of similar length, that are compared at once."""

_NOWHERE, _NO_REFERENCE, _NO_HYPOTHESIS = -1, -2, -3
"""Numbers for words that occur in no reference, and for padding."""


class WordErrors:
    """Counter of word errors against fixed references.

    Args:
        references: transcript of each utterance; words are separated by white space.

    Attributes:
        words: number of words of all references.

    Raises:
        ValueError: the references have no word.
    """

    def __init__(self, references: Sequence[str]) -> None:
        self._numbers: dict[str, int] = {}
        self._references = [
            [self._numbers.setdefault(word, len(self._numbers)) for word in text.split()] for text in references
        ]
        self.words = sum(len(reference) for reference in self._references)
        if not self.words:
            raise ValueError(f"{len(references)} references have no words, so no error rate exists")
        # Utterances of similar length are compared together, which needs little padding.
        lengths = np.array([len(reference) for reference in self._references])
        longest_first = np.argsort(-lengths, kind="stable")
        self._chunks = [longest_first[at : at + CHUNK].tolist() for at in range(0, len(longest_first), CHUNK)]

    def edits(self, hypotheses: Sequence[str]) -> int:
        """Return the word errors of ``hypotheses``, which are in the order of the references.

        Raises:
            ValueError: the number of hypotheses differs from that of the references.
        """
        if len(hypotheses) != len(self._references):
            raise ValueError(f"{len(hypotheses)} hypotheses for {len(self._references)} references")
        # Words that occur in no reference are always wrong.
        numbered = [[self._numbers.get(word, _NOWHERE) for word in text.split()] for text in hypotheses]
        return sum(
            int(_distances([self._references[i] for i in chunk], [numbered[i] for i in chunk]).sum())
            for chunk in self._chunks
        )

    def rate(self, hypotheses: Sequence[str]) -> float:
        """Return the word error rate of ``hypotheses``."""
        return self.edits(hypotheses) / self.words


def _distances(references: Sequence[Sequence[int]], hypotheses: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the distance of each pair, (N,). References must be sorted by length, the longest first.

    Each step computes a row of the Wagner-Fischer table, for one more word of each reference and all utterances.
    Insertions in a row, d[w] = min over v <= w of (t[v] + w - v), are a running minimum of t[v] - v, whose range
    doubles at each step.
    """
    reference_RN, lengths_N = _padded(references, _NO_REFERENCE)
    hypothesis_WN, widths_N = _padded(hypotheses, _NO_HYPOTHESIS)
    index_W1 = np.arange(len(hypothesis_WN) + 1, dtype=np.int32)[:, None]
    distance_WN = np.repeat(index_W1, len(references), axis=1)
    for word, reference_N in enumerate(reference_RN):
        active = int(np.count_nonzero(lengths_N > word))  # a prefix, because the longest come first
        before_WN, wrong_WN = distance_WN[:, :active], hypothesis_WN[:, :active] != reference_N[:active]
        found_WN = before_WN + 1
        np.minimum(found_WN[1:], before_WN[:-1] + wrong_WN, out=found_WN[1:])
        found_WN -= index_W1
        reach = 1
        while reach < len(found_WN):
            np.minimum(found_WN[reach:], found_WN[:-reach], out=found_WN[reach:])
            reach *= 2
        np.add(found_WN, index_W1, out=before_WN)
    return distance_WN[widths_N, np.arange(len(references))]


def _padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the rows, padded, as columns of one array, and the length of each."""
    lengths_N = np.array([len(row) for row in rows])
    padded = np.full((len(rows), int(lengths_N.max(initial=0))), padding, dtype=np.int32)
    padded[np.arange(padded.shape[1]) < lengths_N[:, None]] = [number for row in rows for number in row]
    return np.ascontiguousarray(padded.T), lengths_N


class WordErrorRate(Scorer):
    """Scorer that converts tokens to text and counts wrong words.

    Args:
        vocabulary: required number of word pieces of the tokenizer.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: TranscriptTokenizer | None = None
        self._errors: WordErrors | None = None
        self._utterances = 0

    def warm_up(self) -> None:
        """Count word errors once."""
        WordErrors(["a b"]).rate(["b"])

    def open_data(self, root: Path) -> None:
        """Load the tokenizer and the reference transcripts.

        Raises:
            DataError: a file is missing or damaged, the vocabulary differs, or the transcripts have no words.
        """
        prepared = open_prepared(root)
        prepared.require_vocabulary(self._vocabulary)
        try:
            transcripts = prepared.split("eval").transcripts()
            self._errors, self._utterances = WordErrors(transcripts), len(transcripts)
        except ValueError as error:
            raise DataError(f"the evaluation set in {root} has no words: {error}") from error
        self._tokenizer = prepared.tokenizer()

    def score(self, predictions: Predictions) -> dict[str, float]:
        """Return ``word_error_rate``, word errors divided by words, and ``eval_samples``, the utterances.

        Raises:
            RuntimeError: an utterance was not recognised, or more than once.
        """
        assert self._tokenizer is not None, "open_data comes first"
        assert self._errors is not None
        utterance_N, tokens = predictions.values["utterance"], predictions.values["tokens"]
        check_whole_set(len(np.unique(utterance_N)), self._utterances, "utterances")
        check_whole_set(len(utterance_N), self._utterances, "utterances")
        ends_N = np.cumsum(predictions.values["token_lengths"])
        starts_N = ends_N - predictions.values["token_lengths"]
        rows = np.argsort(utterance_N).tolist()
        hypotheses = self._tokenizer.decode([tokens[starts_N[row] : ends_N[row]].tolist() for row in rows])
        return {"word_error_rate": self._errors.rate(hypotheses), "eval_samples": len(utterance_N)}


class Transcription(Evaluation):
    """Evaluation that recognises every utterance once. It can use the network that is being trained.

    Args:
        open_source: opens this rank's share of the evaluation set in a data folder.
        eval_samples: utterances of the set, over all ranks.
        layout: ranks that share the set.
        capture: whether to replay encoder and decoder as CUDA graphs.

    Attributes:
        decoder: decoder of all the rank's utterances.
    """

    def __init__(
        self,
        model: Rnnt,
        own: RnntConfig,
        open_source: Callable[[Path], EvalSource],
        eval_samples: int,
        layout: Layout,
        preparer: FeaturePreparer,
        capture: bool,
    ) -> None:
        facts, reader, device = own.facts, own.reader, layout.device
        self.scorer = WordErrorRate(facts.blank)
        self._model, self._open_source, self._preparer, self._layout = model, open_source, preparer, layout
        self._eval_samples = eval_samples
        self._source: EvalSource | None = None
        self._kept: list[tuple[int, dict[str, Tensor]]] = []
        self._batch, self._buckets = reader.eval_batch, reader.eval_buckets
        self._batches = -(-eval_samples // (self._batch * layout.size("dp")))
        self._group = layout.group("dp")
        dtype = next(model.parameters()).dtype
        # Passes run one after another, so they share a pool and the first frames of one input.
        most = max(self._buckets)
        features_TBF = torch.zeros((most, self._batch, own.model.features), dtype=dtype, device=device)
        length_B = torch.zeros(self._batch, dtype=torch.int32, device=device)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._encoders = {
            frames: ForwardPass(
                model,
                self._encode,
                {"features": features_TBF[:frames], "feature_lengths": length_B},
                capture,
                pool,
            )
            for frames in self._buckets
        }
        self._length_B = length_B
        self.decoder = GreedyDecoder(
            model,
            DecodingLimits(facts.blank, facts.max_frame_symbols, facts.max_symbols),
            self._batches * self._batch,
            -(-most // JOINED),
            facts.joint_width,
            device,
            dtype,
            capture=capture,
            pool=pool,
        )
        self._utterance_N = torch.full_like(self.decoder.length_N, PADDING)

    def warm_up(self) -> None:
        """Run features, encoder and decoder on noise, and gather tokens. All ranks must call this."""
        if self._layout.device.type == "cuda":
            self._preparer.warm_up(self._batch, [(frames, 0) for frames in self._buckets], training=False)
        for frames in sorted(self._buckets, reverse=True):  # largest first, so that the others fit into its memory
            self._length_B.fill_(frames)
            self._encoders[frames].warm_up()
        self.decoder.length_N.fill_(self.decoder.f_SNJ.shape[0])
        self.decoder.warm_up()
        self._gathered()

    def open_data(self, root: Path) -> None:
        """Open this rank's share of the evaluation set.

        Raises:
            DataError: it is missing or damaged, or has the wrong number of utterances.
        """
        self._source = self._open_source(root)
        if self._source.eval_samples != self._eval_samples:
            raise DataError(
                f"{root} has {self._source.eval_samples:,} utterances to evaluate, where there must be "
                f"{self._eval_samples:,}"
            )

    def predict(self, weights: Weights) -> Predictions | None:
        """Return ``utterance``, ``token_lengths`` and ``tokens`` (joined) on rank 0, None on others. Collective."""
        with evaluating(self._model, weights):
            self.encode()
            self.decoder()
        found = self._gathered()
        if self._layout.rank:
            return None
        rows_NX = found.cpu().numpy()
        rows_NX = rows_NX[rows_NX[:, 0] != PADDING]
        count_N, token_NM = rows_NX[:, 1], rows_NX[:, 2:]
        real_NM = np.arange(token_NM.shape[1]) < count_N[:, None]
        return Predictions({"utterance": rows_NX[:, 0], "token_lengths": count_N, "tokens": token_NM[real_NM]})

    @torch.no_grad()
    def encode(self) -> None:
        """Run the encoder on this rank's utterances, and write its outputs to the decoder's inputs."""
        decoder = self.decoder
        decoder.length_N.zero_()
        self._utterance_N.fill_(PADDING)
        for number, (frames, batch) in enumerate(self._host_batches()):
            tensors = self._preparer.tensors(batch, frames, training=False)
            f_SBJ, length_B = self._encoders[frames](tensors)
            rows = slice(number * self._batch, (number + 1) * self._batch)
            decoder.f_SNJ[: len(f_SBJ), rows].copy_(f_SBJ)
            self._utterance_N[rows].copy_(tensors["utterance"])
            decoder.length_N[rows].copy_(length_B * (tensors["utterance"] != PADDING))

    def close(self) -> None:
        """Free the graphs, close the reader and drop the audio."""
        self.decoder.close()
        for encoder in self._encoders.values():
            encoder.close()
        self._kept = []
        if self._source is not None:
            self._source.close()

    def _encode(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._model.encode(inputs["features"], inputs["feature_lengths"])

    def _host_batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield frames and tensors of each batch; the first evaluation keeps them on the device."""
        assert self._source is not None, "open_data comes first"
        if self._kept:
            yield from self._kept
            return
        kept = []
        for host in self._source:
            assert isinstance(host.key, tuple)
            frames: int = host.key[1]
            tensors = {name: tensor.to(self._layout.device, non_blocking=True) for name, tensor in host.tensors.items()}
            kept.append((frames, tensors))
            yield kept[-1]
        self._kept = kept

    def _gathered(self) -> Tensor:
        """Return (N of all ranks, 2 + M) int32: per row an utterance's index, its number of tokens, and its tokens."""
        columns = [self._utterance_N[:, None], self.decoder.count_N[:, None], self.decoder.token_NM]
        own_NX = torch.cat(columns, dim=1).to(torch.int32)
        if self._group is None:
            return own_NX
        every_NX = own_NX.new_empty(self._layout.size("dp") * len(own_NX), own_NX.shape[1])
        dist.all_gather_into_tensor(every_NX, own_NX, group=self._group)
        return every_NX
