"""Accuracy against bytes per sequence: one large figure, and small ones side by side, the Pareto front behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvcompress.eval_report.pareto import pareto_front, staircase
from kvcompress.eval_report.results import EVICTION, HYBRID, NONE, QUANTIZATION, Panel, Point
from kvcompress.eval_report.style import (
    FAMILIES,
    GREY,
    INK,
    Styles,
    families_of,
    haloed,
    new_figure,
    pale,
    plain,
    recipe_styles,
    tidy,
    to_png,
)
from kvcompress.report import format_bytes

# Inches.
_LARGE, _SMALL, _LEGEND, _LINE = (7.6, 5.8), (5.6, 3.9), 2.35, 0.19
_FRONT: dict[str, Any] = {"color": "#9aa0a6", "linewidth": 6.0, "solid_capstyle": "round", "alpha": 0.6, "zorder": 1.2}
# An axis that spans more than this is logarithmic.
_LINEAR = 3.0
# Of up to so many points, all recipes get their names beside one; the legend has them in any case.
_FEW = 12
# Of two points on the front whose bytes differ by less than this, the more accurate one is named.
_ALIKE = 1.03
# Areas lie on one another: what only two measures together reach is what the others leave uncovered.
_AREAS = ((HYBRID, 0.13), (QUANTIZATION, 0.15), (EVICTION, 0.14))
# Of a name from its point, in points. Above and left of the front there is nothing else.
_ABOVE = (((-7, 6), "right", "bottom"), ((-9, 0), "right", "center"), ((0, 9), "center", "bottom"))
_OFFSETS = (
    ((9, -1), "left", "center"),
    ((-9, -1), "right", "center"),
    ((9, -9), "left", "top"),
    ((-9, -9), "right", "top"),
    ((0, -9), "center", "top"),
    ((0, 9), "center", "bottom"),
    ((0, -22), "center", "top"),
)


def front_of(panel: Panel) -> list[Point]:
    """The points of a panel that none beats in bytes and accuracy, by ascending bytes."""
    return _front(panel.points)


def draw_overview(panel: Panel) -> bytes:
    """PNG of one panel: what every family buys for its bytes as an area, every recipe as a line, the legend beside."""
    styles = recipe_styles(panel.points)
    groups = _legend_groups([panel], styles)
    full = next((point for point in panel.points if point.family == NONE), None)
    # Inches of title and axes; less without the second axis on top.
    around = 1.75 if full is not None else 1.3
    height = max(_LARGE[1], around + _LINE * sum(len(handles) + 1 for _, handles in groups))
    width = _LARGE[0] + _LEGEND
    figure = new_figure(width, height)
    axes = figure.add_axes((0.75 / width, 0.65 / height, (_LARGE[0] - 1.0) / width, (height - around) / height))
    _draw_panel(axes, panel, styles, size=10)
    if full is not None:
        _draw_shares(axes, full.kv_bytes)
    title = f"Accuracy against bytes of KV cache: {_title(panel)}"
    figure.text(0.75 / width, 1 - 0.25 / height, plain(title), fontsize=13, fontweight="bold", va="center")
    top = height - around + 0.7
    for heading, handles in groups:
        _draw_legend(figure, heading, handles, ((_LARGE[0] - 0.1) / width, top / height), "upper left")
        top -= _LINE * (len(handles) + bool(heading)) + 0.12
    return to_png(figure)


def draw_accuracy(panels: Sequence[Panel]) -> bytes:
    """PNG with one panel for each of ``panels``, two side by side, and one legend for all below."""
    styles = recipe_styles([point for panel in panels for point in panel.points])
    groups = _legend_groups(panels, styles)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    legend = 0.3 + _LINE * (1 + max(len(handles) for _, handles in groups))
    # Room for the legend's columns, be there one panel only.
    width, height = max(_SMALL[0] * columns, 2.4 * len(groups)), _SMALL[1] * rows + legend
    figure = new_figure(width, height)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, bottom = column * _SMALL[0] + 0.7, legend + (rows - 1 - row) * _SMALL[1] + 0.6
        axes = figure.add_axes((left / width, bottom / height, (_SMALL[0] - 0.9) / width, (_SMALL[1] - 1.0) / height))
        _draw_panel(axes, panel, styles, size=9)
        axes.set_title(plain(_title(panel)), loc="left", fontsize=11, fontweight="bold")
    for index, (heading, handles) in enumerate(groups):
        where = ((0.35 + index * (width - 0.35) / len(groups)) / width, (legend - 0.1) / height)
        _draw_legend(figure, heading, handles, where, "upper left")
    return to_png(figure)


def _title(panel: Panel) -> str:
    counts = sorted({point.problems for point in panel.points})
    span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"{panel.name} ({span} problem{'s'[: counts != [1]]})"


def _front(points: Sequence[Point]) -> list[Point]:
    found = pareto_front([(point.kv_bytes, point.accuracy.mean) for point in points])
    return [points[index] for index in found]


def _draw_panel(axes: Any, panel: Panel, styles: Styles, size: float) -> None:
    sizes = [point.kv_bytes for point in panel.points]
    high = _set_bytes_axis(axes, sizes, size)
    axes.set_ylim(-2, 106)
    axes.set_yticks(range(0, 101, 20))
    tidy(axes, grid="both")
    axes.set_axisbelow(False)
    axes.grid(zorder=0.8)
    axes.tick_params(labelsize=size)
    axes.set_ylabel("pass@1, %", fontsize=size)
    for family, strength in _AREAS:
        points = [point for point in panel.points if point.family == family]
        if points:
            x, y = _steps(_front(points), high)
            axes.fill_between(x, y, -2, color=pale(FAMILIES[family].color, strength), lw=0, zorder=0.5)
    for point in panel.points:
        if point.family == NONE:
            axes.axhline(100 * point.accuracy.mean, color=INK, lw=1.0, linestyle=(0, (1, 2)), zorder=1.3)
    front = front_of(panel)
    axes.plot(*_steps(front, high), **_FRONT)
    for recipe, style in styles.items():
        points = sorted((p for p in panel.points if p.recipe == recipe), key=lambda p: p.kv_bytes)
        means = [100 * p.accuracy.mean for p in points]
        errors = [100 * p.accuracy.standard_error for p in points]
        at = [p.kv_bytes for p in points]
        axes.errorbar(at, means, yerr=errors, capsize=2.5, elinewidth=1.0, zorder=3, **style)
    _label(axes, panel, front, size)


def _steps(front: Sequence[Point], end: float) -> tuple[list[float], list[float]]:
    return staircase([(p.kv_bytes, 100 * p.accuracy.mean) for p in front], end)


def _set_bytes_axis(axes: Any, sizes: Sequence[float], font: float) -> float:
    """Range and ticks of the axis of bytes; returns its upper end."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    least, most = min(sizes), max(sizes)
    logarithmic = most > _LINEAR * least
    if logarithmic:
        span = math.log2(most / least)
        low, high = least / 2 ** (0.09 * span), most * 2 ** (0.09 * span)
        axes.set_xscale("log", base=2)
        # Powers of two, and one and a half times them where that gives no more than eight.
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        ticks = [2.0**k for k in powers if low <= 2.0**k <= high]
        between = [1.5 * 2.0**k for k in powers if low <= 1.5 * 2.0**k <= high]
        ticks = sorted(ticks + between) if len(ticks) + len(between) <= 8 else ticks[:: math.ceil(len(ticks) / 8)]
    else:
        span = max(most - least, 0.1 * most)
        low, high = max(0.0, least - 0.25 * span), most + 0.25 * span
        step = 2.0 ** math.ceil(math.log2((high - low) / 6))
        ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    scale = " (logarithmic)" if logarithmic else ""
    axes.set_xlabel(f"bytes of KV cache per sequence at the end of its answer{scale}", fontsize=font)
    return high


