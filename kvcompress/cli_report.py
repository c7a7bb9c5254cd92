"""``kvcompress report``: what runs of ``kvcompress eval`` found, as figures and tables in one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path], typer.Argument(metavar="RUN_FOLDER", help="Folders that kvcompress eval wrote.")]


def report(
    command: typer.Context,
    folders: Folders,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Write report.html and its figures here.")
    ] = Path("report"),
    at: Annotated[
        str | None, typer.Option(metavar="BUDGET", help="Budget of the bars; the one that most recipes share.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Recipe that the others are compared with; full if there.")
    ] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Show which tokens recipes keep; runs the model.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="For the maps; by default that of the runs.")
    ] = None,
    map_recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe to map; repeatable, by default up to four that evict.")
    ] = None,
    map_task: Annotated[
        str | None, typer.Option(help="Task of the maps, or its .json file; the first by default.")
    ] = None,
    map_problem: Annotated[int, typer.Option(help="Number of the problem of the maps.")] = 0,
    map_layer: Annotated[
        list[int] | None, typer.Option(help="Layer to map; repeatable, by default first, middle and last.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Of the maps: cpu, cuda, cuda:1, ...")] = None,
) -> None:
    """Turn runs of ``kvcompress eval`` into one HTML file with figures and tables, and PNGs beside it."""
    from kvcompress.cli_models import load_for_command
    from kvcompress.errors import KVCompressError
    from kvcompress.eval.records import open_folder
    from kvcompress.eval_report import load_results, record_maps, write_report
    from kvcompress.eval_report.style import check_matplotlib

    given = {
        "--model": model,
        "--map-recipe": map_recipe,
        "--map-task": map_task,
        "--map-problem": map_problem,
        "--map-layer": map_layer,
        "--device": device,
    }
    idle = [option for option, value in given.items() if value]
    if idle and not maps:
        raise KVCompressError(f"{', '.join(idle)}: only maps need it; add --maps")
    check_matplotlib()
    results = load_results(folders, against=against, at=at)
    open_folder(output_dir)
    recordings = []
    if maps:
        made_with = results.runs[0].about
        source = model or made_with["request"]["model"]
        recordings = record_maps(
            results,
            lambda: load_for_command(source, made_with["model"]["dtype"], device),
            recipes=map_recipe or [],
            task=map_task,
            problem=map_problem,
            layers=map_layer or [],
        )
    page, *figures = write_report(results, output_dir, recordings=recordings, command=command.obj)
    print(f"wrote {page} and {len(figures)} figures beside it", file=sys.stderr)
