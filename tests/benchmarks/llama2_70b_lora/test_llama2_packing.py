"""Examples and rows, against cases worked by hand."""

import numpy as np
import pytest
from small_rows import write_tokenizer
from tokenizers import normalizers
from transformers import LlamaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from benchmarks.llama2_70b_lora.preparation.examples import encoded, prompt
from benchmarks.llama2_70b_lora.preparation.packing import Example, pack, pieces


def test_the_prompt_is_the_reference_s_to_the_letter():
    assert prompt("A report.") == "### Summarize the following text:\n A report.\n ### Summary:\n"


def test_an_example_is_bos_prompt_space_summary_eos_and_asks_for_the_summary(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.model")

    (example,) = encoded([("water is wet", "it is")], tokenizer)

    assert (example.tokens[0], example.tokens[-1]) == (tokenizer.bos_id(), tokenizer.eos_id()) == (1, 2)
    text = tokenizer.decode(list(example.tokens[1:-1]))
    assert text == "### Summarize the following text:\n water is wet\n ### Summary:\n it is"
    scored = example.scored()
    assert tokenizer.decode([t for t, s in zip(example.tokens, scored, strict=True) if s]) == "it is"
    assert not scored[-1]


def as_published(tokenizer):
    """transformers' tokenizer of the same pieces, normalised as Llama 2's ``tokenizer.json`` says."""
    vocabulary = {tokenizer.id_to_piece(number): number for number in range(tokenizer.vocab_size())}
    scores = {piece: tokenizer.get_score(number) for piece, number in vocabulary.items()}
    theirs = LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary, scores))
    space = normalizers.Replace(" ", "\u2581")
    theirs.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    theirs.backend_tokenizer.pre_tokenizer = None
    return theirs


SPECIAL = {
    "eos": ("water</s> is wet", "it is"),
    "bos": ("<s>water is", "<s> it </s> is"),
    "unknown": ("water <unk>is", "it<unk><unk> is"),
    "adjacent": ("</s><s>", "</s>"),
    "nearly": ("< s> </ s> <S> </s", "<unk it <<s>> is"),
    "none": ("water is wet", "it is"),
}


@pytest.mark.parametrize("pair", SPECIAL.values(), ids=SPECIAL.keys())
def test_names_of_special_tokens_in_a_text_become_the_tokens_as_in_the_reference(tmp_path, pair):
    """The reference tokenizes the template with the text of EOS at its end."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.model")
    theirs = as_published(tokenizer)  # puts no BOS in front unless asked to

    (example,) = encoded([pair], tokenizer)

    assert list(example.tokens) == [
        1,
        *theirs(f"{prompt(pair[0])} {pair[1]}</s>", add_special_tokens=False)["input_ids"],
    ]
    assert example.prompt == 1 + len(theirs(prompt(pair[0]), add_special_tokens=False)["input_ids"])
    for name, token in (("<unk>", 0), ("<s>", 1), ("</s>", 2)):
        assert example.tokens[1:-1].count(token) == "".join(pair).count(name)


def test_threads_do_not_change_examples(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.model")
    pairs = [("water is " * n, "no more") for n in range(1, 300)]  # more than are tokenized at a time

    assert list(encoded(iter(pairs), tokenizer, 1)) == list(encoded(iter(pairs), tokenizer, 3))


def test_rows_are_cut_from_all_tokens_of_a_piece_and_the_remainder_is_dropped():
    examples = [Example([1, 10, 11, 12, 2], 2), Example([1, 20, 21, 2], 3), Example([1, 30, 2], 1)]

    made = pack(examples, 5, 1, answers_only=True)

    assert made.tokens.tolist() == [[1, 10, 11, 12, 2], [1, 20, 21, 2, 1]]  # 30 and 2 are dropped
    assert made.tokens.dtype == np.int32
    assert made.scored.tolist() == [[False, False, True, True, False], [False, False, False, False, False]]


def test_an_answer_goes_on_in_the_next_row():
    made = pack([Example([1, 10, 11, 12, 13, 2], 2)], 3, 1, answers_only=True)

    assert made.tokens.tolist() == [[1, 10, 11], [12, 13, 2]]
    assert made.scored.tolist() == [[False, False, True], [True, True, False]]


def test_training_rows_are_scored_everywhere():
    assert pack([Example([1, 10, 11, 2], 2)], 2, 1, answers_only=False).scored.all()


def test_each_process_s_share_is_packed_by_itself():
    examples = [Example([1, 10 * n, 2], 1) for n in range(1, 6)]

    made = pack(examples, 4, 2, answers_only=False)  # three examples, then two

    assert made.tokens.tolist() == [[1, 10, 2, 1], [20, 2, 1, 30], [1, 40, 2, 1]]


def test_no_example_makes_no_row():
    made = pack([], 4, 8, answers_only=True)
    assert made.tokens.shape == made.scored.shape == (0, 4)


@pytest.mark.parametrize(
    ("examples", "processes", "batch", "expected"),
    [
        (10, 4, 1000, [(0, 3), (3, 6), (6, 8), (8, 10)]),  # the first shares are longer by one
        (3, 8, 1000, [(0, 1), (1, 2), (2, 3)]),
        (7, 2, 3, [(0, 3), (3, 4), (4, 7)]),
        (0, 2, 3, []),
    ],
)
def test_pieces_are_those_of_the_datasets_library(examples, processes, batch, expected):
    assert [(piece.start, piece.stop) for piece in pieces(examples, processes, batch)] == expected
