"""Write docs/data/pareto.json and pareto.md: accuracy against bytes, from run folders of ``kvcompress eval``.

    python tools/pareto_table.py runs/eviction runs/hybrid runs/quantization

``docs/pareto.md`` gives the commands that made the runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvcompress.eval import read_samples, summarize
from kvcompress.eval.records import read_run
from kvcompress.eval.summary import ALL_TASKS, DEFINITIONS, Row

DATA = Path(__file__).parent.parent / "docs" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    samples: list[dict[str, Any]] = []
    for folder in folders:
        samples += read_samples(folder)
    rows = summarize(samples)
    runs = [read_run(folder) or {} for folder in folders]
    document = {
        "runs": [{name: run.get(name) for name in ("command", "device", "versions", "notes")} for run in runs],
        "definitions": DEFINITIONS,
        "rows": [
            {name: value for name, value in row.document().items() if name != "tokens_per_second"} for row in rows
        ],
    }
    (DATA / "pareto.json").write_text(json.dumps(document, indent=1) + "\n")
    (DATA / "pareto.md").write_text(markdown(rows))


def markdown(rows: list[Row]) -> str:
    """One line per recipe and size, one column per task; a dash where a recipe doesn't fit."""
    tasks = [task for task in dict.fromkeys(row.task for row in rows) if task != ALL_TASKS]
    cells = {(row.recipe, row.budget, row.task): row for row in rows}
    lines = [
        "# Accuracy against bytes, all cells",
        "",
        "pass@1 in %, ± standard error; KV held in KiB per sequence at the end of an answer, mean over tasks. "
        "Discussion and commands: [pareto.md](../pareto.md).",
        "",
        "| " + " | ".join(["recipe", "size", "KV held", *tasks, "mean of tasks", "loops", "unfinished"]) + " |",
        "|---|---|" + "---:|" * (len(tasks) + 4),
    ]
    for recipe, budget in dict.fromkeys((row.recipe, row.budget) for row in rows):
        whole = cells.get((recipe, budget, ALL_TASKS))
        own = [cells.get((recipe, budget, task)) for task in tasks]
        figures = [_percent(row) for row in [*own, whole]]
        held = f"{whole.kv_bytes / 1024:.0f}" if whole else "-"
        shares = [f"{100 * share.mean:.1f}" for share in (whole.loops, whole.unfinished)] if whole else ["-", "-"]
        lines.append("| " + " | ".join([recipe, budget, held, *figures, *shares]) + " |")
    return "\n".join(lines) + "\n"


def _percent(row: Row | None) -> str:
    return f"{100 * row.pass_at_1.mean:.1f} ± {100 * row.pass_at_1.standard_error:.1f}" if row else "-"


if __name__ == "__main__":
    main()
