"""The report: one HTML file that needs nothing else, and its figures as PNG files beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompress.compare import Estimate
from kvcompress.environment import versions
from kvcompress.errors import KVCompressError
from kvcompress.eval.records import open_folder
from kvcompress.eval.summary import DEFINITIONS
from kvcompress.eval_report.accuracy import draw_accuracy, front_of
from kvcompress.eval_report.bars import ablation_points, draw_ablation
from kvcompress.eval_report.html import Markup, element, figure, page, table
from kvcompress.eval_report.loops import draw_loops
from kvcompress.eval_report.pictures import draw_map, draw_spreads, limits
from kvcompress.eval_report.recording import Recording
from kvcompress.eval_report.results import MEAN, Panel, Point, Results, Run
from kvcompress.report import format_bytes

REPORT = "report.html"
# Of a map, as rows of its table; thousands of them, of thousands of positions each, would be no table.
_MOMENTS = 12
UNCERTAINTY = (
    f"Accuracy is pass@1: {DEFINITIONS['pass_at_1']}. What follows ± is one standard error, the "
    f"{DEFINITIONS['standard_error']}, so all samples of a problem are drawn together. A paired difference is the "
    "mean, over the problems that both recipes have, of the difference of a problem's pass rates, with its standard "
    "error by the same bootstrap: what makes a problem hard for both cancels out. In a mean over tasks every task "
    "counts alike, and the error is the root sum of squares of the tasks' errors over their number. An error of 0 "
    "means that all problems came out alike, not that there is no uncertainty. The Pareto front is that of the means: "
    "points within their errors of it may belong to it as well, and the best of many recipes was also lucky."
)


class _Writer:
    """Puts figures into the page and beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def figure(self, name: str, png: bytes, alternative: str, caption: str) -> Markup:
        path = self.folder / f"{name}.png"
        path.write_bytes(png)
        self.files.append(path)
        return figure(png, alternative, caption)


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
    writer = _Writer(folder)
    try:
        content = [
            *_summary(results),
            *_accuracy(writer, results),
            *_ablation(writer, results),
            *_loops(writer, results),
            *_maps(writer, recordings),
            *_spreads(writer, recordings),
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
    panels = [panel for panel in results.panels if panel.name != MEAN]
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


def _accuracy(writer: _Writer, results: Results) -> list[Markup]:
    picture = writer.figure(
        "accuracy",
        draw_accuracy(results.panels),
        "Accuracy against bytes of KV cache per sequence, one panel per task; all numbers are in the tables below.",
        "Accuracy against bytes of KV cache per sequence, ± 1 standard error. Up and to the left is better. A line "
        "joins the budgets of one recipe; colour, marker and line style tell families apart. Dotted: full cache, with "
        "its error as a band. Thick grey: Pareto front, the best accuracy that so many bytes buy.",
    )
    return [
        element("h2", "Accuracy against bytes per sequence"),
        picture,
        *(_accuracy_table(panel, results.reference) for panel in results.panels),
    ]


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


def _ablation(writer: _Writer, results: Results) -> list[Markup]:
    content = [element("h2", f"Recipes at budget {results.at}")]
    reference = results.reference
    for number, panel in enumerate(results.panels):
        points = ablation_points(panel, results.at)
        if not points:
            content.append(element("p", f"{panel.name}: no recipe was run at budget {results.at}."))
            continue
        against = f", and paired difference to {reference}" if reference else ""
        content.append(
            writer.figure(
                f"ablation-{number}-{_slug(panel.name)}",
                draw_ablation(panel, results.at, reference),
                f"Accuracy per recipe at budget {results.at}, {panel.name}; the numbers are in the table below.",
                f"{panel.name}: accuracy per recipe at budget {results.at}{against}, ± 1 standard error. Recipes "
                "without a budget to choose are there too, at the bytes they take: bars don't compare equal bytes.",
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
        content.append(table(f"Recipes at budget {results.at}: {panel.name}", headings, rows, names=2))
    return content


def _loops(writer: _Writer, results: Results) -> list[Markup]:
    content = [
        element("h2", "Loops and unfinished answers"),
        element("p", f"Loop: {DEFINITIONS['loops']}. Unfinished: {DEFINITIONS['unfinished']}."),
    ]
    for number, panel in enumerate(results.panels):
        content.append(
            writer.figure(
                f"loops-{number}-{_slug(panel.name)}",
                draw_loops(panel, results.budgets),
                f"Share of looping and of unfinished answers by recipe and budget, {panel.name}; numbers in the table.",
                f"{panel.name}: share of answers that end in a loop, and of answers cut off, by recipe and budget.",
            )
        )
        rows = [
            [p.recipe, p.budget, f"{p.samples:,}", f"{100 * p.loops:.1f}", f"{100 * p.unfinished:.1f}"]
            for p in panel.points
        ]
        headings = ["recipe", "budget", "samples", "loops, %", "unfinished, %"]
        content.append(table(f"Loops and unfinished answers: {panel.name}", headings, rows, names=2))
    return content


def _maps(writer: _Writer, recordings: Sequence[Recording]) -> list[Markup]:
    if not recordings:
        return []
    content = [
        element("h2", "Which tokens stay"),
        element(
            "p",
            "Every recipe reads the same text: one problem and the answer that the model writes to it with its full "
            "cache. Positions run to the right, time downwards, one line after the prompt and after every compression.",
        ),
    ]
    for number, recording in enumerate(recordings):
        name = f"{recording.recipe} {recording.budget}"
        content.append(
            writer.figure(
                f"map-{number}-{_slug(recording.recipe)}",
                draw_map(recording),
                f"Positions that {name} holds over time, by layer and head; those held at the end are in the table.",
                f"{name}: positions held by layer and KV head, over {recording.tokens:,} tokens of which "
                f"{recording.prompt_tokens:,} are the prompt (left of the dashed line).",
            )
        )
        prompt, last = recording.prompt_tokens, len(recording.seen) - 1
        shown = sorted({round(last * k / (_MOMENTS - 1)) for k in range(_MOMENTS)})
        rows = []
        for layer in recording.kept[0]:
            for head in range(len(recording.kept[0][layer])):
                for moment in shown:
                    seen, held = recording.seen[moment], recording.kept[moment][layer][head].tolist()
                    of_prompt = sum(position < prompt for position in held)
                    rows.append([f"{layer}", f"{head}", f"{seen:,}", f"{of_prompt:,}", f"{len(held) - of_prompt:,}",
                                 ranges(held)])  # fmt: skip
        headings = ["layer", "head", "tokens read", "held of the prompt", "held of the answer", "positions"]
        moments = "" if len(shown) == last + 1 else f" ({len(shown)} of {last + 1:,} moments)"
        content.append(table(f"Positions held: {name}{moments}", headings, rows, names=2))
    return content


def ranges(positions: Sequence[int]) -> str:
    """Ascending numbers in short: ``0-3, 7, 9-10``."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _spreads(writer: _Writer, recordings: Sequence[Recording]) -> list[Markup]:
    if not recordings:
        return []
    recording = next((r for r in recordings if r.thresholds), recordings[0])
    name = f"{recording.recipe} {recording.budget}"
    protects = "" if recording.thresholds else " It has no stage value_range, so there is no threshold to show."
    rows = []
    for layer, spreads in recording.spreads.items():
        values = spreads.flatten().double()
        found = [float(values.quantile(q)) for q in (0, 0.25, 0.5, 0.75, 1)]
        limit = limits(recording, layer)
        share = "" if limit is None else f"{100 * float((values >= limit[1]).double().mean()):.1f}"
        thresholds = ["", "", ""] if limit is None else [f"{value:.4g}" for value in limit]
        rows.append([f"{layer}", f"{len(values):,}", *(f"{value:.4g}" for value in found), *thresholds, share])
    headings = ["layer", "vectors", "least", "25 %", "median", "75 %", "largest", "lowest threshold"]
    headings += ["median threshold", "highest threshold", "at or above the median threshold, %"]
    return [
        element("h2", "Value ranges and what is protected"),
        writer.figure(
            "value-range",
            draw_spreads(recording),
            f"Histograms of the value {recording.statistic} per layer, with thresholds; numbers in the table below.",
            f"{name}: {recording.statistic} of the value vector of every token and KV head (logarithmic), as the model "
            "made them in this run. The threshold is the least among the candidates that the stage value_range "
            "protected at an event in a head, tokens protected before it (sinks) aside: the median over events and "
            f"heads, and the whole span.{protects}",
        ),
        table(f"Value {recording.statistic} per layer: {name}", headings, rows),
    ]


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


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]
