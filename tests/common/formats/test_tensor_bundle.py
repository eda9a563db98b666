"""TensorFlow checkpoints: checksums, files of TensorFlow, and any number of files and blocks."""

import base64

import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from common.formats.crc32c import crc32c, masked_crc32c
from common.formats.tensor_bundle import TensorBundle
from tests.common.formats.bundle_writer import checksum, write_bundle

# Checksums.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),  # the check value of CRC-32C
        (bytes(32), 0x8A9136AA),  # this and the next three: RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
    ids=["empty", "digits", "zeros", "ones", "rising", "falling"],
)
def test_crc32c_has_its_published_values(data, expected):
    assert crc32c(data) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 1000, 65535, 65536, 65537, 150001])
def test_masked_crc32c_of_any_length(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert masked_crc32c(data).to_bytes(4, "little") == checksum(data.tobytes())


# The format.

WRITTEN_BY_TENSORFLOW = {
    # TensorFlow 2.21, tf.compat.v1.train.Saver: kernel float32 [2, 3], bias float16 [3], global_step, two strings
    "tiny.index": "AAAGCAEaAggBABYPYmVydC9wb29sZXIvZGVuc2UvYmlhcwgTEgQSAggDKAY1D0YJeRIGFWtlcm5lbAgBEggSAggCEgIIAyAG"
    "KBg1wNs9FwALDWdsb2JhbF9zdGVwCAkSACAeKAg1lgVfyQAFEXdvcmRzCAcSBBICCAIgJigJNZnHWu8AAAAAAQAAAAB8kCGUAAAAAAEAAAAA"
    "wPKhsAABA3gAiwEAAAAAAQAAAABCmltwkAEInQEPAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAFf7gIskdUfb",
    "tiny.data-00000-of-00001": "AD4AwAA0AAAAAAAAgD8AAABAAABAQAAAgEAAAKBAXG4AAAAAAAABAr/f23p4eXo=",
}


def test_reads_a_checkpoint_of_tensorflow(tmp_path):
    for name, content in WRITTEN_BY_TENSORFLOW.items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    bundle = TensorBundle(tmp_path / "tiny")
    kernel, bias = bundle.read("bert/pooler/dense/kernel"), bundle.read("bert/pooler/dense/bias")
    assert torch.equal(kernel, torch.arange(6.0).view(2, 3))
    assert torch.equal(bias, torch.tensor([1.5, -2.0, 0.25], dtype=torch.float16))
    assert torch.equal(bundle.read("global_step"), torch.tensor(28252))
    with pytest.raises(CheckpointError, match="tensor words has dtype number 7"):
        bundle.read("words")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block_entries", [1, 5, 1000])
def test_reads_any_number_of_files_and_blocks(shards, block_entries, tmp_path):
    random = np.random.default_rng(0)
    tensors = {f"layer_{i}/kernel/{'m' * (i % 4)}": random.standard_normal((i % 5, 3)) for i in range(40)}
    write_bundle(tmp_path / "ckpt", tensors, shards=shards, block_entries=block_entries)
    bundle = TensorBundle(tmp_path / "ckpt")
    assert sorted(bundle.entries) == sorted(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(bundle.read(name).numpy(), expected)


def test_entries_without_a_checksum_are_refused(tmp_path):
    write_bundle(tmp_path / "ckpt", {"a": np.arange(3.0)}, checksums=False)
    with pytest.raises(CheckpointError, match=r"ckpt\.index: tensor a has no checksum, which TensorFlow always writes"):
        TensorBundle(tmp_path / "ckpt").read("a")


def test_masked_checksum_of_tensorflow():
    # of the eight bytes of global_step in WRITTEN_BY_TENSORFLOW, whose entry ends with it
    assert masked_crc32c((28252).to_bytes(8, "little")) == int.from_bytes(bytes.fromhex("96055fc9"), "little")
