"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): compress the latents, not what they expand to.

An MLA layer caches one latent c and one rotated key k_rot per token, and the model expands them to keys and values of
every head *after* the cache. With the expansion W absorbed into query and output, attention over latents is
multi-query attention with one KV head:

    q . k = (q_nope W_k) . c + q_rot . k_rot          key = [c, k_rot], value = c
    out   = (sum_n p_n c_n) W_v

So a slot holds one latent token, eviction picks tokens for all heads together, and only new tokens are ever expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcompress.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvcompress.layer import CompressedLayer

_NEEDED = ("kv_b_proj", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Latents:
    """New latents of a layer: latent (rows, 1, length, rank) and rotated key (rows, 1, length, rope_dim)."""

    layer: CompressedLayer
    latent: Tensor
    rotated: Tensor

    @property
    def keys(self) -> Tensor:
        return torch.cat([self.latent, self.rotated], dim=-1)


class LatentStates(Tensor):
    """A tensor that remembers, through whatever the model computes from it, which latents it came from.

    ``update`` has to return tensors here, since the model expands them before it calls attention.
    """

    origin: Latents

    @staticmethod
    def mark(tensor: Tensor, origin: Latents) -> LatentStates:
        marked: LatentStates = tensor.as_subclass(LatentStates)
        marked.origin = origin
        return marked

    def plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        origin = next((a.origin for a in args if isinstance(a, LatentStates) and hasattr(a, "origin")), None)
        if origin is not None:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, LatentStates):
                    tensor.origin = origin
        return result


def absorb(module: Any, queries: Tensor, rank: int) -> Tensor:
    """Queries over latents: (rows, heads, length, nope + rope) -> (rows, heads, length, rank + rope)."""
    nope = module.qk_nope_head_dim
    up_keys, _ = _up_projections(module, queries.shape[1], rank)
    return torch.cat([torch.matmul(queries[..., :nope], up_keys), queries[..., nope:]], dim=-1)


def expand_output(module: Any, out: Tensor) -> Tensor:
    """Attention output over latents, (rows, heads, length, rank) -> (rows, heads, length, v_head_dim)."""
    _, up_values = _up_projections(module, out.shape[1], out.shape[-1])
    return torch.matmul(out, up_values.transpose(-1, -2))


def _up_projections(module: Any, heads: int, rank: int) -> tuple[Tensor, Tensor]:
    """(heads, nope, rank) and (heads, v_head_dim, rank) parts of the expansion."""
    weight: Tensor = module.kv_b_proj.weight
    nope: int = module.qk_nope_head_dim
    per_head = weight.view(heads, -1, rank)
    return per_head[:, :nope], per_head[:, nope:]


def check_absorption(module: nn.Module, queries: Tensor, keys: Tensor, absorbed: Tensor, latents: Tensor) -> None:
    """Compare the logit of the last new token with itself in both forms, on real tensors, before anything relies on it.

    Args:
        queries, keys: (rows, heads, length, dim) as the model expands them.
        absorbed: (rows, heads, length, rank + rope). latents: (rows, 1, length, rank + rope).

    Raises:
        UnsupportedModelError: if they differ by more than rounding.
    """
    expanded = (queries[:, :, -1].float() * keys[:, :, -1].float()).sum(dim=-1)
    direct = (absorbed[:, :, -1].float() * latents[:, :, -1].float()).sum(dim=-1)
    scale = queries[:, :, -1].float().norm(dim=-1) * keys[:, :, -1].float().norm(dim=-1)
    if bool(((expanded - direct).abs() > 0.02 * scale + 1e-6).any()):
        raise UnsupportedModelError(
            f"{type(module).__name__}: expands its latents in a way that attention over latents does not reproduce, "
            "so its cache cannot be compressed"
        )


def check_latent(model: nn.Module) -> None:
    """Refuse layers that cache latents in a form that the absorption above does not cover.

    Raises:
        UnsupportedModelError: naming the attention class and what it lacks.
    """
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if missing or weight is None or not weight.is_floating_point() or weight.dim() != 2:
            reason = f"has no {', '.join(missing)}" if missing else "has quantized expansion weights"
            raise UnsupportedModelError(
                f"{type(module).__name__}: caches latents (multi-head latent attention) but {reason}, so attention "
                "over the latents cannot be computed"
            )
