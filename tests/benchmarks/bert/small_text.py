"""Small text in the distributed layout, made of random words, with a vocabulary that has most of them."""

import json
import random

WORDS = [
    "river", "stone", "a", "the", "of", "walk", "walking", "north", "south", "city", "town", "old", "new", "year",
    "people", "music", "band", "album", "song", "film", "war", "king", "queen", "house", "tree", "bird", "fish",
    "water", "light", "dark", "small", "large", "first", "second", "third", "century", "born", "died", "in", "on",
    "at", "by", "for", "with", "from", "to", "and", "or", "but", "not", "unpronounceable", "xylograph",
]  # fmt: skip
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", "##ing", "##s", *WORDS[:-1]]
SETTINGS = {"max_sequence_length": 64, "shards": 3, "eval_samples": 20}


def document(source, sentences):
    return [
        " ".join(source.choice(WORDS) for _ in range(source.randint(2, 12))).capitalize() + "."
        for _ in range(sentences)
    ]


def text(seed, documents=30):
    """Documents of one to nine sentences."""
    source = random.Random(seed)
    return "".join("\n".join(document(source, source.randint(1, 9))) + "\n\n" for _ in range(documents))


def write_raw(folder, parts=2, documents=30, **settings):
    """The distributed layout with ``parts`` text parts, marked as synthetic."""
    (folder / "results4").mkdir(parents=True)
    for number in range(parts):
        part = folder / "results4" / f"part-{number:05d}-of-{parts:05d}"
        part.write_text(text(number, documents), encoding="utf-8")
    (folder / "results4" / "eval.txt").write_text(text(1000, 12), encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES), encoding="utf-8")
    (folder / "SYNTHETIC").write_text(json.dumps({"settings": {**SETTINGS, **settings}}), encoding="utf-8")
    return folder
