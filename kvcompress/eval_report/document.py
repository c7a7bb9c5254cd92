"""The report: one HTML file that needs nothing else, and its figures as PNG files beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompress.compare import Estimate
from kvcompress.environment import versions
from kvcompress.errors import KVCompressError
from kvcompress.eval.records import open_folder
from kvcompress.eval.summary import ALL_TASKS, DEFINITIONS
from kvcompress.eval_report.accuracy import draw_accuracy, draw_overview, front_of
from kvcompress.eval_report.bars import ablation_points, draw_ablation
from kvcompress.eval_report.html import Markup, Writer, element, page, slug, table
from kvcompress.eval_report.loops import draw_loops
from kvcompress.eval_report.map_sections import map_sections
from kvcompress.eval_report.recording import Recording
from kvcompress.eval_report.results import Panel, Point, Results, Run
from kvcompress.report import format_bytes

REPORT = "report.html"
UNCERTAINTY = (
    f"Accuracy is pass@1: {DEFINITIONS['pass_at_1']}. What follows ± is one standard error: the "
    f"{DEFINITIONS['standard_error']}. All samples of a problem are drawn together. A paired difference is the "
    "mean, over the problems that both recipes have, of the difference of a problem's pass rates, with its standard "
    f"error by the same bootstrap: what makes a problem hard for both cancels out. {ALL_TASKS.capitalize()}: "
    f"{DEFINITIONS['all_tasks']}. An error of 0 "
    "means that all problems came out alike, not that there is no uncertainty. The Pareto front is that of the means: "
    "points within their errors of it may belong to it as well, and the best of many recipes was also lucky."
)


def write_report(
    results: Results,
    folder: Path,
    *,
    recordings: Sequence[Recording] = (),
    command: str | None = None,
    title: str = "KV-cache compression: evaluation report",
) -> list[Path]:
    """Write ``report.html`` and its figures.

    Args:
        recordings: for the maps of retained tokens. command: that makes the report, for the record.

    Returns:
        The files written, the report first.

    Raises:
        KVCompressError: if the folder cannot be written, or matplotlib is not installed.
    """
    open_folder(folder)
    writer = Writer(folder)
    try:
        content = [
            *_summary(results),
            *_accuracy(writer, results),
            *_ablation(writer, results),
            *_loops(writer, results),
            *map_sections(writer, recordings),
            element("h2", "How sure the figures are"),
            element("p", UNCERTAINTY),
            *_runs(results.runs, command),
        ]
        path = folder / REPORT
        path.write_text(page(title, *content), encoding="utf-8")
    except OSError as error:
        raise KVCompressError(f"output folder: {folder} cannot be written: {error.strerror or error}") from error
    return [path, *writer.files]


def _summary(results: Results) -> list[Markup]:
    first = results.runs[0].about
    panels = [panel for panel in results.panels if panel.name != ALL_TASKS]
    counts = "; ".join(
        f"{panel.name}: {_span([p.problems for p in panel.points])} problems, "
        f"{_span([p.samples for p in panel.points])} samples per recipe and budget"
        for panel in panels
    )
    recipes = {point.recipe for panel in panels for point in panel.points}
    lines = [
        element(
            "p",
            f"Model {first['request']['model']} in {first['model'].get('dtype')}, {len(recipes)} recipes, budgets "
            f"{', '.join(results.budgets)} (- is a recipe without one). {counts}.",
        )
    ]
    if results.notes:
        lines.append(element("ul", *(element("li", note) for note in dict.fromkeys(results.notes))))
    return lines


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# -- sections ----------------------------------------------------------------------------------------------------------


def _accuracy(writer: Writer, results: Results) -> list[Markup]:
    first, tasks = results.panels[0], results.panels[1:]
    content = [
        element("h2", "Accuracy against bytes per sequence"),
        writer.figure(
            "accuracy",
            draw_overview(first),
            f"Accuracy against bytes of KV cache per sequence, {first.name}; all numbers are in the table below.",
            f"{first.name}: accuracy against bytes of KV cache per sequence, ± 1 standard error. Up and to the left is "
            "better. A line joins the budgets of one recipe. An area is what the best of a family reaches with so many "
            "bytes; thick grey is the Pareto front of all, whose recipes are named in bold. Dotted: the full cache.",
        ),
        _accuracy_table(first, results.reference),
    ]
    if not tasks:
        return content
    picture = writer.figure(
        "accuracy-tasks",
        draw_accuracy(tasks),
        "Accuracy against bytes of KV cache per sequence, one panel per task; all numbers are in the tables below.",
        "The same, task by task.",
    )
    return [*content, picture, *(_accuracy_table(panel, results.reference) for panel in tasks)]


def _accuracy_table(panel: Panel, reference: str | None) -> Markup:
    front = {(point.recipe, point.budget) for point in front_of(panel)}
    headings = ["recipe", "budget", "family", "problems", "samples", "bytes per sequence", "pass@1, %"]
    headings += [f"paired difference to {reference}"] if reference else []
    headings += ["tokens written", "tokens kept", "Pareto front"]
    rows = [
        [
            point.recipe,
            point.budget,
            point.family,
            f"{point.problems:,}",
            f"{point.samples:,}",
            format_bytes(point.kv_bytes),
            _percent(point.accuracy),
            *([_difference(point, reference)] if reference else []),
            f"{point.output_tokens:,.1f}",
            f"{point.tokens_kept:,.1f}",
            "yes" if (point.recipe, point.budget) in front else "",
        ]
        for point in panel.points
    ]
    return table(f"Accuracy and bytes: {panel.name}", headings, rows, names=3)


def _ablation(writer: Writer, results: Results) -> list[Markup]:
    content = [element("h2", f"Recipes at {results.at_budget}")]
    reference = results.reference
    for number, panel in enumerate(results.panels):
        points = ablation_points(panel, results.at)
        if not points:
            content.append(element("p", f"{panel.name}: no recipe was run at {results.at_budget}."))
            continue
        against = f", and paired difference to {reference}" if reference else ""
        content.append(
            writer.figure(
                f"ablation-{number}-{slug(panel.name)}",
                draw_ablation(panel, results.at, results.at_budget, reference),
                f"Accuracy per recipe at {results.at_budget}, {panel.name}; the numbers are in the table below.",
                f"{panel.name}: accuracy per recipe at {results.at_budget}{against}, ± 1 standard error. Recipes "
                "without anything to choose are there too, at the bytes that stand beside them.",
            )
        )
        headings = ["recipe", "family", "bytes per sequence", "pass@1, %"]
        headings += [f"paired difference to {reference}"] if reference else []
        rows = [
            [
                point.recipe,
                point.family,
                format_bytes(point.kv_bytes),
                _percent(point.accuracy),
                *([_difference(point, reference)] if reference else []),
            ]
            for point in points
        ]
        content.append(table(f"Recipes at {results.at_budget}: {panel.name}", headings, rows, names=2))
    return content


def _loops(writer: Writer, results: Results) -> list[Markup]:
    content = [
        element("h2", "Loops and unfinished answers"),
        element("p", f"Loop: {DEFINITIONS['loops']}. Unfinished: {DEFINITIONS['unfinished']}."),
    ]
    for number, panel in enumerate(results.panels):
        content.append(
            writer.figure(
                f"loops-{number}-{slug(panel.name)}",
                draw_loops(panel, results.budgets),
                f"Share of looping and of unfinished answers by recipe and budget, {panel.name}; numbers in the table.",
                f"{panel.name}: share of answers that end in a loop, and of answers cut off, by recipe and budget.",
            )
        )
        rows = [[p.recipe, p.budget, f"{p.samples:,}", _percent(p.loops), _percent(p.unfinished)] for p in panel.points]
        headings = ["recipe", "budget", "samples", "loops, %", "unfinished, %"]
        content.append(table(f"Loops and unfinished answers: {panel.name}", headings, rows, names=2))
    return content


def _runs(runs: Sequence[Run], command: str | None) -> list[Markup]:
    content = [element("h2", "How this was made")]
    if command:
        content += [element("p", "This report:"), element("pre", command)]
    made_by = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    content.append(element("p", f"Report written with {made_by}."))
    for run in runs:
        about = run.about
        request = about["request"]
        rows: list[list[object]] = [
            ["command", element("code", about.get("command") or "from Python")],
            ["samples", f"{len(run.samples):,} of {run.expected:,}"],
            ["problems per task, samples per problem", f"{request['problems']:,}, {request['samples']:,}"],
            ["model", f"{request['model']} ({about['model'].get('dtype')})"],
            ["fingerprint of the weights", element("code", about["model"].get("fingerprint"))],
            ["temperature, top_p, seed", f"{request['temperature']}, {request['top_p']}, {request['seed']}"],
            ["batch size, device", f"{about.get('batch_size')}, {about.get('device')}"],
            ["versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)],
            ["tasks", element("code", _json(request["tasks"]))],
            ["request", element("code", _json({k: v for k, v in request.items() if k not in ("tasks", "settings")}))],
        ]
        content.append(element("h3", str(run.folder)))
        content.append(table(f"Run {run.folder}", ["what", "value"], rows, names=2))
        cells = [
            [cell["recipe"], cell["budget"], cell["task"], element("code", _json(cell["config"])),
             f"{cell['context']:,}", f"{cell['max_new_tokens']:,}"]
            for cell in about["cells"]
        ]  # fmt: skip
        headings = ["recipe", "budget", "task", "config as run", "context", "max_new_tokens"]
        content.append(table(f"Recipes as run in {run.folder}", headings, cells, names=4))
    return content


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _percent(estimate: Estimate, form: str = ".1f") -> str:
    return f"{100 * estimate.mean:{form}} ± {100 * estimate.standard_error:.1f}"


def _difference(point: Point, reference: str | None) -> str:
    if point.versus is None:
        return "reference" if point.recipe == reference else "-"
    return _percent(point.versus, "+.1f")
