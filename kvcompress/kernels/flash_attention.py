"""flash-attn (Dao, arXiv 2307.08691), where it is installed, over a single pool of 16-bit vectors."""

from __future__ import annotations

from torch import Tensor

from kvcompress.kernels.backend import use_flash_attn

_LARGEST_DIM = 256


def covered_by_flash_attn(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> bool:
    """Whether flash-attn computes this attention, and is to be used.

    It knows neither masks nor learned sinks, and wants heads of equal size in keys and values.
    """
    dim = queries.shape[-1]
    fits = mask is None and sinks is None and values.shape[-1] == dim and dim <= _LARGEST_DIM and dim % 8 == 0
    return fits and keys.dtype == queries.dtype and use_flash_attn(queries.device, queries.dtype)


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None, causal: bool = False
) -> Tensor:
    """Attention of queries (rows, heads, Q, dim) to keys and values (rows, kv_heads, N, dim), in 16 bits.

    Args:
        causal: query i sees the keys up to N - Q + i; otherwise all.

    Returns:
        (rows, heads, Q, dim) in the type of queries.
    """
    from flash_attn import flash_attn_func

    # flash-attn wants tokens before heads. Views will do: only the last axis has to be contiguous.
    out: Tensor = flash_attn_func(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        softmax_scale=scaling,
        causal=causal,
        softcap=softcap or 0.0,
    )
    return out.transpose(1, 2)
