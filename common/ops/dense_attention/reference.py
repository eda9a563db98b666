"""The reference of :mod:`common.ops.dense_attention`, and the interface of all implementations.

Shapes: B rows, S queries and T keys per row, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.ops.triton_support import widen


class Attention(Protocol):
    """Interface of an implementation."""

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        """Return the attention of queries to keys: (B, S, H, D), contiguous. All tensors have one dtype.

        Raises:
            ValueError: the shapes are inconsistent.
        """

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        """Return the same for queries, keys and values in one tensor, in this order.

        Raises:
            ValueError: the shape is not (B, S, 3, H, D).
        """


class ReferenceAttention:
    """Attention in fp32, or fp64 for fp64 inputs. It stores B * H * S * T probabilities."""

    def __call__(self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        """See :class:`Attention`."""
        check(q_BSHD, k_BTHD, v_BTHD)
        q_BHSD, k_BHTD, v_BHTD = (widen(x).transpose(1, 2) for x in (q_BSHD, k_BTHD, v_BTHD))
        scores_BHST = (q_BHSD * q_BHSD.shape[-1] ** -0.5) @ k_BHTD.transpose(2, 3)
        o_BSHD = (scores_BHST.softmax(-1) @ v_BHTD).transpose(1, 2)
        return o_BSHD.to(q_BSHD.dtype).contiguous()

    def packed(self, qkv_BS3HD: Tensor) -> Tensor:
        """See :class:`Attention`."""
        check_packed(qkv_BS3HD)
        return self(*qkv_BS3HD.unbind(2))


def check(q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
    """Check the shapes of queries, keys and values.

    Raises:
        ValueError: rows, heads or head sizes differ, or the shapes of keys and values.
    """
    q, k, v = (tuple(x.shape) for x in (q_BSHD, k_BTHD, v_BTHD))
    if len(q) != 4 or k != v or (q[0], *q[2:]) != (k[0], *k[2:]):
        raise ValueError(f"attention of queries {q}, keys {k} and values {v}, (rows, length, heads, size) each")


def check_packed(qkv_BS3HD: Tensor) -> None:
    """Check the shape of packed queries, keys and values.

    Raises:
        ValueError: the shape is not (B, S, 3, H, D).
    """
    if qkv_BS3HD.dim() != 5 or qkv_BS3HD.shape[2] != 3:
        shape = tuple(qkv_BS3HD.shape)
        raise ValueError(f"queries, keys and values of shape {shape}, not (rows, length, 3, heads, size)")