def _draw_shares(axes: Any, full: float) -> None:
    """A second axis on top: the same bytes as shares of what the full cache takes."""
    from matplotlib.ticker import NullFormatter, NullLocator

    top = axes.secondary_xaxis("top", functions=(lambda x: 100 * x / full, lambda x: x * full / 100))
    shares: list[float] = []
    before = -1.0
    for share in (1, 2, 3, 5, 7.5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200):
        x, _ = axes.transAxes.inverted().transform(axes.transData.transform((share * full / 100, 0)))
        # Labels closer than this would touch.
        if 0 <= x <= 1 and x - before > 0.06:
            shares.append(share)
            before = x
    top.set_xticks(shares, [f"{share:g} %" for share in shares])
    top.xaxis.set_minor_formatter(NullFormatter())
    top.xaxis.set_minor_locator(NullLocator())
    top.tick_params(labelsize=9, color="#9aa0a6", labelcolor=GREY)
    top.spines["top"].set_color("#9aa0a6")
    top.set_xlabel("share of the full cache", fontsize=9, color=GREY)


def _label(axes: Any, panel: Panel, front: Sequence[Point], size: float) -> None:
    """Names beside points, where they cover no other point or name: of the best of each family, and of all if few.

    Those on the front of all are bold.
    """
    renderer = axes.figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    taken = [_covered(axes, point) for point in panel.points]
    best = _telling(front)
    on_front = set(best)
    for family, _ in _AREAS:
        for recipe, points in _telling(_front([p for p in panel.points if p.family == family])).items():
            best.setdefault(recipe, points)
    named = {recipe: points[len(points) // 2] for recipe, points in best.items()}
    few = len(panel.points) <= _FEW
    if few:
        for point in sorted(panel.points, key=lambda p: p.kv_bytes):
            named.setdefault(point.recipe, point)
    for recipe, point in named.items():
        where = (point.kv_bytes, 100 * point.accuracy.mean)
        for offset, across, along in (_ABOVE if recipe in best else ()) + (_OFFSETS if few else ()):
            look: dict[str, Any] = {"ha": across, "va": along, "fontsize": size, "color": FAMILIES[point.family].text}
            if recipe in on_front:
                look["fontweight"] = "bold"
            label = haloed(axes.annotate(plain(recipe), where, offset, textcoords="offset points", zorder=5, **look))
            box = label.get_window_extent(renderer)
            # Below, the axis itself is the end; a name may reach over the little that is left to it.
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 - 9 <= box.y0 and box.y1 <= inside.y1
            if fits and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _telling(front: Sequence[Point]) -> dict[str, list[Point]]:
    """By recipe, its points on the front, without those that next to no more bytes improve on."""
    found: dict[str, list[Point]] = {}
    for place, point in enumerate(front, 1):
        if place == len(front) or front[place].kv_bytes > _ALIKE * point.kv_bytes:
            found.setdefault(point.recipe, []).append(point)
    return found


def _covered(axes: Any, point: Point) -> Any:
    """The box, in pixels, of a point's marker and error bar."""
    from matplotlib.transforms import Bbox

    mean, error = 100 * point.accuracy.mean, 100 * point.accuracy.standard_error
    (x, y), (_, top), (_, bottom) = axes.transData.transform([(point.kv_bytes, mean + e) for e in (0, error, -error)])
    return Bbox.from_extents(x - 7, min(bottom, y - 7), x + 7, max(top, y + 7))


def _legend_groups(panels: Sequence[Panel], styles: Styles) -> list[tuple[str, list[Any]]]:
    """(heading, handles): the front and the full cache, then family by family its recipes, the most accurate first."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    points = [point for panel in panels for point in panel.points]
    families = families_of(points)
    height = {recipe: _mean_height([p for p in points if p.recipe == recipe]) for recipe in styles}
    order = sorted(styles, key=lambda recipe: (-height[recipe], recipe))
    first: list[Any] = [Line2D([], [], **{**_FRONT, "label": "Pareto front of all"})]
    first += [Line2D([], [], label=plain(f"{r} (full cache)"), **styles[r]) for r in order if families[r] == NONE]
    groups = [("", first)]
    for family, strength in reversed(_AREAS):
        handles: list[Any] = [
            Line2D([], [], label=plain(recipe), **styles[recipe]) for recipe in order if families[recipe] == family
        ]
        if handles:
            area = Patch(facecolor=pale(FAMILIES[family].color, strength), label="what they reach")
            groups.append((family, [*handles, area]))
    return groups


def _mean_height(points: Sequence[Point]) -> float:
    return sum(point.accuracy.mean for point in points) / len(points)


def _draw_legend(figure: Any, heading: str, handles: Sequence[Any], where: tuple[float, float], corner: str) -> None:
    legend = figure.legend(
        handles=handles,
        title=heading or None,
        title_fontproperties={"weight": "bold", "size": 9},
        alignment="left",
        loc=corner,
        bbox_to_anchor=where,
        borderaxespad=0,
        frameon=False,
        fontsize=9,
        handlelength=2.8,
        labelspacing=0.45,
        labelcolor=INK,
    )
    figure.add_artist(legend)
