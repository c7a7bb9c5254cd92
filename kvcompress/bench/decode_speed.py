"""Decode speed of a model through kvcompress, beside its own attention and growing cache.

    python -m kvcompress.bench.decode_speed --model smollm2 --contexts 2048 4096 8000 --steps 40

Both sides hold the same context and take the same steps in turn, so that what else the machine does hits both. Printed
and written as JSON: median milliseconds per step of each side, and the median of the ratios step by step. Steps that
end with an event are kept apart: what they take longer than the median step, and that as a share of all decoding.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

import kvcompress
from kvcompress.model import cache_keyword
from kvcompress.models import load_model


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Side:
    """A model, a cache that it has filled with the context, and the times of its steps."""

    def __init__(self, model: Any, cache: Any, context: torch.Tensor) -> None:
        self.model, self.cache = model, cache
        self.keyword = cache_keyword(model)
        self.milliseconds: list[float] = []
        self._call(context)

    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.keyword: self.cache})
        logits: torch.Tensor = out.logits
        return logits

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        _synchronize(ids.device)
        start = time.perf_counter()
        logits = self._call(ids)
        _synchronize(ids.device)
        self.milliseconds.append(1000 * (time.perf_counter() - start))
        return logits


def measure(
    model: Any, wrapped: Any, recipe: str, fields: dict[str, Any], context: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Alternate steps of the model's own cache and of a recipe over the same random context."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, context + warmup + steps), generator=generator).to(device)
    with kvcompress.apply(wrapped, recipe, **fields) as handle:
        own = Side(model, DynamicCache(config=model.config), ids[:, :context])
        ours = Side(wrapped, handle.new_cache(), ids[:, :context])
        difference = 0.0
        compressing: list[bool] = []
        for step in range(context, context + warmup + steps):
            sides = (own, ours) if step % 2 else (ours, own)
            events = ours.cache.rows[0].events
            logits = {id(side): side.step(ids[:, step : step + 1]) for side in sides}
            compressing.append(ours.cache.rows[0].events > events)
            difference = max(difference, float((logits[id(own)] - logits[id(ours)]).abs().max()))
        if recipe == "full" and difference > 0.05 * float(logits[id(own)].abs().max()):
            raise SystemExit(f"full differs from the model's own attention by {difference}: speed would mean nothing")
        stats = handle.stats()
    plain = [step for step in range(warmup, warmup + steps) if not compressing[step]]
    own_ms, our_ms = ([side.milliseconds[step] for step in plain] for side in (own, ours))
    step_ms = statistics.median(our_ms)
    extra = [ours.milliseconds[step] - step_ms for step in range(warmup, warmup + steps) if compressing[step]]
    return {
        "recipe": recipe,
        "context": context,
        "own_ms": statistics.median(own_ms),
        "kvcompress_ms": step_ms,
        "ratio": statistics.median(b / a for a, b in zip(own_ms, our_ms, strict=True)),
        "events": len(extra),
        "event_extra_ms": statistics.median(extra) if extra else None,
        "event_share_of_decode": statistics.median(extra) / (handle.config.buffer * step_ms) if extra else None,
        "max_logit_difference": difference,
        "bytes_held": stats.bytes_held,
        "bytes_full": stats.bytes_full,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--recipes", nargs="+", default=["full"])
    parser.add_argument("--budget", type=int, default=1024, help="of recipes that evict")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _ = load_model(options.model)
    wrapped = copy.deepcopy(model)
    rows = []
    for context in options.contexts:
        for recipe in options.recipes:
            fields = {"budget": options.budget} if kvcompress.load_config(recipe).evicts else {}
            row = measure(model, wrapped, recipe, fields, context, options.steps, options.warmup)
            rows.append(row)
            print(
                f"{recipe:14} context {context:6}: own {row['own_ms']:7.1f} ms/step, "
                f"kvcompress {row['kvcompress_ms']:7.1f} ms/step, ratio {row['ratio']:.3f}"
                + (f", event +{row['event_extra_ms']:.0f} ms" if row["events"] else ""),
                flush=True,
            )
    report = {
        "command": shlex.join(["python", "-m", "kvcompress.bench.decode_speed", *sys.argv[1:]]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvcompress": kvcompress.__version__,
        "machine": platform.platform(),
        "threads": options.threads,
        "device": str(next(model.parameters()).device),
        "attention_of_the_model": str(model.config._attn_implementation),
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
