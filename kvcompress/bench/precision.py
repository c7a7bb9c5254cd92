"""What a byte buys: tokens or bits, and for which tokens.

    python -m kvcompress.bench.precision --output-dir docs/data

Three measurements on keys, values and queries of a model that reads text it has written itself, layer by layer, each
also available on made-up caches for the tests:

* does the range of a value vector predict its error under quantization (Pearson and Spearman correlation)?
* how much error does it save to keep some tokens in full precision: those of widest values, random ones, or those of
  largest error (the oracle)?
* at equal bytes, how far does eviction, quantization or both move the output of attention?
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvcompress
from kvcompress.bench.equal_bytes import write_answers
from kvcompress.kernels.slot_attention import attention_reference
from kvcompress.kernels.value_statistics import value_statistic
from kvcompress.kernels.window_scores import window_scores
from kvcompress.model import cache_keyword
from kvcompress.models import load_model
from kvcompress.quant.allocation import allocate, rung_error
from kvcompress.quant.codec import Codec
from kvcompress.quant.uniform import Uniform

WINDOW = 32
_DTYPE = torch.float16


@dataclass(frozen=True)
class Snapshot:
    """One layer of a cache.

    Attributes:
        keys, values: (1, kv_heads, N, dim). scoring: (1, heads, W, dim) queries that may be used to choose tokens.
        asking: (1, heads, W, dim) later queries, whose attention output is what counts.
        scaling: factor on the logits.
    """

    keys: Tensor
    values: Tensor
    scoring: Tensor
    asking: Tensor
    scaling: float


def made_up_layer(
    tokens: int = 1024, dim: int = 64, sigma: float = 0.5, sharpness: float = 2.0, seed: int = 0
) -> Snapshot:
    """A layer with 2 KV heads and 4 query heads, whose value ranges are skewed: Gaussian times lognormal(sigma).

    Attention is skewed too, independently of the ranges: logits have a standard deviation of ``sharpness``, and two
    windows of queries share most of their direction, as neighbours in a text do.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    values = normal(1, 2, tokens, dim) * torch.exp(sigma * normal(1, 2, tokens, 1))
    topic = normal(1, 4, 1, dim)
    queries = sharpness * (0.8 * topic + 0.6 * normal(1, 4, 2 * WINDOW, dim))
    return Snapshot(normal(1, 2, tokens, dim), values, queries[:, :, :WINDOW], queries[:, :, WINDOW:], dim**-0.5)


def snapshots(model: Any, ids: Tensor) -> list[Snapshot]:
    """All compressed layers of a model after reading (1, tokens) ids."""
    tokens = ids.shape[1]
    config = kvcompress.load_config("snapkv", budget=tokens + 1, buffer=2 * WINDOW)
    with torch.no_grad(), kvcompress.apply(model, config) as handle:
        cache = handle.new_cache()
        model(input_ids=ids, **{cache_keyword(model): cache})
        found = []
        for store in cache.stores:
            slots = store.positions[0, 0, 0]
            order = torch.nonzero(slots >= 0).flatten()
            order = order[slots[order].argsort()][: tokens - 2 * WINDOW]
            for local in range(len(store.layers)):
                queries = store.window(slice(local, local + 1), [0], cache.rows).float()
                keys, values = store.keys[local][:, :, order].float(), store.values[local][:, :, order].float()
                parts = queries[:, :, :WINDOW], queries[:, :, WINDOW:]
                found.append(Snapshot(keys, values, *parts, store.geometry.scaling))
    return found


def squared_error(vectors: Tensor, codec: Codec) -> Tensor:
    """(...) mean squared error per element of each (..., dim) vector after a round trip."""
    stored = vectors.to(_DTYPE)
    back = codec.reconstruct(codec.encode(stored, _DTYPE), vectors.shape[-1])
    return (back - stored.float()).square().mean(dim=-1)


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two series."""
    return float(torch.corrcoef(torch.stack([x.double().flatten(), y.double().flatten()]))[0, 1])


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of two series without ties to speak of."""
    return correlation(x.flatten().argsort().argsort(), y.flatten().argsort().argsort())


def range_and_error(values: Tensor, codec: Codec) -> dict[str, float]:
    """Correlation of Range(v) with the error of v, heads taken together."""
    spread, error = value_statistic(values, "range"), squared_error(values, codec)
    return {"pearson": correlation(spread, error), "spearman": rank_correlation(spread, error)}


