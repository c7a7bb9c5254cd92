"""``kvcompress demo``: what compression does to a reasoning model's answers at equal bytes, in minutes on a CPU."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvcompress.cli_eval import DEFAULT_TASKS

RECIPES = "full,snapkv,r-kv,vase-attnv,int4,vase-attnv-int4"
# int4 without eviction takes 0.38 of the full cache here, whatever it is asked for; so all others get as much.
EQUAL_BYTES = "0.4"
BUFFER = 16
PROBLEMS = 20
# So small a model gains nothing by more of them, and loses where others want the cores too.
THREADS = 2
MAPPED = ("snapkv", "vase-attnv", "vase-attnv-int4")


def demo(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Where the results go.")] = Path("demo-output"),
    problems: Annotated[int, typer.Option("--problems", "-p", help="Of each of the four tasks.")] = PROBLEMS,
) -> None:
    """Let six recipes solve problems with the bundled reasoner, at equal bytes, and draw what they reach.

    The problems are held out: the model was trained on none of them. The same command goes on where it was stopped, and
    shows a finished demo again; another folder starts anew.
    """
    import torch

    from kvcompress.cli import app
    from kvcompress.eval_report.style import check_matplotlib

    check_matplotlib()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    run = output_dir / "run"
    asked = ["eval", "--recipe", RECIPES, "--equal-bytes", EQUAL_BYTES, "--buffer", str(BUFFER)]
    asked += ["--task", DEFAULT_TASKS, "--problems", str(problems), "--batch-size", str(problems)]
    drawn = ["report", str(run), "--maps", *(part for recipe in MAPPED for part in ("--map-recipe", recipe))]
    steps = [
        (
            f"1/2  A tiny reasoning model solves {problems} problems of each of four tasks in some 500 tokens.\n"
            f"     Every recipe gets {float(EQUAL_BYTES):.0%} of the bytes that the longest problem takes in full.",
            [*asked, "--output-dir", str(run)],
        ),
        ("2/2  Figures, and which tokens three of the recipes keep.", [*drawn, "--output-dir", str(output_dir)]),
    ]
    for title, arguments in steps:
        print(f"\n{title}\n$ {shlex.join(['kvcompress', *arguments])}\n", flush=True)
        try:
            app(arguments)
        except SystemExit as stop:
            if stop.code:
                raise typer.Exit(int(stop.code)) from None
    print(_closing(output_dir, run))


def _closing(folder: Path, run: Path) -> str:
    # As it was called: make installs into a folder that isn't on the path.
    program = sys.argv[0] if Path(sys.argv[0]).name == "kvcompress" else "kvcompress"
    return f"""
Done. Look at

  {folder / "report.html"}   all figures and tables; needs no network
  {folder / "ablation-0-all-tasks.png"}   who still solves the problems: few bits for many tokens, or all bits for few?
  {folder / "texts.png"}   one chain of thought, and what is left of it under three recipes
  {run / "samples.jsonl"}   every answer, with the recipe that it was made under

Next, other sizes of cache, or one task on its own:

  {program} eval -r full,r-kv,vase-dkv,vase-dkv-int4 --equal-bytes 0.15,0.25,0.4 --buffer {BUFFER} -p 50 -o runs/sizes
  {program} report runs/sizes -o report"""
