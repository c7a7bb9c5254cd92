"""How figures look: families of recipes by colour, marker, line and hatch, so that neither print nor colour-blindness
takes anything away."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcompress.errors import KVCompressError
from kvcompress.eval_report.results import EVICTION, HYBRID, NONE, QUANTIZATION, Point

INK, GREY, PALE = "#202124", "#5f6368", "#e4e4e4"
DPI = 150


@dataclass(frozen=True)
class Family:
    """Colour (of Okabe and Ito), markers in the order of recipes, line style, and hatch of bars."""

    color: str
    markers: str
    line: Any
    hatch: str


FAMILIES = {
    EVICTION: Family("#0072B2", "oD", "-", ""),
    QUANTIZATION: Family("#D55E00", "sX*", ":", "////"),
    HYBRID: Family("#009E73", "^v<>", (0, (5, 2)), "...."),
    NONE: Family("#000000", "h", "-", "xxxx"),
}
# Filled, empty, half and half: more recipes than markers can still be told apart.
_FILLS = ("full", "none", "left", "bottom", "right", "top")


def recipe_styles(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Keyword arguments of ``plot`` for every recipe, the same in all panels that are given the same points."""
    counts: dict[str, int] = {}
    styles: dict[str, dict[str, Any]] = {}
    for recipe, family in sorted({(point.recipe, point.family) for point in points}):
        index = counts[family] = counts.get(family, -1) + 1
        look = FAMILIES[family]
        rounds, marker = divmod(index, len(look.markers))
        styles[recipe] = {
            "color": look.color,
            "linestyle": look.line,
            "marker": look.markers[marker],
            "fillstyle": _FILLS[rounds % len(_FILLS)],
            "markersize": 6.5,
            "markerfacecoloralt": "white",
            "linewidth": 1.3,
        }
    return styles


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure of so many inches that no global state knows of.

    Raises:
        KVCompressError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVCompressError("the report needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def haloed(label: Any) -> Any:
    """The same label, with white around its letters, so that lines behind it don't make it hard to read."""
    from matplotlib.patheffects import withStroke

    label.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
    return label


def to_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def plain(value: str) -> str:
    """Text for matplotlib, which would take what stands between two dollar signs for mathematics."""
    return value.replace("$", r"\$")


def tidy(axes: Any, grid: str | None = None) -> None:
    """Only the axes that are read, and a pale grid behind."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa0a6")
    axes.tick_params(color="#9aa0a6", labelsize=9)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=PALE, lw=0.8)
