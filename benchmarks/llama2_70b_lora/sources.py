"""Where rows, texts, tokenizer and base weights come from; all of it is fetched by hand, for its licences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.llama2_70b_lora import base, raw
from common.data.download import RemoteFile, check
from common.data.manifest import digest
from common.errors import CheckpointError, DataError
from common.untrusted.safetensors_header import read_header

REFERENCE = "https://github.com/mlcommons/training/tree/master/llama2_70b_lora"
MEMBERS = "MLCommons members, who accept Llama 2's licence"
ROWS = "rclone copy mlc-llama2:training/scrolls_gov_report_8k {}/scrolls_gov_report_8k -P"
BASE = "rclone copy mlc-llama2:Llama2-70b-fused-qkv-mlperf {}/base -P"
TEXTS = "https://huggingface.co/datasets/tau/scrolls (gov_report.zip)"
LLAMA = "https://huggingface.co/meta-llama/Llama-2-70b-hf (tokenizer.model, 499,723 bytes; Llama 2's licence, account)"
CONVERTED = {"train": 192_151_239, "eval": 8_521_136}
"""Bytes of ``train.npy`` and ``validation.npy`` as NVIDIA's submissions make them."""


def download(raw_dir: Path) -> Iterator[str]:
    """Check what the user placed in ``raw_dir``, or say where it is; no file of it has an address without an account.

    Yields:
        One line for rows or texts, tokenizer and base each.

    Raises:
        DataError: rows and texts are missing, or a file is not what was published.
    """
    try:
        source = raw.open_raw(raw_dir)
    except DataError as error:
        raise DataError(f"{error}\n{_where(raw_dir)}") from error
    for split, paths in source.files.items():
        for path in paths:
            if source.stand_in is None and source.kind == "object arrays":
                check(path, RemoteFile(path.name, None, f"{MEMBERS}: {REFERENCE}", CONVERTED[split]))
            yield f"{path}: found, {path.stat().st_size} bytes"
    if source.tokenizer is not None:
        real = digest(source.tokenizer, "sha256") == raw.TOKENIZER_SHA256
        if not real and source.stand_in is None:
            raise DataError(f"{source.tokenizer} is not Llama 2's tokenizer; take it from {LLAMA}")
        yield f"{source.tokenizer}: {'as expected' if real else 'a stand-in'}"
    if source.base is None:
        yield f"{raw_dir / 'base'}: not there; it may lie in assets_dir as well. {MEMBERS}: {BASE.format(raw_dir)}"
        return
    try:
        shards = [path for path in base.files_of(source.base) if path.suffix == ".safetensors"]
        tensors = [place for path in shards for place in read_header(path).values()]
    except CheckpointError as error:
        raise DataError(str(error)) from error
    size = sum(place.end - place.start for place in tensors)
    yield f"{source.base}: {len(shards)} files with {len(tensors)} tensors of {size / 1e9:.3g} GB, all complete"


def _where(raw_dir: Path) -> str:
    return (
        f"  packed rows and base weights ({MEMBERS}; {REFERENCE} says how; no checksums published):\n"
        f"    {ROWS.format(raw_dir)}\n"
        f"    {BASE.format(raw_dir)}\n"
        f"  or the texts, as {raw_dir}/train.jsonl and validation.jsonl: {TEXTS}\n"
        f"    with {raw_dir}/{raw.TOKENIZER}: {LLAMA}"
    )
