"""What the command line reads and shows: prompts, overrides, progress, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvcompress.compare import Comparison, Estimate
from kvcompress.config import CompressionConfig
from kvcompress.errors import KVCompressError
from kvcompress.models import SMOLLM2
from kvcompress.report import ERROR_METHOD, format_bytes
from kvcompress.stages import ROLES
from kvcompress.stats import CacheStats


def screen(*, stderr: bool = False) -> Console:
    """The terminal as it is now; text is shown as it is, without markup, and in files and pipes up to 120 wide."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt out of exactly one of: argument, file, standard input (``-``, or piped in and nothing else given).

    Raises:
        KVCompressError: for no source, two sources, an unreadable one or an empty prompt.
    """
    if argument is not None and file is not None:
        raise KVCompressError("prompt: given both as an argument and as --file; give one of them")
    if argument not in (None, "-"):
        text, origin = argument, "the argument"
    elif file not in (None, "-"):
        text, origin = _read_file(file), file
    elif argument is None and file is None and sys.stdin.isatty():
        raise KVCompressError("prompt: none given; pass it as an argument, with --file PATH, or on standard input")
    else:
        try:
            text, origin = sys.stdin.read(), "standard input"
        except UnicodeDecodeError as error:
            raise KVCompressError(f"prompt: standard input is not UTF-8 text: {error}") from error
    if not text.strip():
        raise KVCompressError(f"prompt: {origin} is empty")
    return text


def parse_overrides(settings: Sequence[str]) -> dict[str, Any]:
    """``["budget=256", "value_range.share=0.5"]`` as a dict, values read as YAML scalars.

    Raises:
        KVCompressError: naming the setting at fault.
    """
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise KVCompressError(f"--set {setting!r}: is not KEY=VALUE, for instance --set value_range.share=0.5")
        if key in overrides:
            raise KVCompressError(f"--set {setting!r}: {key} is set twice")
        overrides[key] = parse_scalar(f"--set {key}", text)
    return overrides


def parse_scalar(origin: str, text: str) -> Any:
    """A value as YAML reads it: number, true or false, null, or text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = []
    if isinstance(value, (list, dict)):
        raise KVCompressError(f"{origin}: {text!r} is not a single value such as 256, 0.5, true or top")
    return value


@contextmanager
def loading(model: str) -> Iterator[None]:
    """A spinner on standard error while a model is read from disk, if it is a terminal."""
    console = screen(stderr=True)
    from_hub = model != SMOLLM2 and not Path(model).expanduser().exists()
    # The hub's client shows bars of its own for what it downloads.
    if from_hub or not console.is_terminal:
        yield
        return
    with console.status(f"loading {model} (a GGUF file takes about a minute the first time)"):
        yield


@contextmanager
def comparison_progress() -> Iterator[Callable[[str, int, int], None]]:
    """One bar per recipe on standard error; yields the callback that :func:`kvcompress.compare.compare` takes."""
    console = screen(stderr=True)
    tasks: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:<16}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield update


def stats_line(stats: CacheStats, new_tokens: int, tokens_per_second: float | None) -> str:
    """One line about a generation: tokens, speed, memory, compressions."""
    speed = f", {tokens_per_second:.1f} tokens/s" if tokens_per_second is not None else ""
    events = stats.events[0]
    return (
        f"{new_tokens} new tokens{speed} | KV cache {format_bytes(stats.bytes_held)} instead of "
        f"{format_bytes(stats.bytes_full)}: {stats.ratio:.2f}x smaller | {stats.tokens_kept[0]:,} of "
        f"{stats.tokens_seen[0]:,} tokens kept, {events} compression{'' if events == 1 else 's'}"
    )


def comparison_table(comparison: Comparison) -> Table:
    """The comparison as a table with a footnote that says what the figures are."""
    reference, equalized = comparison.reference, comparison.equalized
    chosen = {} if equalized is None else {entry.config.name: entry.chosen for entry in equalized.solved}
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{reference.prompt_tokens:,} prompt tokens, {len(reference.tokens):,} generated by the full cache",
        title_justify="left",
        caption=(
            f"KL(full || recipe) in nats and agreement of the most likely token: means over {comparison.steps:,} "
            f"tokens, teacher-forced. ±: {ERROR_METHOD.format(block=comparison.block)}."
        ),
        caption_justify="left",
    )
    if equalized is not None:
        asked = f"All recipes at {format_bytes(equalized.target)} per sequence. "
        table.caption = " ".join(
            [asked + str(table.caption), *(f"Left out: {reason}." for reason in equalized.left_out)]
        )
    table.add_column("recipe", no_wrap=True)
    for heading in ("KV held", "smaller", "kept", "events", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("KL per token", "top-1 %"):
        table.add_column(heading, justify="right")
    table.add_row(
        "(transformers)",
        format_bytes(reference.kv_bytes[-1]),
        "1.00x",
        f"{reference.prompt_tokens + comparison.steps:,}",
        "-",
        f"{reference.tokens_per_second:.1f}",
        "reference",
        "reference",
        style="dim",
        end_section=True,
    )
    for result in comparison.results:
        table.add_row(
            result.name + (f"\n  {chosen[result.name]}" if chosen else ""),
            format_bytes(result.bytes_held),
            f"{result.ratio:.2f}x",
            f"{result.tokens_kept:,}",
            str(result.events),
            f"{result.tokens_per_second:.1f}",
            _with_error(result.mean_kl, 4),
            _with_error(Estimate(100 * result.agreement.mean, 100 * result.agreement.standard_error), 1),
        )
    return table


def recipes_table(configs: Sequence[CompressionConfig]) -> Table:
    """Names, stages by role and descriptions."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("recipe", no_wrap=True)
    table.add_column("stages (protect | score | select | store)")
    table.add_column("description")
    for config in configs:
        table.add_row(config.name, stages_in_short(config), config.description)
    return table


def stages_in_short(config: CompressionConfig) -> str:
    """``sinks + value_range | attention | sample``."""
    roles = [[stage.stage for stage in config.stages if stage.role == role] for role in ROLES]
    return " | ".join(" + ".join(names) for names in roles if names) or "none"


def _read_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KVCompressError(f"prompt: file {name} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise KVCompressError(f"prompt: file {name} cannot be read: {error.strerror or error}") from error


def _with_error(estimate: Estimate, digits: int) -> str:
    return f"{estimate.mean:.{digits}f} ± {estimate.standard_error:.{digits}f}"
