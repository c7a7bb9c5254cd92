"""Eviction, quantization and both at equal bytes: how far does each move the predictions of a model?

    python -m kvcompress.bench.equal_bytes --output-dir docs/data

For every prompt the model writes an answer with its full cache, sampled. Every recipe, with the setting at which its
cache takes a given share of the full cache's bytes (:mod:`kvcompress.equal_bytes`), then reads the same text, as many
tokens at a time as come before its next event, which gives what one token at a time gives. Prompts are read side by
side, in as many batches as there are workers. Written as JSON, as a
Markdown table and as a figure: the divergence KL(full || recipe) per token and how often both prefer the same token,
with 95 % confidence intervals from a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import kvcompress
from kvcompress.cache import CompressedCache
from kvcompress.config import CompressionConfig
from kvcompress.equal_bytes import solve_for_bytes
from kvcompress.errors import ConfigError
from kvcompress.footprint import cache_bytes
from kvcompress.model import cache_keyword
from kvcompress.models import encode_prompt, load_model
from kvcompress.shapes import layer_shapes

RECIPES = (
    "int4", "int4-rotated", "nf4", "int2", "kivi", "streaming-llm", "snapkv", "r-kv", "vase-attnv", "vase-dkv",
    "snapkv-int4", "vase-attnv-int8", "vase-attnv-int4", "vase-attnv-int2", "vase-dkv-int4", "ladder",
)  # fmt: skip
_RESAMPLES = 10_000


def write_answers(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int, seed: int) -> tuple[Tensor, int]:
    """Sampled conversations of equal length: (prompts, columns) ids, and the length of the longest prompt.

    Answers are cut at the end to the length of the shortest; up to the longest prompt all are read at once.
    """
    rows = [encode_prompt(tokenizer, prompt)["input_ids"][0] for prompt in prompts]
    longest = max(len(row) for row in rows)
    padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.full((len(rows), longest), padding)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    torch.manual_seed(seed)
    settings = {
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    written = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=padding, **settings)
    columns = min(len(row) for row in rows) + tokens
    unpadded = [written[index, longest - len(row) :][:columns] for index, row in enumerate(rows)]
    return torch.stack(unpadded), longest


def log_probabilities(model: Any, cache: CompressedCache, ids: Tensor, prompt: int) -> Tensor:
    """(rows, columns - prompt, vocabulary): what follows each token after the prompt, under the recipe of the cache.

    Args:
        ids: (rows, columns), without padding. prompt: columns that are read at once.
    """
    logits = []
    start, stop = 0, prompt
    while start < ids.shape[1]:
        out = model(input_ids=ids[:, start:stop], **{cache_keyword(model): cache}).logits
        if start:
            logits.append(out)
        start, room = stop, cache.until_event()
        stop = ids.shape[1] if room is None else min(ids.shape[1], start + room)
    return torch.cat(logits, dim=1).float().log_softmax(dim=-1)


def run_prompts(job: tuple[argparse.Namespace, int, list[str]]) -> list[dict[str, Any]]:
    """All recipes at all sizes on some prompts, of which the first has number ``first``."""
    options, first, prompts = job
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    shapes = layer_shapes(model.config)
    full = kvcompress.load_config("full", storage=options.storage)
    rows = []
    with torch.inference_mode():
        ids, prompt = write_answers(model, tokenizer, prompts, options.tokens, options.seed + first)
        context = ids.shape[1]
        whole = cache_bytes(full, shapes, context)
        with kvcompress.apply(model, "full"):
            reference = log_probabilities(model, CompressedCache(model, full, reserve=context), ids, prompt)
            for share in options.shares:
                for recipe in options.recipes:
                    config = base_config(recipe, options)
                    try:
                        solved = solve_for_bytes(config, shapes, context, int(share * whole), "float16")
                    except ConfigError:
                        continue
                    numbers = [first + index for index in range(len(prompts))]
                    cache = CompressedCache(model, solved.config, numbers, reserve=context)
                    found = log_probabilities(model, cache, ids, prompt)
                    held = cache.stats().bytes_held
                    if held != solved.bytes_held * len(prompts):
                        raise AssertionError(
                            f"{recipe}: holds {held} bytes, {solved.bytes_held} per row were predicted"
                        )
                    entry = {"share": share, "recipe": recipe, "chosen": solved.chosen, "context": context}
                    entry |= {"bytes": solved.bytes_held, "bytes_share": solved.bytes_held / whole}
                    for index, number in enumerate(numbers):
                        kl, agreement = distance(reference[index], found[index])
                        rows.append({"prompt": number, **entry, "kl": kl, "agreement": agreement})
                    print(f"prompts {numbers}, {share:.0%}, {recipe}: KL {rows[-1]['kl']:.4f}", flush=True)
    return rows


def distance(full: Tensor, other: Tensor) -> tuple[float, float]:
    """KL(full || other) in nats, and how often both have the same first choice: means over (tokens, vocabulary)."""
    divergence = (full.exp() * (full - other)).sum(dim=-1).clamp_min(0)
    same = full.argmax(dim=-1) == other.argmax(dim=-1)
    return float(divergence.double().mean()), float(same.double().mean())


def base_config(recipe: str, options: argparse.Namespace) -> CompressionConfig:
    """The recipe with the buffer and storage of the comparison; KIVI needs a buffer of whole key groups."""
    config = kvcompress.load_config(recipe, storage=options.storage)
    blocks = [codec.block_tokens for stage in config.stages for rung in getattr(stage, "rungs", ()) for codec in rung]
    return config.with_fields({"buffer": max([options.buffer, *blocks])})


def summarize(rows: Sequence[dict[str, Any]], shares: Sequence[float], recipes: Sequence[str]) -> list[dict[str, Any]]:
    """Means over prompts with 95 % intervals, one entry per share and recipe that fits on every prompt."""
    prompts = sorted({row["prompt"] for row in rows})
    generator = torch.Generator().manual_seed(0)
    # The same resamples of prompts for every recipe.
    resamples = torch.randint(len(prompts), (_RESAMPLES, len(prompts)), generator=generator)
    table = []
    for share in shares:
        for recipe in recipes:
            runs = [row for row in rows if row["share"] == share and row["recipe"] == recipe]
            if len(runs) < len(prompts):
                continue
            entry: dict[str, Any] = {"share": share, "recipe": recipe, "chosen": runs[0]["chosen"]}
            entry["bytes_share"] = sum(row["bytes_share"] for row in runs) / len(runs)
            for name in ("kl", "agreement"):
                values = torch.tensor([row[name] for row in sorted(runs, key=lambda row: int(row["prompt"]))])
                means = values[resamples].mean(dim=1).quantile(torch.tensor([0.025, 0.975]))
                entry[name], entry[f"{name}_interval"] = float(values.mean()), means.tolist()
            table.append(entry)
    return table


def to_markdown(table: Sequence[dict[str, Any]], command: str) -> str:
    """One table per share, the least divergence first."""
    lines = ["<!-- generated by " + command + " -->", ""]
    for share in dict.fromkeys(entry["share"] for entry in table):
        lines += [f"### {share:.0%} of the full cache's bytes", ""]
        lines += [
            "| recipe | setting (first prompt) | bytes | KL per token | same first choice |",
            "|---|---|---|---|---|",
        ]
        for entry in sorted((e for e in table if e["share"] == share), key=lambda e: float(e["kl"])):
            low, high = entry["kl_interval"]
            least, most = entry["agreement_interval"]
            lines.append(
                f"| `{entry['recipe']}` | {entry['chosen']} | {entry['bytes_share']:.1%} | {entry['kl']:.4f} "
                f"[{low:.4f}, {high:.4f}] | {entry['agreement']:.1%} [{least:.1%}, {most:.1%}] |"
            )
        lines.append("")
    return "\n".join(lines)


def draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Divergence against bytes, one line per recipe, coloured by family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families = {"evict": ("#0072B2", "o"), "quantize": ("#E69F00", "s"), "both": ("#009E73", "^")}
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    recipes = list(dict.fromkeys(entry["recipe"] for entry in table))
    labels: list[tuple[float, float, str, str]] = []
    for recipe in recipes:
        config = kvcompress.load_config(recipe)
        family = "both" if config.evicts and config.quantizes else "evict" if config.evicts else "quantize"
        color, marker = families[family]
        points = sorted((e["bytes_share"], e["kl"], *e["kl_interval"]) for e in table if e["recipe"] == recipe)
        x, y, low, high = (list(column) for column in zip(*points, strict=True))
        axes.fill_between(x, low, high, color=color, alpha=0.08, linewidth=0)
        axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1)
        labels.append((x[0], math.log10(y[0]), recipe, color))
    for left, height, recipe, color in _apart(labels):
        axes.annotate(
            recipe,
            (left, 10**height),
            (-5, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=color,
            fontsize=7,
        )
    for family, (color, marker) in families.items():
        axes.plot(
            [],
            [],
            color=color,
            marker=marker,
            label={"evict": "eviction", "quantize": "quantization"}.get(family, family),
        )
    axes.set(
        xlabel="bytes, as a share of the full FP16 cache", ylabel="KL(full || recipe) per token, nats", yscale="log"
    )
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def _apart(labels: Sequence[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Labels (x, log10 of y, text, colour) moved upwards where they would overlap one below."""
    placed: list[tuple[float, float, str, str]] = []
    for x, height, text, color in sorted(labels, key=lambda label: label[1]):
        below = [other for left, other, _, _ in placed if abs(left - x) < 0.03]
        placed.append((x, max([height, *(other + 0.06 for other in below)]), text, color))
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.15, 0.25, 0.4])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--tokens", type=int, default=640, help="tokens that the model writes per prompt")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--buffer", type=int, default=16)
    parser.add_argument("--storage", default="float16", choices=["model", "float16", "bfloat16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path("equal-bytes"))
    parser.add_argument("--figure", type=Path, help="where the figure goes; beside the table by default")
    options = parser.parse_args()
    prompts = (files("kvcompress.bench") / "prompts.txt").read_text(encoding="utf-8").splitlines()[: options.prompts]
    size = -(-len(prompts) // options.workers)
    jobs = [(options, first, prompts[first : first + size]) for first in range(0, len(prompts), size)]
    with get_context("spawn").Pool(options.workers) as pool:
        rows = [row for found in pool.imap_unordered(run_prompts, jobs) for row in found]
    table = summarize(rows, options.shares, options.recipes)
    command = shlex.join(["python", "-m", "kvcompress.bench.equal_bytes", *sys.argv[1:]])
    report = {
        "command": command,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvcompress": kvcompress.__version__,
        "machine": platform.platform(),
        "model": options.model,
        "table": table,
        "runs": sorted(rows, key=lambda row: (row["share"], row["recipe"], row["prompt"])),
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "equal_bytes.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    markdown = to_markdown(table, command)
    (options.output_dir / "equal_bytes.md").write_text(markdown, encoding="utf-8")
    draw(table, options.figure or options.output_dir / "equal_bytes.png")
    print(markdown)


if __name__ == "__main__":
    main()
