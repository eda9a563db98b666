"""The parts of a decoder's fused weights, each of which is dealt evenly by itself.

So a rank has matching pieces of query, key and value, and of gate and up.
"""

from __future__ import annotations

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError


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


def _divide(parallel: TensorParallel, what: str, count: int) -> None:
    if count % parallel.size:
        raise ConfigError(f"layout.tp={parallel.size} does not divide the {count} {what}: choose a tp that does")
