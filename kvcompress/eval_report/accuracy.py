"""Accuracy against bytes per sequence: one panel per task, the Pareto front behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvcompress.eval_report.pareto import pareto_front, staircase
from kvcompress.eval_report.results import NONE, Panel, Point
from kvcompress.eval_report.style import INK, haloed, new_figure, plain, recipe_styles, tidy, to_png
from kvcompress.report import format_bytes, spread

_PANEL = (6.2, 4.2)
_FRONT: dict[str, Any] = {"color": "#b0b4b8", "linewidth": 5.0, "solid_capstyle": "round", "zorder": 1.0, "alpha": 0.75}
# Labels this close in height would overlap; more of them than fit are left to the legend.
_GAP, _MOST = 0.052, 18
# Of a name from its point, in points: to the right, to the left, below, above, and so on.
_OFFSETS = (
    ((8, -1), "left", "center"),
    ((-8, -1), "right", "center"),
    ((0, -9), "center", "top"),
    ((0, 8), "center", "bottom"),
    ((8, -9), "left", "top"),
    ((-8, -9), "right", "top"),
    ((-8, 8), "right", "bottom"),
    ((0, -20), "center", "top"),
)
# Where it belongs (bytes, %), what it says, and the colour of what it names.
_Label = tuple[float, float, str, str]


def front_of(panel: Panel) -> list[Point]:
    """The points of a panel that none beats in bytes and accuracy, by ascending bytes."""
    found = pareto_front([(point.kv_bytes, point.accuracy.mean) for point in panel.points])
    return [panel.points[index] for index in found]


def draw_accuracy(panels: Sequence[Panel]) -> bytes:
    """PNG with one panel for each of ``panels``, two side by side, and one legend for all."""
    everything = [point for panel in panels for point in panel.points]
    styles = recipe_styles(everything)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    # In the place of the panel that is missing, or below.
    free = rows * columns > len(panels) and len(styles) < _MOST
    legend_columns = 1 if free else 3 if columns > 1 else 2
    legend = 0.0 if free else 0.3 + 0.2 * math.ceil((len(styles) + 1) / legend_columns)
    width, height = _PANEL[0] * columns, _PANEL[1] * rows + legend
    figure = new_figure(width, height)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, bottom = column * _PANEL[0] + 0.75, legend + (rows - 1 - row) * _PANEL[1] + 0.65
        axes = figure.add_axes((left / width, bottom / height, (_PANEL[0] - 1.0) / width, (_PANEL[1] - 1.05) / height))
        _draw_panel(axes, panel, styles)
    where = (0.5 + 0.4 / width, 0.6 / height) if free else (0.4 / width, 0.05 / height)
    _draw_legend(figure, styles, everything, legend_columns, where)
    return to_png(figure)


def _draw_panel(axes: Any, panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    sizes = [point.kv_bytes for point in panel.points]
    # Room at the left for names, where lines begin and lie apart.
    span = max(math.log2(max(sizes) / min(sizes)), 1.0)
    low, high = math.log2(min(sizes)) - 0.48 * span, math.log2(max(sizes)) + 0.1 * span
    axes.set_xscale("log", base=2)
    axes.set_xlim(2**low, 2**high)
    axes.set_ylim(-2, 104)
    tidy(axes, grid="both")
    axes.set_title(plain(panel.name), loc="left", fontsize=11)
    axes.set_ylabel("pass@1, %", fontsize=9)
    axes.set_xlabel("bytes of KV cache per sequence (logarithmic)", fontsize=9)
    _set_ticks(axes, sizes)
    x, y = staircase([(p.kv_bytes, 100 * p.accuracy.mean) for p in front_of(panel)], 2**high)
    axes.plot(x, y, **_FRONT)
    starts: list[_Label] = []
    singles: list[_Label] = []
    for recipe, style in styles.items():
        points = sorted((p for p in panel.points if p.recipe == recipe), key=lambda p: p.kv_bytes)
        if not points:
            continue
        means = [100 * p.accuracy.mean for p in points]
        errors = [100 * p.accuracy.standard_error for p in points]
        if points[0].family == NONE:
            axes.axhspan(means[0] - errors[0], means[0] + errors[0], color="#000000", alpha=0.08, lw=0, zorder=0.5)
            axes.axhline(means[0], color="#000000", lw=1.0, linestyle=(0, (1, 1.5)), zorder=0.9)
        at = [p.kv_bytes for p in points]
        axes.errorbar(at, means, yerr=errors, capsize=2.5, elinewidth=0.9, zorder=3, **style)
        (starts if len(points) > 1 else singles).append((at[0], means[0], recipe, style["color"]))
    _label_starts(axes, starts)
    _label_singles(axes, singles, [(p.kv_bytes, 100 * p.accuracy.mean) for p in panel.points])


def _set_ticks(axes: Any, sizes: Sequence[float]) -> None:
    """A few powers of two, or thirds of the axis where there are none in it."""
    from matplotlib.ticker import NullFormatter, NullLocator

    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    ticks = [2.0**k for k in range(math.ceil(low - 0.3), math.floor(high + 0.2) + 1)]
    if len(ticks) < 2:
        ticks = sorted({2**low, 2 ** ((low + high) / 2), 2**high})
    step = max(1, math.ceil(len(ticks) / 7))
    axes.set_xticks(ticks[::step], [format_bytes(tick) for tick in ticks[::step]])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())


def _label_starts(axes: Any, starts: list[_Label]) -> None:
    """Names at the left edge, moved apart and tied to the first points of their lines."""
    if not starts or len(starts) > _MOST:
        return
    low, high = axes.get_ylim()
    starts.sort(key=lambda start: (start[1], start[2]))
    places = spread([(y - low) / (high - low) for _, y, _, _ in starts], gap=_GAP, lowest=0.03, highest=0.97)
    for place, (x, y, recipe, color) in zip(places, starts, strict=True):
        label = axes.annotate(
            plain(recipe),
            xy=(x, y),
            xytext=(0.012, place),
            textcoords="axes fraction",
            fontsize=8,
            color=INK,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (1.0, 0.5),
            },
            zorder=4,
        )
        haloed(label)


def _label_singles(axes: Any, singles: Sequence[_Label], points: Sequence[tuple[float, float]]) -> None:
    """Names beside points that stand alone, where they cover no other point or name; the rest is in the legend."""
    from matplotlib.text import Text

    renderer = axes.figure.canvas.get_renderer()
    taken = [_around(axes.transData.transform(point), 7.0) for point in points]
    # Of the text alone: that of an annotation has its line in it.
    taken += [Text.get_window_extent(label, renderer) for label in axes.texts]
    inside = axes.get_window_extent(renderer)
    for x, y, recipe, _ in sorted(singles, key=lambda single: single[1]):
        # At the top the reference line and the front run to the right.
        for offset, across, along in _OFFSETS if y < 95 else _OFFSETS[2:]:
            look = {"ha": across, "va": along, "fontsize": 8, "color": INK, "zorder": 4}
            label = haloed(axes.annotate(plain(recipe), (x, y), offset, textcoords="offset points", **look))
            box = label.get_window_extent(renderer)
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 + 30 and inside.y0 <= box.y0 and box.y1 <= inside.y1 + 8
            if fits and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _around(centre: Sequence[float], radius: float) -> Any:
    from matplotlib.transforms import Bbox

    x, y = centre
    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _draw_legend(
    figure: Any, styles: dict[str, dict[str, Any]], points: Sequence[Point], columns: int, where: tuple[float, float]
) -> None:
    from matplotlib.lines import Line2D

    families = {point.recipe: point.family for point in points}
    handles = [Line2D([], [], **{**_FRONT, "label": "Pareto front of all recipes"})]
    order = sorted(styles, key=lambda recipe: (families[recipe], recipe))
    for recipe in order:
        name = recipe if recipe == families[recipe] else f"{recipe} ({families[recipe]})"
        handles.append(Line2D([], [], label=plain(name), **styles[recipe]))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=where,
        borderaxespad=0,
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=3.2,
        labelcolor=INK,
    )
