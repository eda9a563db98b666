"""Parts of a decoder's fused weights. Each part is sharded separately.

So a rank holds matching pieces of query, key and value, and of gate and up.
"""

from __future__ import annotations

from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError


def qkv_parts(heads: int, kv_heads: int, head_size: int, parallel: TensorParallel) -> tuple[int, int, int]:
    """Return the numbers of rows of query, key and value in a fused weight; each rank gets whole heads of each.

    Raises:
        ConfigError: the number of ranks does not divide the number of heads.
    """
    _divide(parallel, "query heads", heads)
    _divide(parallel, "key/value heads", kv_heads)
    return heads * head_size, kv_heads * head_size, kv_heads * head_size


def gate_up_parts(feed_forward: int, parallel: TensorParallel) -> tuple[int, int]:
    """Return the numbers of rows of gate and up in a fused weight.

    Raises:
        ConfigError: the number of ranks does not divide ``feed_forward``.
    """
    _divide(parallel, "feed-forward units", feed_forward)
    return feed_forward, feed_forward


def _divide(parallel: TensorParallel, what: str, count: int) -> None:
    if count % parallel.size:
        raise ConfigError(f"layout.tp={parallel.size} does not divide the {count} {what}: choose a tp that does")
