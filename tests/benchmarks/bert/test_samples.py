"""Sequences from text, against a slow and literal transcription of the published algorithm."""

import random

import numpy as np
import pytest
import small_text

from benchmarks.bert.preparation.pipeline import pick
from benchmarks.bert.preparation.sentence_pairs import (
    SampleSettings,
    create_samples,
    read_documents,
    shuffle,
    truncate,
)
from benchmarks.bert.preparation.wordpiece import WordPieceTokenizer, read_vocabulary
from common.errors import DataError


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    return small_text.write_raw(tmp_path_factory.mktemp("samples") / "raw", parts=1, documents=40)


def part_of(raw_dir):
    return raw_dir / "results4" / "part-00000-of-00001"


@pytest.fixture(scope="module")
def vocabulary(raw_dir):
    return read_vocabulary(raw_dir / "vocab.txt")


def plain_instances(text, pieces, max_seq, max_predictions, copies, seed):
    """The algorithm of the specification on strings, step by step; words come from a plain vocabulary lookup."""
    rng = random.Random(seed)
    documents = []
    for block in text.split("\n\n"):
        sentences = []
        for line in block.splitlines():
            tokens = []
            for word in line.lower().replace(".", " .").split():
                tokens += [word] if word in pieces else ["[UNK]"]
            sentences.append(tokens)
        if sentences:
            documents.append(sentences)
    rng.shuffle(documents)
    instances = []
    for _ in range(copies):
        for index in range(len(documents)):
            instances += plain_pairs(documents, index, pieces, max_seq, max_predictions, rng)
    rng.shuffle(instances)
    return instances


def plain_pairs(documents, index, pieces, max_seq, max_predictions, rng):
    document = documents[index]
    capacity = max_seq - 3
    target = rng.randint(2, capacity) if rng.random() < 0.1 else capacity
    made, chunk, position = [], [], 0
    while position < len(document):
        chunk.append(document[position])
        if position == len(document) - 1 or sum(len(sentence) for sentence in chunk) >= target:
            a_end = 1
            if len(chunk) >= 2:
                a_end = rng.randint(1, len(chunk) - 1)
            a = [token for sentence in chunk[:a_end] for token in sentence]
            is_random = True
            if len(chunk) > 1:
                is_random = rng.random() < 0.5
            if is_random:
                other = None
                tries = 0
                while tries < 10:
                    other = rng.randint(0, len(documents) - 1)
                    tries += 1
                    if other != index:
                        break
                b = []
                at = rng.randint(0, len(documents[other]) - 1)
                while at < len(documents[other]):
                    b = b + documents[other][at]
                    at += 1
                    if len(b) >= target - len(a):
                        break
                position -= len(chunk) - a_end
            else:
                b = [token for sentence in chunk[a_end:] for token in sentence]
            a, b = list(a), list(b)
            while len(a) + len(b) > capacity:
                longer = a if len(a) > len(b) else b
                if rng.random() < 0.5:
                    longer.pop(0)
                else:
                    longer.pop()
            made.append(plain_masking(a, b, is_random, pieces, max_predictions, rng))
            chunk = []
        position += 1
    return made


