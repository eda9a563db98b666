"""Word error rate against hand-worked cases, the textbook's table and jiwer."""

from __future__ import annotations

import random

import pytest

from benchmarks.rnnt.wer import CHUNK, WordErrors


def table_distance(reference: list[str], hypothesis: list[str]) -> int:
    """Wagner and Fischer (1974), cell by cell."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, said in enumerate(hypothesis, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != said))
    return row[-1]


def made_up(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Sentences of 0 to 30 words of a small alphabet, the first not empty, and as many that are like some of them."""
    random.seed(seed)
    references, hypotheses = ["a"], ["b a"]
    while len(references) < count:
        words = random.choices("abcdefg", k=random.randrange(31))
        heard = [w for word in words for w in random.choice(([word],) * 6 + ([], ["x"], [word, "y"]))]
        references.append(" ".join(words))
        hypotheses.append(" ".join(random.choice((heard, heard, heard, random.choices("abc", k=40), []))))
    return references, hypotheses


@pytest.mark.parametrize(
    ("reference", "hypothesis", "edits"),
    [
        ("the cat sat", "the cat sat", 0),
        ("the cat sat", "the bat sat", 1),
        ("the cat sat", "cat sat", 1),
        ("the cat sat", "the cat cat sat", 1),
        ("the cat sat", "", 3),
        ("the cat sat", "a a a a a a", 6),
        ("", "noise where nobody speaks", 4),
        ("", "", 0),
        ("a b c d", "b c d a", 2),
        ("  the   cat ", "the\tcat", 0),
        ("it's", "its", 1),
        ("ab c", "a bc", 2),
    ],
)
def test_a_pair_by_hand(reference, hypothesis, edits):
    assert WordErrors([reference, "sure"]).edits([hypothesis, "sure"]) == edits


def test_edits_and_words_are_summed_before_they_are_divided():
    errors = WordErrors(["one two three four five six seven eight", "nine ten"])
    assert errors.words == 10
    assert errors.rate(["one two three four five six seven eight", "x"]) == 2 / 10  # the mean of rates is 1 / 2


def test_the_rate_can_exceed_one():
    assert WordErrors(["no"]).rate(["well I never said so"]) == 5.0


def test_nothing_but_blanks_is_a_rate_of_one():
    assert WordErrors(["a b", "c"]).rate(["", ""]) == 1.0


def test_many_utterances_follow_the_table():
    references, hypotheses = made_up(2 * CHUNK + 17, seed=3)
    pairs = zip(references, hypotheses, strict=True)
    expected = sum(table_distance(reference.split(), hypothesis.split()) for reference, hypothesis in pairs)
    errors = WordErrors(references)
    assert errors.edits(hypotheses) == expected
    assert errors.edits(references) == 0, "the second time it counts anew"


def test_jiwer_says_the_same():
    jiwer = pytest.importorskip("jiwer")
    spoken = [(reference, heard) for reference, heard in zip(*made_up(300, 4), strict=True) if reference]
    references, hypotheses = [reference for reference, _ in spoken], [heard for _, heard in spoken]
    assert WordErrors(references).rate(hypotheses) == pytest.approx(jiwer.wer(references, hypotheses), rel=1e-12)


def test_hypotheses_of_another_set_are_refused():
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        WordErrors(["a", "b"]).edits(["a"])


def test_references_without_a_word_are_refused():
    with pytest.raises(ValueError, match="2 references without a word"):
        WordErrors(["", " "])
