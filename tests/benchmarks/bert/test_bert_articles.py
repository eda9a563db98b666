"""From extracted articles to text parts: markup, sentences, held-out articles."""

import random

import pytest

from benchmarks.bert.preparation.articles import clean, read_articles
from benchmarks.bert.preparation.holdout import assign, held_out, join, split_file
from benchmarks.bert.preparation.sentences import SentenceSplitter
from common.errors import DataError


def article(number, title, *paragraphs):
    body = "\n\n".join(paragraphs)
    url = f"https://en.wikipedia.org/wiki?curid={number}"
    return f'<doc id="{number}" url="{url}" title="{title}">\n{title}\n\n{body}\n\n</doc>\n'


def test_articles_come_without_tags_and_titles(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(
        article(12, 'The "River" <1>', "It flows.", 'The "River" <1>', "")
        + article(13, "Void")
        + article(14, "T", "End.")
    )
    found = [(item.title, item.paragraphs) for item in read_articles(path)]
    assert found == [('The "River" <1>', ["It flows.", 'The "River" <1>']), ("Void", []), ("T", ["End."])]


def test_a_title_with_entities_goes_too(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(article(1, "AT&amp;T", "A company.").replace("\nAT&amp;T\n", "\nAT&T\n"))
    assert [item.paragraphs for item in read_articles(path)] == [["A company."]]


@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        ("no markup [at all] here", "no markup at all here"),
        ("the [[river]] and the [[Old Town|town]]", "the river and the town"),
        ("a [[one|two [[three|four]]]] b", "a two four b"),
        ("[[Category:Rivers of France]]", ""),
        ("see [[File:map.png|thumb|a map]] there", "see  there"),
        ("x<ref>Smith 1999</ref> y<ref name=a/> z<br>", "x y z"),
        ("water H<sub>2</sub>O <math>x < 2</math>", "water H2O x < 2"),
        ("<https://example.org> 1 < 2 > 0", "1 < 2 > 0"),
        ("<templatestyles src='x'/>Text", "Text"),
    ],
)
def test_markup_goes_and_words_stay(markup, plain):
    assert clean(markup) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words\n" + article(1, "T", "x"), "line 1 is outside"),
        (article(1, "T", "x").replace("</doc>\n", ""), "ends within the article 'T'"),
    ],
)
def test_other_files_are_errors(tmp_path, text, message):
    (tmp_path / "wiki_00").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_articles(tmp_path / "wiki_00"))


def test_articles_that_are_not_utf_8(tmp_path):
    (tmp_path / "wiki_00").write_bytes(article(1, "T", "x").encode() + b"\xe9\n")
    with pytest.raises(DataError, match="wiki_00 is not UTF-8"):
        list(read_articles(tmp_path / "wiki_00"))


def test_sentences_end_at_full_stops():
    splitter = SentenceSplitter(None)
    assert splitter.split("It rains. Does it? Yes!\tIt\u00a0does.") == ["It rains.", "Does it?", "Yes!", "It does."]
    assert splitter.split("") == []


def test_trained_parameters_know_abbreviations(tmp_path):
    (tmp_path / "collocations.tab").write_text("a\tb\n")
    (tmp_path / "sent_starters.txt").write_text("however\n")
    (tmp_path / "abbrev_types.txt").write_text("dr\n")
    (tmp_path / "ortho_context.tab").write_text("smith\t46\n")
    assert SentenceSplitter(tmp_path).split("It was Dr. Smith. He left.") == ["It was Dr. Smith.", "He left."]
    assert len(SentenceSplitter(None).split("It was Dr. Smith. He left.")) == 3


def test_missing_parameters_are_named(tmp_path):
    with pytest.raises(DataError, match="holds no parameters of Punkt"):
        SentenceSplitter(tmp_path / "nowhere")


def test_the_held_out_articles_are_those_of_the_rule(tmp_path):
    files, wanted, articles = 7, 23, 9
    total = 0
    for number in range(files):
        share = int((number + 1) * wanted / files) - int(number * wanted / files)
        source, expected = random.Random(12345 + 13 * number), []
        while len(expected) < share:
            new = int(source.random() * articles)
            if new not in expected:
                expected.append(new)
        assert held_out(number, files, wanted, articles, tmp_path) == set(expected)
        total += share
    assert total == wanted
    with pytest.raises(DataError, match="has 2 articles where 3 are held out"):
        held_out(0, 7, 23, 2, tmp_path)


def test_a_file_is_split_into_training_and_held_out_text(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text("".join(article(n, f"T{n}", f"First of {n}. Second [[of]] {n}.", "Third.") for n in range(6)))
    record = split_file(path, 0, 1, 2, None, tmp_path / "train", tmp_path / "eval")
    training, evaluation = (
        (tmp_path / name).read_text().removesuffix("\n\n").split("\n\n") for name in ("train", "eval")
    )
    assert (len(training), len(evaluation)) == (4, 2)
    assert sorted(training + evaluation) == [f"First of {n}.\nSecond of {n}.\nThird." for n in range(6)]
    assert record == {"articles": 4, "held_out": 2, "bytes": (tmp_path / "train").stat().st_size}


@pytest.mark.parametrize(("files", "parts"), [(1, 1), (5, 5), (12, 5), (100, 7)])
def test_parts_are_neighbouring_files_of_about_the_same_size(files, parts):
    source = random.Random(files)
    sizes = [source.randint(900, 1100) for _ in range(files)]
    groups = assign(sizes, parts)
    assert [number for group in groups for number in group] == list(range(files))
    assert len(groups) == parts
    bytes_of = [sum(sizes[number] for number in group) for group in groups]
    assert min(bytes_of) > 0
    assert max(bytes_of) - min(bytes_of) <= 2.2 * max(sizes)


def test_one_huge_file_leaves_every_part_a_file():
    assert [len(group) for group in assign([10_000, 1, 1], 3)] == [1, 1, 1]
    assert [len(group) for group in assign([1, 1, 10_000], 3)] == [1, 1, 1]
    with pytest.raises(DataError, match="2 files of articles cannot make 3 parts"):
        assign([1, 1], 3)


def test_joined_text_ends_each_file_with_an_empty_line(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}.\n\n")
    join([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a.\n\nb.\n\n"
