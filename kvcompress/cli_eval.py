"""``kvcompress eval``: recipes x budgets x tasks x samples, graded, in a run that survives being killed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.measure import Measurement
from rich.table import Table

from kvcompress.cli_models import REASONER, load_for_command
from kvcompress.cli_recipes import AsJson, print_json
from kvcompress.reasoner.tasks import BENCHMARK

if TYPE_CHECKING:
    from kvcompress.compare import Estimate
    from kvcompress.eval import Row

DEFAULT_RECIPES = "full,snapkv,r-kv,vase-attnv"
# Where recipes can be told apart: easy enough for the full cache, and repetitive enough to be compressed at all.
DEFAULT_TASKS = ",".join(BENCHMARK)
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", "-r", help=f"Names or YAML files, repeatable; by default {DEFAULT_RECIPES}."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        "-t",
        help="FAMILY[:DIFFICULTY[:REDUNDANCY]] of the reasoner, or a .json or .jsonl file of prompts and answers; "
        f"repeatable, by default {DEFAULT_TASKS}.",
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        help="Tokens kept per layer and head, or a ratio of the context; repeatable, for all that evict.",
    ),
]
EqualBytes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE", help="Instead of budgets, the same bytes for all: 8MiB, or 0.25 of the full cache; repeatable."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipes that have it, e.g. sinks.tokens=2."),
]
Folder = Annotated[
    Path, typer.Option("--output-dir", "-o", help="The run; the same command again takes it up where it stopped.")
]


def evaluate(
    command: typer.Context,
    model: Annotated[
        str, typer.Option("--model", "-m", help="reasoner, smollm2, a hub id, a local folder or a .gguf file.")
    ] = REASONER,
    recipe: Recipes = None,
    task: Tasks = None,
    budget: Budgets = None,
    equal_bytes: EqualBytes = None,
    buffer: Annotated[int | None, typer.Option(help="Recent tokens that are never evicted.")] = None,
    settings: Settings = None,
    difficulty: Annotated[int | None, typer.Option(help="Of families given without one.")] = None,
    problems: Annotated[int, typer.Option("--problems", "-p", help="Of each task.")] = 100,
    samples: Annotated[int, typer.Option("--samples", "-s", help="Answers to each problem.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sample at this temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the recipes' random stages.")] = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", help="Of an answer; by default 1.25 references, or 1024."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens that ratios are of; by default the longest problem's prompt and reference."),
    ] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Prompts without the model's chat template.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Answers side by side.")] = 32,
    against: Annotated[
        list[str] | None, typer.Option(help="Compare with this recipe too, besides full; repeatable.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16, bfloat16 or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; the first GPU if there is one.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Of keys and values: model, float16 or bfloat16; by default 16 bits.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, triton, flash_attn or torch.")] = "auto",
    output_dir: Folder = Path("eval-output"),
    as_json: AsJson = False,
) -> None:
    """Let recipes answer problems and grade them: pass@1, loops, bytes and speed, with standard errors.

    --recipe, --task, --budget, --equal-bytes and --against also take lists with commas. Killed at any moment, the same
    command goes on where it stopped.
    """
    from kvcompress import console
    from kvcompress.errors import KVCompressError
    from kvcompress.eval import EvalRequest, read_samples, read_timings, summarize
    from kvcompress.eval import evaluate as run
    from kvcompress.report import write_json

    request = EvalRequest.of(
        model=model,
        recipes=listed(recipe) or DEFAULT_RECIPES.split(","),
        tasks=listed(task) or DEFAULT_TASKS.split(","),
        budgets=listed(budget),
        equal_bytes=listed(equal_bytes),
        buffer=buffer,
        overrides=console.parse_overrides(settings or []),
        difficulty=difficulty,
        problems=problems,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        context=context,
        chat=False if no_chat else None,
        batch_size=batch_size,
        dtype=dtype,
        storage=storage,
        backend=backend,
    )
    rivals = listed(against)
    names = list(dict.fromkeys(setting.recipe for setting in request.settings))
    for rival in rivals:
        if rival not in names:
            raise KVCompressError(f"--against: {rival!r} is none of the recipes {', '.join(names)}")
    with progress_bar() as progress:
        done = run(
            request, output_dir, lambda: load_for_command(model, dtype, device), command=command.obj, progress=progress
        )
    rows = summarize(read_samples(output_dir), read_timings(output_dir), against=rivals)
    document = summary_document(rows, done)
    write_json(output_dir / "summary.json", document)
    if as_json:
        print_json(document)
        return
    screen = console.screen()
    for table in summary_tables(rows):
        # In a narrow terminal lines that wrap are better than figures that are cut off.
        screen.width = max(screen.width, Measurement.get(screen, screen.options.update_width(1000), table).maximum)
        screen.print(table)
    for note in done["notes"]:
        screen.print(note, style="dim")
    print(f"wrote {output_dir}", file=sys.stderr)


def summary_document(rows: Sequence[Row], run: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, ready for JSON."""
    from kvcompress.eval.summary import DEFINITIONS

    return {
        "run": {name: value for name, value in run.items() if name != "cells"},
        "definitions": DEFINITIONS,
        "rows": [row.document() for row in rows],
    }


