"""Where BERT's text, vocabulary and starting weights come from."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bert import raw
from common.data.download import RemoteFile, check, check_or_download
from common.errors import DataError

R2 = "MLCommons' R2 downloader (https://github.com/mlcommons/r2-downloader) with the metadata "
INPUT = f"{R2}https://training.mlcommons-storage.org/metadata/bert-input-files.uri"
TEXT = f"{R2}https://training.mlcommons-storage.org/metadata/bert-preprocessed-wikipedia-dataset.uri"
APACHE = f"Apache-2.0 as BERT is, no account; {INPUT}"
WIKIPEDIA = f"CC BY-SA, no account; {TEXT}"
PARTS = 500

REQUIRED = [
    RemoteFile(raw.VOCABULARY, None, APACHE, 231_508, f"md5:{raw.VOCABULARY_MD5}"),
    RemoteFile("tf1_ckpt/model.ckpt-28252.data-00000-of-00001", None, APACHE, 4_034_713_312),
    RemoteFile("tf1_ckpt/model.ckpt-28252.index", None, APACHE),
    RemoteFile(f"{raw.PARTS_FOLDER}/{raw.EVALUATION}", None, WIKIPEDIA, 32_851_144, f"md5:{raw.EVALUATION_MD5}"),
]
KNOWN_PARTS = {
    0: (27_150_902, "a64a7c31eff5cd38ae6d94f7a6229dab"),
    1: (27_198_569, "549a9ed4f805257245bec936563abfd0"),
    2: (27_395_616, "1a1366ddfc03aef9d41ce552ee247abf"),
    497: (24_775_043, "66835aa75d4855f2e678e8f3d73812e9"),
    498: (24_575_505, "e6d68a7632e9f4aa1a94128cce556dc9"),
    499: (21_873_644, "b3b087ad24e3770d879a351664cebc5a"),
}
"""Parts whose size and MD5 have been published (mlcommons/training, retired_benchmarks/bert/README.md)."""
OPTIONAL = [
    RemoteFile(
        "enwiki-20200101-pages-articles-multistream.xml.bz2",
        None,
        f"CC BY-SA, no account; only to extract articles anew; {INPUT}",
        17_751_214_669,
        "md5:00d47075e0f583fb7c0791fac1c57cb3",
    ),
]


def download(raw_dir: Path) -> list[str]:
    """Check the files that the user placed in ``raw_dir``; no single file of them has an address of its own.

    Returns:
        One line for each file that is there, and how it was checked.

    Raises:
        DataError: a file is missing, or its size or checksum differs; every missing file is named with its source.
    """
    parts = [_part(number) for number in range(PARTS)]
    missing = [file for file in parts if not (raw_dir / file.name).is_file()]
    if missing:
        first, last = parts[0].name, parts[-1].name
        summary = RemoteFile(f"{first} … {last} ({len(missing)} of {PARTS} are missing)", None, WIKIPEDIA)
        check_or_download([*(file for file in REQUIRED if not (raw_dir / file.name).is_file()), summary], raw_dir)
        raise DataError(f"{raw_dir} lacks {len(missing)} text parts")
    lines = [f"{path}: as expected" for path in check_or_download(REQUIRED, raw_dir)]
    for file in parts:
        check(raw_dir / file.name, file)
    lines.append(f"{raw_dir / raw.PARTS_FOLDER}: {PARTS} parts, {len(KNOWN_PARTS)} of them with a known checksum")
    for file in OPTIONAL:
        path = raw_dir / file.name
        if path.is_file():
            check(path, file)
            lines.append(f"{path}: as expected")
        else:
            lines.append(f"{path}: not there, and not needed ({file.bytes} bytes, {file.checksum}): {file.licence}")
    return lines


def _part(number: int) -> RemoteFile:
    size, md5 = KNOWN_PARTS.get(number, (None, None))
    name = f"{raw.PARTS_FOLDER}/part-{number:05d}-of-{PARTS:05d}"
    return RemoteFile(name, None, WIKIPEDIA, size, md5 and f"md5:{md5}")
