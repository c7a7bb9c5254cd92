"""gpu.json and gpu.md: what was measured, against what was aimed at, and what is missing."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcompress.bench.gpu.timing import Row

PARTS = ("checks", "copy", "attention", "kernels", "decoding")
WARNING = (
    "THE TIMES BELOW ARE THOSE OF TRITON'S INTERPRETER ON A CPU, AT TOY SIZE. THEY MEAN NOTHING: THERE IS NO GPU HERE."
)
# Share of the copy bandwidth that decode attention is to reach from so many sequences and tokens on, by format.
ATTENTION_TARGETS = {"vectors": 0.8, "int4": 0.65}
LEAST_BATCH, LEAST_CONTEXT = 16, 4096
EVENT_TARGET = ("vase-attnv", 0.03)


def new_results(machine: Row, command: str, date: str, interpreter: bool) -> Row:
    """Results of which no part has run yet."""
    parts = {name: {"status": "not run", "seconds": 0.0, "rows": []} for name in PARTS}
    return {"interpreter": interpreter, "command": command, "date": date, "machine": machine, "parts": parts}


def write(results: Row, output_dir: Path) -> None:
    """Write both files; called again and again, so that a run cut short leaves what it has."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, text in (("gpu.json", json.dumps(_finite(results), indent=1) + "\n"), ("gpu.md", to_markdown(results))):
        # Replaced at once, so that no moment leaves half a file.
        fresh = output_dir / f".{name}"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(output_dir / name)


def _finite(value: Any) -> Any:
    """The same with NaN and infinity as text, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def failures(results: Row) -> list[str]:
    """What should not be: failed cases, outputs that differ, parts that broke off."""
    found = [f"{name}: {part['status']}" for name, part in results["parts"].items() if "failed" in part["status"]]
    for name, part in results["parts"].items():
        for row in part["rows"]:
            reason = row.get("why") if row.get("status") == "failed" else row.get("failed")
            # What others can't do is listed where it would stand.
            if reason and row.get("by", "kvcompress") == "kvcompress":
                found.append(f"{name}: {label(row)}: {reason}")
    return found


def label(row: Row) -> str:
    """What a row is about."""
    if "by" in row:
        return f"{row['models']}, {row['batch']} x {row['context']}, {row['format']}, {row['by']}"
    if "cache" in row:
        return f"{row['model']}, {row['cache']}"
    return str(row.get("case") or row.get("operation") or row.get("note", ""))


# -- targets -----------------------------------------------------------------------------------------------------


def targets(results: Row) -> list[tuple[str, str]]:
    """Every target in words, and whether it was met."""
    found = []
    for form, least in ATTENTION_TARGETS.items():
        rows = [
            row
            for row in results["parts"]["attention"]["rows"]
            if row.get("by") == "kvcompress"
            and row["format"] == form
            and row["batch"] >= LEAST_BATCH
            and row["context"] >= LEAST_CONTEXT
            and "of_copy" in row
        ]
        size = f"batch {LEAST_BATCH} x {LEAST_CONTEXT} and larger"
        name = f"decode attention over {form}: at least {least:.0%} of the copy bandwidth at {size}"
        found.append((name, _met(rows, "of_copy", functools.partial(operator.le, least), worst=min)))
    recipe, most = EVENT_TARGET
    rows = [
        row
        for row in results["parts"]["decoding"]["rows"]
        if row.get("cache") == recipe and row.get("event_share") is not None
    ]
    name = f"events of {recipe}: under {most:.0%} of decoding"
    found.append((name, _met(rows, "event_share", functools.partial(operator.gt, most), worst=max)))
    return found


def _met(
    rows: Sequence[Row], field: str, good: Callable[[float], bool], worst: Callable[[Iterable[float]], float]
) -> str:
    if not rows:
        return "not measured"
    met = sum(good(row[field]) for row in rows)
    extreme = worst(row[field] for row in rows)
    where = label(next(row for row in rows if row[field] == extreme))
    verdict = "met" if met == len(rows) else f"not met ({met} of {len(rows)})"
    return f"{verdict}; worst {extreme:.1%}: {where}"


# -- Markdown ----------------------------------------------------------------------------------------------------


def to_markdown(results: Row) -> str:
    """The report; a warning comes first if its times are those of the interpreter."""
    parts = results["parts"]
    lines = [WARNING, ""] if results["interpreter"] else []
    lines += ["# Kernels and generation on a GPU", "", f"`{results['command']}`, {results['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in results["machine"].items()]
    lines += [
        "",
        *_table(["part", "state", "seconds"], [[n, p["status"], f"{p['seconds']:.0f}"] for n, p in parts.items()]),
    ]
    missing = [name for name, part in parts.items() if part["status"] != "complete"]
    if missing:
        lines += [f"**Missing or incomplete: {', '.join(missing)}.**", ""]
    wrong = failures(results)
    if wrong:
        lines += ["## Failures", "", *(f"- {line}" for line in wrong), ""]
    lines += ["## Targets", ""]
    aimed = [(name, "not judged") for name, _ in targets(results)] if results["interpreter"] else targets(results)
    lines += _table(["target", "result"], [list(pair) for pair in aimed])
    for name, section in _SECTIONS.items():
        if parts[name]["rows"]:
            lines += section(parts[name]["rows"])
            lines += _left_out(parts[name]["rows"])
    return "\n".join(lines).rstrip() + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Notes, and what was skipped, with the reason."""
    lines = [f"- {row['note']}" for row in rows if "note" in row]
    for row in rows:
        reason = row.get("why") if row.get("status") == "skipped" else row.get("skipped")
        if reason:
            lines.append(f"- skipped: {label(row)}: {reason}")
        elif row.get("by", "kvcompress") != "kvcompress" and "failed" in row:
            lines.append(f"- failed: {label(row)}: {row['failed']}")
    return [*lines, ""] if lines else []