def summary_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table per task; the last one has a footnote that says what the figures are."""
    from kvcompress.eval.summary import ALL_TASKS, RESAMPLES
    from kvcompress.report import format_bytes

    rivals = list(dict.fromkeys(name for row in rows for name in row.versus))
    tasks = list(dict.fromkeys(row.task for row in rows))
    for task in tasks:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=task, title_justify="left")
        table.caption_justify = "left"
        if task == tasks[-1]:
            table.caption = (
                f"pass@1, loops and cut in %, ± standard error by bootstrap over problems ({RESAMPLES:,} resamples); "
                "vs: paired difference. loops: answers that end in 3 repetitions or more; cut: unfinished at the "
                "limit. tokens, kept, KV held: means per answer, at its end."
            )
        if task == ALL_TASKS:
            table.caption = (
                f"Every task counts alike; errors by bootstrap over the problems within each. {table.caption or ''}"
            )
        for heading in ("recipe", "budget"):
            table.add_column(heading, no_wrap=True)
        for heading in ("n", "pass@1", *(f"vs {name}" for name in rivals)):
            table.add_column(heading, justify="right", no_wrap=True)
        for heading in ("loops", "cut", "tokens", "kept", "KV held", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in (row for row in rows if row.task == task):
            table.add_row(
                row.recipe,
                row.budget,
                f"{row.problems}"
                if row.samples == row.problems
                else f"{row.problems} x {row.samples / row.problems:g}",
                _percent(row.pass_at_1, ".1f"),
                *(_percent(row.versus[name], "+.1f") if name in row.versus else "-" for name in rivals),
                _percent(row.loops, ".1f"),
                _percent(row.unfinished, ".1f"),
                f"{row.output_tokens:,.0f}",
                f"{row.tokens_kept:,.0f}",
                format_bytes(row.kv_bytes),
                "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
            )
        yield table


def _percent(estimate: Estimate, form: str) -> str:
    return f"{100 * estimate.mean:{form}} ± {100 * estimate.standard_error:.1f}"


def listed(values: Sequence[str] | None) -> list[str]:
    """What an option that is repeatable and takes commas was given."""
    return [part.strip() for value in values or [] for part in value.split(",")]


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar over all samples with the time left, on standard error if that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from kvcompress import console

    screen = console.screen(stderr=True)
    columns = (
        TextColumn("{task.description:<32}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=screen, disable=not screen.is_terminal)
    bar: list[Any] = []
    with bars:

        def update(label: str, done: int, total: int) -> None:
            if not bar:
                # What an earlier run has done must not count into the speed.
                bar.append(bars.add_task(label, total=total, completed=done))
            bars.update(bar[0], description=label, completed=done, total=total)

        yield update
