"""Ablation bars: recipes at one budget, sorted, with their paired difference to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcompress.eval.request import NO_BUDGET
from kvcompress.eval_report.results import Panel, Point
from kvcompress.eval_report.style import FAMILIES, GREY, INK, new_figure, plain, tidy, to_png
from kvcompress.report import format_bytes


def ablation_points(panel: Panel, at: str) -> list[Point]:
    """What the bars show: recipes at a budget, and those that have none to choose; the most accurate first."""
    points = [point for point in panel.points if point.budget in (at, NO_BUDGET)]
    return sorted(points, key=lambda point: (-point.accuracy.mean, point.recipe))


def draw_ablation(panel: Panel, at: str, at_budget: str, reference: str | None) -> bytes:
    """PNG: bars of accuracy at the left, paired differences at the right; ``at_budget`` is ``at`` in words."""
    points = ablation_points(panel, at)
    names = 0.35 + 0.085 * max((len(point.recipe) for point in points), default=8)
    height = 1.3 + 0.3 * len(points)
    width = names + (5.9 if reference is None else 9.0)
    figure = new_figure(width, height)
    bottom, tall = 0.8 / height, (height - 1.3) / height
    left = figure.add_axes((names / width, bottom, 4.2 / width, tall))
    figure.text(
        0.12 / width,
        1 - 0.22 / height,
        plain(f"{panel.name}: recipes at {at_budget}"),
        fontsize=12,
        fontweight="bold",
        va="center",
    )
    _draw_bars(left, points)
    if reference is not None:
        right = figure.add_axes(((names + 6.0) / width, bottom, 2.8 / width, tall), sharey=left)
        _draw_differences(right, points, reference)
    families = [family for family in FAMILIES if any(point.family == family for point in points)]
    from matplotlib.patches import Patch

    looks = [Patch(facecolor=FAMILIES[f].color, hatch=FAMILIES[f].hatch, edgecolor="white", label=f) for f in families]
    figure.legend(handles=looks, loc="lower left", ncols=4, frameon=False, fontsize=9, handlelength=2.4)
    return to_png(figure)


def _draw_bars(axes: Any, points: Sequence[Point]) -> None:
    for place, point in enumerate(points):
        look = FAMILIES[point.family]
        mean, error = 100 * point.accuracy.mean, 100 * point.accuracy.standard_error
        axes.barh(place, mean, height=0.68, color=look.color, hatch=look.hatch, edgecolor="white", linewidth=0)
        axes.errorbar(mean, place, xerr=error, fmt="none", ecolor="white", elinewidth=3.2, capsize=4, capthick=3.2)
        axes.errorbar(mean, place, xerr=error, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
        for text, offset in ((f"{mean:.1f} ± {error:.1f}", 64), (format_bytes(point.kv_bytes), 122)):
            axes.annotate(
                text,
                (100, place),
                (offset, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=9,
                color=INK,
                annotation_clip=False,
            )
    axes.set_xlim(0, 100)
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_yticks(range(len(points)), [plain(point.recipe) for point in points])
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("pass@1, % (± 1 standard error), and bytes per sequence", fontsize=9)


def _draw_differences(axes: Any, points: Sequence[Point], reference: str) -> None:
    axes.axvline(0, color=GREY, lw=1.0)
    for place, point in enumerate(points):
        if point.versus is None:
            continue
        mean, error = 100 * point.versus.mean, 100 * point.versus.standard_error
        axes.errorbar(
            mean, place, xerr=error, fmt=FAMILIES[point.family].markers[0], color=FAMILIES[point.family].color,
            ecolor=INK, elinewidth=1.2, capsize=3, markersize=6,
        )  # fmt: skip
    axes.margins(x=0.12)
    axes.patch.set_visible(False)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(plain(f"paired difference to {reference}, points"), fontsize=9)