def _checks(rows: Sequence[Row]) -> list[str]:
    counts = {status: sum(row["status"] == status for row in rows) for status in ("passed", "failed", "skipped")}
    heavy = sum(row["heavy"] and row["status"] == "passed" for row in rows)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return ["## Checks", "", f"{len(rows)} cases of all kernels: {said}; {heavy} of those that passed are heavy.", ""]


def _copy(rows: Sequence[Row]) -> list[str]:
    lines = ["## Memory bandwidth", ""]
    for row in rows:
        lines.append(
            f"Copy within the device, read and written bytes counted: {_speed(row['copy_bytes_per_s'])}. A sum that "
            f"only reads: {_speed(row['read_bytes_per_s'])}. Of {row['bytes'] / 2**30:.3g} GiB, the median."
        )
    return [*lines, ""]


def _attention(rows: Sequence[Row]) -> list[str]:
    measured = [
        [
            row["models"], str(row["batch"]), str(row["context"]), row["format"], row["by"], _bytes(row["bytes"]),
            f"{row['us']:.1f}", f"{row['eager_us']:.1f}", _speed(row["bytes_per_s"]), f"{row['of_copy']:.1%}",
            f"{row['error']:.1e}", row["timed"],
        ]
        for row in rows
        if "us" in row
    ]  # fmt: skip
    header = ["heads of", "batch", "context", "pool", "by", "must move", "us", "eager us", "speed", "of copy"]
    lines = [
        "## Decode attention",
        "",
        "One new token per sequence, one layer; models with equal heads are measured once. `us` is the device's time",
        "with a cold L2, `eager us` the time of the call from Python. `of copy`: bytes that must move per second, as a",
        "share of the copy bandwidth. `error` is relative: to float32 for kvcompress, to kvcompress for the others.",
        "",
    ]
    return [*lines, *_table([*header, "error", "timed"], measured)]


def _kernels(rows: Sequence[Row]) -> list[str]:
    lines = ["## Kernels of an event", "", f"All layers and sequences at once ({rows[0]['rows']} rows).", ""]
    measured = []
    for row in rows:
        if "us" not in row:
            continue
        reference = "does not fit"
        if "torch_us" in row:
            scaled = "" if row["torch_layers"] == row["layers"] else f" (from {row['torch_layers']} layers, scaled)"
            reference = f"{row['torch_us']:.1f}{scaled}"
        cells = [row["operation"], _bytes(row["bytes"]), f"{row['us']:.1f}", f"{row['eager_us']:.1f}"]
        measured.append([*cells, f"{row['of_copy']:.1%}", reference, f"{row['error']:.1e}", row["timed"]])
    header = ["operation", "must move", "us", "eager us", "of copy", "torch us", "error", "timed"]
    return [*lines, *_table(header, measured)]


def _decoding(rows: Sequence[Row]) -> list[str]:
    lines = ["## Generation", ""]
    first = next((row for row in rows if "batch" in row), None)
    if first:
        lines += [
            f"Batch {first['batch']}, {first['prompt']} tokens first, {first['total']} in all; random weights and",
            "random keys and values in the caches, bfloat16. Tokens per second are extrapolated from measured steps.",
            "`host ms`: until the call returned; as much as the step, and the device waits for Python. `floor ms`:",
            "weights, and the cache as allocated, read once at the copy bandwidth. `event`: what a step with an event",
            "takes longer.",
            "",
        ]
    measured = [
        [
            row["model"], row["cache"] + (f", budget {row['budget']}" if "budget" in row else ""),
            f"{row['tokens_per_s']:.0f}", f"extrapolated from {row['measured_steps']} measured steps",
            f"{row['end_ms']:.2f}", f"{row['end_host_ms']:.2f}", _or(row.get("floor_ms"), "{:.2f}"),
            _gib(row["peak_bytes"]), _gib(row["cache_bytes"]), _or(row.get("event_ms"), "{:.2f} ms"),
            _or(row.get("event_ms_per_layer"), "{:.3f}"), _or(row.get("event_us_per_token"), "{:.2f}"),
            _or(row.get("event_share"), "{:.2%}"), ", ".join(row["by_torch"]) or "none",
        ]
        for row in rows
        if "tokens_per_s" in row
    ]  # fmt: skip
    header = ["model", "cache", "tokens/s", "how", "ms/step at the end", "host ms", "floor ms", "peak GiB", "cache GiB"]
    header += ["event", "ms per layer", "us per token", "share", "operations by torch"]
    lines += _table(header, measured)
    points = [
        [
            row["model"], row["cache"], str(point["context"]), str(point["steps"]), f"{point['ms']:.2f}",
            f"{point['host_ms']:.2f}", _or(point["event_ms"], "{:.2f}"),
        ]
        for row in rows
        for point in row.get("points", ())
    ]  # fmt: skip
    lines += ["Measured steps, events spread over the steps between them:", ""]
    return [*lines, *_table(["model", "cache", "length", "steps", "ms/step", "host ms", "event ms"], points)]


_SECTIONS: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "checks": _checks,
    "copy": _copy,
    "attention": _attention,
    "kernels": _kernels,
    "decoding": _decoding,
}


def _or(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _gib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.3g}"


def _bytes(value: int) -> str:
    return f"{value / 1e6:.4g} MB"


def _speed(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"