def plain_masking(a, b, is_random, pieces, max_predictions, rng):
    tokens = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
    segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
    places = [place for place, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(places)
    number = min(max_predictions, max(1, round(len(tokens) * 0.15)))
    labels = []
    written = list(tokens)
    for place in places[:number]:
        if rng.random() < 0.8:
            written[place] = "[MASK]"
        elif rng.random() < 0.5:
            pass
        else:
            written[place] = pieces[rng.randint(0, len(pieces) - 1)]
        labels.append((place, tokens[place]))
    labels.sort()
    return written, segments, [place for place, _ in labels], [token for _, token in labels], int(is_random)


def as_lists(sequences, pieces):
    tokens = np.split(sequences.input_ids, np.cumsum(sequences.lengths)[:-1])
    segments = np.split(sequences.segment_ids, np.cumsum(sequences.lengths)[:-1])
    positions = np.split(sequences.masked_lm_positions, np.cumsum(sequences.masked_lengths)[:-1])
    labels = np.split(sequences.masked_lm_ids, np.cumsum(sequences.masked_lengths)[:-1])
    return [
        (
            [pieces[number] for number in tokens[row]],
            segments[row].tolist(),
            positions[row].tolist(),
            [pieces[number] for number in labels[row]],
            int(sequences.next_sentence_labels[row]),
        )
        for row in range(len(sequences))
    ]


@pytest.mark.parametrize(("length", "max_masked", "seed"), [(64, 10, 12345), (32, 3, 7), (512, 76, 12345), (16, 2, 1)])
def test_every_sequence_is_that_of_the_plain_algorithm(raw_dir, vocabulary, length, max_masked, seed):
    documents = read_documents(part_of(raw_dir), WordPieceTokenizer(vocabulary))
    settings = SampleSettings(length, max_masked, copies=3, seed=seed)
    made = as_lists(create_samples(documents, vocabulary, settings), vocabulary.pieces)
    expected = plain_instances(
        part_of(raw_dir).read_text(), list(vocabulary.pieces), length, max_masked, copies=3, seed=seed
    )
    assert len(made) == len(expected) > 100
    assert made == expected


def test_one_document_pairs_with_itself(vocabulary):
    documents = [[[20, 21, 22], [23, 24]]]
    made = create_samples(documents, vocabulary, SampleSettings(32, 4, copies=20))
    assert len(made) >= 20
    assert set(made.next_sentence_labels.tolist()) == {0, 1}


@pytest.mark.parametrize("total", [0, 1, 2, 3, 100, 1025])
def test_shuffle_is_python_s(total):
    ours, theirs = list(range(total)), list(range(total))
    own_source, their_source = random.Random(5), random.Random(5)
    shuffle(ours, own_source)
    their_source.shuffle(theirs)
    assert ours == theirs
    assert own_source.random() == their_source.random()


def test_truncation_takes_from_the_longer_and_from_the_second_when_equal():
    draws = iter([0.1, 0.9, 0.1])
    first, second = truncate([1, 2, 3, 4], [5, 6, 7], 4, lambda: next(draws))
    assert (first, second) == ([3, 4], [5, 6])
    assert next(draws, None) is None


def test_masking_is_eighty_ten_ten_of_fifteen_per_cent(vocabulary):
    source = random.Random(0)
    words = range(10, len(vocabulary))
    documents = [[[source.choice(words) for _ in range(20)] for _ in range(30)] for _ in range(100)]
    made = create_samples(documents, vocabulary, SampleSettings(128, 20))
    starts = np.cumsum(made.lengths) - made.lengths
    at = np.repeat(starts, made.masked_lengths) + made.masked_lm_positions
    written, labels = made.input_ids[at], made.masked_lm_ids
    total = len(labels)
    assert total > 50_000
    masked = (written == vocabulary.mask).mean()
    kept = (written == labels).mean()
    chance = 1 / len(vocabulary)  # of a random word to be [MASK] or the word itself
    assert masked == pytest.approx(0.8 + 0.1 * chance, abs=4 * (0.16 / total) ** 0.5)
    assert kept == pytest.approx(0.1 + 0.1 * chance, abs=4 * (0.09 / total) ** 0.5)
    assert total / made.lengths.sum() == pytest.approx(0.15, abs=0.003)
    assert not np.isin(labels, [vocabulary.classification, vocabulary.separator]).any()
    assert made.masked_lm_positions.min() > 0
    random_words = written[(written != vocabulary.mask) & (written != labels)]
    assert set(random_words.tolist()) >= {0, 1, 2, 3, 4}  # special and unused pieces are drawn too


def test_masked_tokens_are_rounded_to_even_and_bounded(vocabulary):
    # 10 tokens: 1.5 -> 2; 30 tokens: 4.5 -> 4; 3 + 7 words and 3 + 27 words.
    for words, expected in ((7, 2), (27, 4)):
        documents = [[[20] * (words - 1), [21]]]
        made = create_samples(documents, vocabulary, SampleSettings(words + 3, 76, short_share=0.0, copies=50))
        full = made.lengths == words + 3
        assert full.any()
        assert set(made.masked_lengths[full].tolist()) == {expected}
    made = create_samples([[[20] * 60, [21] * 60]], vocabulary, SampleSettings(100, 5, copies=2))
    assert made.masked_lengths.max() == 5


def test_empty_lines_separate_documents_and_empty_documents_go(tmp_path, vocabulary):
    path = tmp_path / "part"
    path.write_text("\n\nThe river.\n  \n\n\u200b\n\nOld town.\nNew town.\n")
    documents = read_documents(path, WordPieceTokenizer(vocabulary))
    assert [len(document) for document in documents] == [1, 2]


def test_text_that_is_not_utf_8_is_an_error_with_its_place(tmp_path, vocabulary):
    path = tmp_path / "part"
    path.write_bytes(b"the river\n" * 3 + b"caf\xe9 in the city\n")
    with pytest.raises(DataError, match=r"part: not UTF-8 .* fetch or extract it again"):
        read_documents(path, WordPieceTokenizer(vocabulary))


def test_evaluation_picks_by_a_float_stride(tmp_path):
    n, wanted = 331_771, 10_000
    expected = [int(number * (n / 10_000)) for number in range(wanted)]
    assert pick(n, wanted, tmp_path).tolist() == expected
    assert pick(7, 7, tmp_path).tolist() == list(range(7))
    with pytest.raises(DataError, match="makes 6 sequences where 7"):
        pick(6, 7, tmp_path)
