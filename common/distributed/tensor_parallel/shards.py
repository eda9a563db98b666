"""How the weights of a decoder are dealt to the ranks.

A weight is split along one dimension. Where it holds several in a row (query, key and value; gate and up), each of
these parts is dealt evenly by itself, so that a rank has matching pieces of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.distributed.tensor_split import Split
from common.errors import ConfigError


class DecoderSizes(Protocol):
    """What is read of a decoder's architecture."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def qkv_parts(heads: int, kv_heads: int, head_size: int, parallel: TensorParallel) -> tuple[int, int, int]:
    """Rows of query, key and value in a fused weight; each rank gets whole heads of each.

    Raises:
        ConfigError: a rank would have a part of a head.
    """
    _divide(parallel, "query heads", heads)
    _divide(parallel, "key/value heads", kv_heads)
    return heads * head_size, kv_heads * head_size, kv_heads * head_size


def gate_up_parts(feed_forward: int, parallel: TensorParallel) -> tuple[int, int]:
    """Rows of gate and of up in a fused weight.

    Raises:
        ConfigError: they cannot be dealt evenly.
    """
    _divide(parallel, "feed-forward units", feed_forward)
    return feed_forward, feed_forward


def decoder_split(name: str, full_shape: Sequence[int], sizes: DecoderSizes, parallel: TensorParallel) -> Split | None:
    """How the ranks share a parameter of the decoder; None for one that each of them has whole.

    Args:
        name: full name of the parameter; its last two words say what it is (``layers.3.qkv.weight``).
        full_shape: of the whole parameter.
        sizes: of the decoder.
        parallel: the ranks.

    Raises:
        ConfigError: ``tp`` does not divide what has to be dealt.
    """
    kind = ".".join(name.split(".")[-2:])
    shape = tuple(full_shape)
    if kind in ("qkv.weight", "qkv.lora_b"):
        return _split(shape, 0, qkv_parts(sizes.heads, sizes.kv_heads, sizes.head_size, parallel), parallel)
    if kind in ("gate_up.weight", "gate_up.lora_b"):
        return _split(shape, 0, gate_up_parts(sizes.feed_forward, parallel), parallel)
    if kind in ("output.weight", "output.lora_a"):
        _divide(parallel, "query heads", sizes.heads)
        return _split(shape, 1, (sizes.heads * sizes.head_size,), parallel)
    if kind in ("down.weight", "down.lora_a"):
        _divide(parallel, "feed-forward units", sizes.feed_forward)
        return _split(shape, 1, (sizes.feed_forward,), parallel)
    if kind in ("embedding.weight", "head.weight"):
        _divide(parallel, "words of the vocabulary", sizes.vocabulary)
        return _split(shape, 0, (sizes.vocabulary,), parallel)
    return None


def shard_of(name: str, full: Tensor, sizes: DecoderSizes, parallel: TensorParallel) -> Tensor:
    """This rank's part of a whole parameter of the decoder, a copy; the parameter itself where all have it whole.

    See :func:`decoder_split`.
    """
    split = decoder_split(name, full.shape, sizes, parallel)
    return full if split is None else split.local_of(full)


def _split(shape: tuple[int, ...], dim: int, parts: Sequence[int], parallel: TensorParallel) -> Split:
    return Split.dealt(shape, dim, parts, parallel.size, parallel.index)


def _divide(parallel: TensorParallel, what: str, count: int) -> None:
    if count % parallel.size:
        raise ConfigError(f"layout.tp={parallel.size} does not divide the {count} {what}: choose a tp that does")