def saved_by_full_precision(values: Tensor, codec: Codec, share: float, seed: int = 0) -> dict[str, float]:
    """Error that is left when a share of the tokens of each head keeps full precision, relative to none.

    Returns:
        ``range``, ``random``, ``oracle`` (those of largest error), and ``predicted``: what the error model says for
        ``range``, the squared ranges of the others as a share of all squared ranges.
    """
    spread, error = value_statistic(values, "range"), squared_error(values, codec)
    kept = round(share * spread.shape[-1])
    noise = torch.rand(spread.shape, generator=torch.Generator().manual_seed(seed))

    def left(rank: Tensor, cost: Tensor) -> float:
        best = rank.topk(kept, dim=-1).indices
        return float(cost.scatter(-1, best, 0.0).sum() / cost.sum())

    return {
        "range": left(spread, error),
        "random": left(noise, error),
        "oracle": left(error, error),
        "predicted": left(spread, spread.square()),
    }


def output_errors(layer: Snapshot, share: float) -> dict[str, float]:
    """Relative squared error of attention output at ``share`` of the bytes of FP16 keys and values, by method.

    Bytes of codes, scales and offsets are counted; the recent buffer, equal for all methods, is left out. ``evict``
    keeps the tokens that the scoring window attends to most, ``evict-vase`` is VASE-AttnV. ``int4 + fp16`` keeps all
    tokens, as many of widest values as the bytes allow in full precision. ``evict + intB`` evicts the rest of what
    fits at B bits. ``ladder`` is the allocation of least predicted error over 16, 8, 4, 2 and 0 bits. Codes are of
    rotated vectors, one group per head; keys never have less than 4 bits.
    """
    tokens, dim = layer.keys.shape[2], layer.keys.shape[3]
    full = 2 * 2 * dim
    room = int(share * tokens * full)
    codecs = {bits: tuple(Uniform(bits=b, rotate=True) for b in (max(4, bits), bits)) for bits in (8, 4, 2)}
    cost = {bits: float(sum(c.bytes_per_token(dim, _DTYPE) for c in pair)) for bits, pair in codecs.items()}
    cost[16] = full
    attention = window_scores(layer.scoring, layer.keys, layer.scaling).mean(dim=2)
    spread = value_statistic(layer.values, "range")
    coded = {bits: (_round_trip(layer.keys, k), _round_trip(layer.values, v)) for bits, (k, v) in codecs.items()}
    plain = (layer.keys.to(_DTYPE).float(), layer.values.to(_DTYPE).float())
    coded[16] = plain
    whole, _ = attention_reference(layer.asking, *plain, None, layer.scaling)

    def error(bits: Tensor) -> float:
        """Of a cache that holds each token at (1, kv_heads, N) bits, 0 for evicted."""
        keys, values = (torch.zeros_like(tensor) for tensor in plain)
        for precision, (k, v) in coded.items():
            here = (bits == precision).unsqueeze(-1)
            keys, values = torch.where(here, k, keys), torch.where(here, v, values)
        group = layer.asking.shape[1] // keys.shape[1]
        mask = (bits > 0).repeat_interleave(group, dim=1).unsqueeze(2)
        out = _masked_attention(layer.asking, keys, values, mask, layer.scaling)
        return float((out - whole).square().sum() / whole.square().sum())

    def top(rank: Tensor, count: int, bits: int) -> Tensor:
        held = torch.zeros(rank.shape, dtype=torch.long)
        return held.scatter(-1, rank.topk(min(count, tokens), dim=-1).indices, bits)

    def by_vase(count: int) -> Tensor:
        config = kvcompress.load_config("vase-attnv", budget=count + WINDOW, buffer=WINDOW)
        keep = kvcompress.select_tokens(config, *plain, layer.scoring, scaling=layer.scaling).keep
        return torch.zeros(attention.shape, dtype=torch.long).scatter(-1, keep, 16)

    found = {
        "evict": error(top(attention, room // full, 16)),
        "evict-vase": error(by_vase(room // full)),
        "evict + int8": error(top(attention, int(room / cost[8]), 8)),
        "evict + int4": error(top(attention, int(room / cost[4]), 4)),
        "evict + int2": error(top(attention, int(room / cost[2]), 2)),
    }
    for bits in (8, 4, 2):
        spare = int((room - tokens * cost[bits]) / (full - cost[bits]))
        if spare >= 0:
            held = top(spread, spare, 16)
            found[f"int{bits} + fp16"] = error(torch.where(held == 0, bits, held))
    found["ladder"] = error(_allocated((attention * spread).square(), cost, room))
    return found


def _masked_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    logits = (queries @ keys.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
    return logits.softmax(dim=-1) @ values


def _round_trip(vectors: Tensor, codec: Codec) -> Tensor:
    return codec.reconstruct(codec.encode(vectors.to(_DTYPE), _DTYPE), vectors.shape[-1])


def _allocated(sensitivity: Tensor, cost: Mapping[int, float], room: float) -> Tensor:
    """(1, kv_heads, N) bits of least predicted error within ``room`` bytes per head."""
    ladder = (16, 8, 4, 2, 0)
    errors, costs = [rung_error(bits) for bits in ladder], [cost.get(bits, 0.0) for bits in ladder]
    bits = torch.zeros(sensitivity.shape, dtype=torch.long)
    for head in range(sensitivity.shape[1]):
        counts = allocate(sensitivity[0, head], errors, costs, room)
        order = sensitivity[0, head].argsort(descending=True)
        bits[0, head, order] = torch.tensor(ladder).repeat_interleave(torch.tensor(counts))
    return bits


def measure(layers: Sequence[Snapshot], shares: Sequence[float]) -> dict[str, Any]:
    """All three measurements, as plain numbers; output errors are medians over layers."""
    codecs = {f"int{bits}": Uniform(bits=bits) for bits in (4, 2)}
    return {
        "range_and_error": {n: [range_and_error(s.values, c) for s in layers] for n, c in codecs.items()},
        "saved": {
            f"{name}, {share:.0%} in FP16": [saved_by_full_precision(s.values, codec, share) for s in layers]
            for name, codec in codecs.items()
            for share in (0.05, 0.25)
        },
        "output_error": {str(share): [output_errors(layer, share) for layer in layers] for share in shares},
    }


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values).median())


def to_markdown(found: Mapping[str, Any], command: str) -> str:
    """Medians over layers and their extremes."""
    lines = [f"<!-- generated by {command} -->", ""]
    lines += ["| value range against error, per layer | Pearson | Spearman |", "|---|---|---|"]
    for name, layers in found["range_and_error"].items():
        cells = []
        for kind in ("pearson", "spearman"):
            values = [layer[kind] for layer in layers]
            cells.append(f"{_median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append(f"| {name}, whole head | {' | '.join(cells)} |")
    kinds = ("range", "predicted", "random", "oracle")
    lines += ["", "| error left, relative to none in FP16 | " + " | ".join(kinds) + " |", "|---|---|---|---|---|"]
    for name, layers in found["saved"].items():
        cells = [f"{_median([layer[kind] for layer in layers]):.3f}" for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    shares = list(found["output_error"])
    lines += ["", "| attention output error at bytes | " + " | ".join(f"{float(s):.0%}" for s in shares) + " |"]
    lines.append("|---" * (len(shares) + 1) + "|")
    for method in dict.fromkeys(m for share in shares for m in found["output_error"][share][0]):
        cells = []
        for share in shares:
            values = [layer[method] for layer in found["output_error"][share] if method in layer]
            cells.append(f"{_median(values):.2e}" if values else "-")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Explain step by step how to find all prime numbers below one hundred.")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens that the model writes")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("precision"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    with torch.no_grad():
        ids, _ = write_answers(model, tokenizer, [options.prompt], options.tokens, options.seed)
        found = measure(snapshots(model, ids), options.shares)
    command = shlex.join(["python", "-m", "kvcompress.bench.precision", *sys.argv[1:]])
    report = {
        "command": command,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvcompress": kvcompress.__version__,
        "machine": platform.platform(),
        "model": options.model,
        "context": ids.shape[1],
        **found,
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "precision.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    markdown = to_markdown(found, command)
    (options.output_dir / "precision.md").write_text(markdown, encoding="utf-8")
    print(markdown)


if __name__ == "__main__":
    main()
