"""How figures look: families of recipes by colour, marker, line and hatch, so that neither print nor colour-blindness
takes anything away."""

from __future__ import annotations

import importlib.util
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
    """Colour (of Okabe and Ito) and a darker one for text, markers, line style, and hatch of bars."""

    color: str
    text: str
    markers: str
    line: Any
    hatch: str


FAMILIES = {
    EVICTION: Family("#0072B2", "#005a8c", "oDdp", "-", ""),
    QUANTIZATION: Family("#D55E00", "#a84a00", "sXP*", (0, (1, 1.2)), "////"),
    HYBRID: Family("#009E73", "#00734f", "^v<>", (0, (5, 2)), "...."),
    NONE: Family("#202124", INK, "h", "-", ""),
}
# Filled, empty, half and half: more recipes than markers can still be told apart.
_FILLS = ("full", "none", "left", "bottom", "right", "top")
# By how much the darkest and the lightest recipe of a family depart from its colour, towards black and white.
_DARKEST, _LIGHTEST = 0.4, 0.35
# Keyword arguments of ``plot`` by recipe.
Styles = dict[str, dict[str, Any]]


def families_of(points: Sequence[Point]) -> dict[str, str]:
    """The family of every recipe."""
    return {point.recipe: point.family for point in points}


def recipe_styles(points: Sequence[Point]) -> Styles:
    """Keyword arguments of ``plot`` for every recipe, the same in all panels that are given the same points."""
    families = families_of(points)
    styles: Styles = {}
    for family, look in FAMILIES.items():
        recipes = sorted(recipe for recipe, of in families.items() if of == family)
        for index, recipe in enumerate(recipes):
            rounds, marker = divmod(index, len(look.markers))
            styles[recipe] = {
                "color": _shade(look.color, index, len(recipes)),
                "linestyle": look.line,
                "marker": look.markers[marker],
                "fillstyle": _FILLS[rounds % len(_FILLS)],
                "markersize": 7.0,
                "markerfacecoloralt": "white",
                "linewidth": 1.4,
            }
            if styles[recipe]["fillstyle"] == "none":
                # White inside rather than nothing, so that lines don't run through it.
                styles[recipe] |= {"fillstyle": "full", "markerfacecolor": "white"}
    return styles


def _shade(color: str, index: int, count: int) -> str:
    """The colour of a family for its recipe number ``index``: from darker to lighter, itself if it is the only one."""
    if count == 1:
        return color
    shift = -_DARKEST + (_DARKEST + _LIGHTEST) * index / (count - 1)
    return _mixed(color, 1.0 if shift > 0 else 0.0, abs(shift))


def pale(color: str, strength: float) -> str:
    """A colour thinned with white, as opaque as the colour itself."""
    return _mixed(color, 1.0, 1 - strength)


def _mixed(color: str, grey: float, share: float) -> str:
    from matplotlib.colors import to_hex, to_rgb

    return str(to_hex([channel + (grey - channel) * share for channel in to_rgb(color)]))


def check_matplotlib() -> None:
    """Tell before long work that its figures could not be drawn.

    Raises:
        KVCompressError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise KVCompressError("the report needs matplotlib: pip install matplotlib")


def new_figure(width: float, height: float, **options: Any) -> Any:
    """A figure of so many inches that no global state knows of.

    Raises:
        KVCompressError: if matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
