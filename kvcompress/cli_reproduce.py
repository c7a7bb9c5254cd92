"""``kvcompress reproduce``: claims of the literature, tested on the bundled reasoner with one command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from kvcompress.cli_eval import listed, progress_bar
from kvcompress.cli_models import REASONER, load_for_command
from kvcompress.cli_recipes import AsJson, print_json

if TYPE_CHECKING:
    from kvcompress.reproduce import Outcome

Claims = Annotated[
    list[str] | None,
    typer.Option("--claim", "-c", help="Letters of claims, with commas or repeatable; all of them by default."),
]


def reproduce(
    command: typer.Context,
    claim: Claims = None,
    problems: Annotated[
        int | None, typer.Option("--problems", "-p", help="Of each of four tasks; 80 by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="8 problems of each task: minutes, and wide intervals.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the recipes' random stages.")] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Answers side by side.")] = 200,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; the first GPU if there is one.")] = None,
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Runs, recipes and results; the same command goes on there.")
    ] = Path("reproduction"),
    as_json: AsJson = False,
) -> None:
    """Test what the literature claims about eviction and quantization on the bundled reasoner, and say what holds.

    All runs, the recipes as YAML files, claims.json, reproduction.md and figures go to --output-dir. About 45 minutes
    on one core without options; killed at any moment, the same command goes on where it stopped.
    """
    from kvcompress import console
    from kvcompress.errors import KVCompressError
    from kvcompress.eval_report.style import check_matplotlib
    from kvcompress.reproduce import Plan, write_document
    from kvcompress.reproduce import reproduce as run
    from kvcompress.reproduce.run import PROBLEMS, QUICK

    if quick and problems is not None:
        raise KVCompressError(f"--problems: {problems} given together with --quick, which means {QUICK}; give one")
    plan = Plan.of(
        claims=listed(claim),
        problems=QUICK if quick else PROBLEMS if problems is None else problems,
        seed=seed,
        batch_size=batch_size,
    )
    check_matplotlib()
    with progress_bar() as progress:
        outcome = run(
            plan, output_dir, lambda: load_for_command(REASONER, None, device), command=command.obj, progress=progress
        )
    files, document = write_document(outcome, output_dir)
    if as_json:
        print_json(document)
    else:
        screen = console.screen()
        for table in tables(outcome):
            screen.print(table)
        for note in outcome.notes:
            screen.print(note, style="dim")
    for path in files:
        print(f"wrote {path}", file=sys.stderr)


def tables(outcome: Outcome) -> Iterator[Table]:
    """One per claim."""
    from kvcompress.reproduce.document import FOOTNOTE, warning
    from kvcompress.reproduce.verdicts import shown

    claims = outcome.plan.claims
    for claim in claims:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"{claim.key}  {claim.title}", expand=True)
        table.title_justify = table.caption_justify = "left"
        if claim is claims[-1]:
            table.caption = " ".join(filter(None, [FOOTNOTE, warning(outcome)]))
        table.add_column("claim, and what was compared", overflow="fold", ratio=1)
        for heading in ("difference", "95 % interval"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for number, statement in enumerate(claim.statements):
            verdict = outcome.verdict(claim, number)
            table.add_row(statement.text, "", "", verdict.upper(), style="bold")
            for finding in outcome.findings[claim.key, number]:
                value, interval = shown(finding)
                table.add_row(f"  {finding.label}", value, interval, str(finding.verdict))
        yield table
