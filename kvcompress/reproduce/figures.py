"""One figure per claim: how accurate the recipes are, and below it every comparison with its interval and verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcompress.eval_report.style import GREY, INK, haloed, new_figure, plain, tidy, to_png
from kvcompress.report import spread
from kvcompress.reproduce.claims import BUDGETS, FULL, SLOTS, SLOTS_AT, WHOLE, Claim, slots
from kvcompress.reproduce.recipes import Arm, arms_for
from kvcompress.reproduce.run import Outcome
from kvcompress.reproduce.verdicts import REACH, Finding, Verdict, shown

# Colours of Okabe and Ito; markers and fillings tell the same without colour.
_LOOKS: dict[Verdict, dict[str, Any]] = {
    Verdict.HOLDS: {"color": "#0072B2", "marker": "o"},
    Verdict.FAILS: {"color": "#D55E00", "marker": "X"},
    Verdict.UNDECIDED: {"color": GREY, "marker": "D", "markerfacecolor": "white"},
}
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "v", "linestyle": ":"},
    {"color": "#000000", "marker": "D", "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#56B4E9", "marker": "P", "linestyle": (0, (6, 3))},
)
_WIDTH, _ROW, _CHARACTER = 9.6, 0.24, 0.072  # inches
_RIGHT = 2.3  # for what is written at the right of a panel
_SIZE_MARKERS = "os^Dv"
Draw = Callable[[Any], None]


def draw_claim(claim: Claim, outcome: Outcome) -> bytes:
    """PNG."""
    rows = _rows(claim, outcome)
    recipes = list(dict.fromkeys(arm.recipe for arm in arms_for([claim])))
    # Height and left edge of what is above the comparisons, and what draws it.
    upper: tuple[float, float, Draw] | None = None
    names = [row.label for row in rows if isinstance(row, Finding)]
    if claim.key == "b":
        upper = 2.6, 0.75, lambda axes: _draw_slots(axes, outcome)
    elif claim.key == "f":
        upper = 3.2, 0.75, lambda axes: _draw_budgets(axes, recipes, outcome)
    elif len(recipes) > 1:
        names += recipes
    left = 0.35 + _CHARACTER * max(map(len, names), default=10)
    if upper is None and len(recipes) > 1:
        upper = _ROW * len(recipes), left, lambda axes: _draw_accuracy(axes, recipes, claim, outcome)
    above, forest = (0.0 if upper is None else upper[0] + 0.85), _ROW * len(rows)
    height = 1.15 + above + forest
    figure = new_figure(_WIDTH, height)
    title = plain(f"{claim.key}. {claim.title}")
    figure.text(0.12 / _WIDTH, 1 - 0.22 / height, title, fontsize=12, weight="bold", va="center")

    def panel(start: float, bottom: float, tall: float) -> Any:
        return figure.add_axes((start / _WIDTH, bottom / height, (_WIDTH - start - _RIGHT) / _WIDTH, tall / height))

    if upper is not None:
        tall, start, draw = upper
        draw(panel(start, height - 0.6 - tall, tall))
    _draw_forest(panel(left, 0.55, forest), rows)
    return to_png(figure)


def _rows(claim: Claim, outcome: Outcome) -> list[str | Finding]:
    """Statements, and below each its comparisons."""
    rows: list[str | Finding] = []
    for number, statement in enumerate(claim.statements):
        rows += [f"{statement.text}: {outcome.verdict(claim, number)}", *outcome.findings[claim.key, number]]
    return rows


def _draw_forest(axes: Any, rows: Sequence[str | Finding]) -> None:
    """Comparisons from top to bottom; a bar other than 0 is a short dashed line of its own."""
    in_points = all(row.better is not None or row.value is None for row in rows if isinstance(row, Finding))
    scale = 100 if in_points else 1
    axes.axvline(0, color=INK, lw=0.9)
    for place, row in enumerate(rows):
        if isinstance(row, str):
            # From the left edge of the figure on.
            look: dict[str, Any] = {"weight": "bold", "fontsize": 8.5}
            _write(axes, (0, place), row, 12 - 72 * axes.get_position().x0 * _WIDTH, **look)
            continue
        if row.value is not None:
            reach = scale * REACH * row.value.standard_error
            look = {"markersize": 6, "capsize": 3, "elinewidth": 1.4, "linestyle": "none", **_LOOKS[row.verdict]}
            axes.errorbar(scale * row.value.mean, place, xerr=reach, **look)
        if row.bar:
            bar = scale * row.bar
            axes.plot([bar, bar], [place - 0.45, place + 0.45], color=INK, lw=1.2, linestyle=(0, (2, 1)))
        _write(axes, (1, place), f"{shown(row)[0]}  {row.verdict}", 8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    labels = {place: row.label for place, row in enumerate(rows) if isinstance(row, Finding)}
    axes.set_yticks(list(labels), [plain(label) for label in labels.values()])
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.06)
    what = (
        "first minus second, points of pass@1"
        if in_points
        else "correlation, or additional part of the error (1 is all)"
    )
    axes.set_xlabel(f"{what}, with 95 % interval", fontsize=9)


def _write(axes: Any, where: tuple[float, float], text: str, right: float, **look: Any) -> None:
    """Text at (fraction of the width, row), so many points to the right, outside of the axes if need be."""
    label = axes.annotate(
        plain(text),
        where,
        (right, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        annotation_clip=False,
        **{"va": "center", "fontsize": 8, "color": INK, **look},
    )
    haloed(label)


def _draw_accuracy(axes: Any, recipes: Sequence[str], claim: Claim, outcome: Outcome) -> None:
    """One row per recipe, one marker per size of the cache."""
    sizes = list(dict.fromkeys(arm.size for arm in arms_for([claim]) if arm.size != WHOLE))
    for place, recipe in enumerate(recipes):
        said = []
        for size in [WHOLE, *sizes]:
            value = outcome.accuracy.get(Arm(recipe, size))
            if value is None:
                continue
            index = sizes.index(size) if size in sizes else 0
            look = {"marker": _SIZE_MARKERS[index], "color": INK if size == WHOLE else _LINES[index]["color"]}
            mean, error = 100 * value.mean, 100 * value.standard_error
            axes.errorbar(mean, place, xerr=error, markersize=6, capsize=2.5, elinewidth=1.1, linestyle="none", **look)
            said.append(f"{mean:.0f}")
        _write(axes, (1, place), f"{', '.join(said)} %", 8)
    for index, size in enumerate(sizes):
        axes.plot([], [], _SIZE_MARKERS[index], color=_LINES[index]["color"], label=size)
    if sizes:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=len(sizes), frameon=False, fontsize=8)
    axes.set_xlim(-3, 103)
    axes.set_ylim(len(recipes) - 0.5, -0.5)
    axes.set_yticks(range(len(recipes)), [plain(recipe) for recipe in recipes])
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel("pass@1, %, ± 1 standard error, by size of the cache", fontsize=9)


def _draw_slots(axes: Any, outcome: Outcome) -> None:
    """Accuracy against the number of value slots."""
    counts = (0, *SLOTS)
    ends = []
    for base, rest, look in (
        ("attn-value-top", "the rest by best attention", _LINES[1]),
        ("vase-attnv", "the rest sampled", _LINES[0]),
    ):
        known = [(at, outcome.accuracy.get(Arm(slots(base, n), SLOTS_AT[0]))) for at, n in enumerate(counts)]
        ends.append(_draw_line(axes, [(at, value) for at, value in known if value], rest, look))
    _name_lines(axes, ends)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel(f"value slots N_v, at a budget of {SLOTS_AT[0]}", fontsize=9)
    axes.set_ylabel("pass@1, %", fontsize=9)
    tidy(axes, grid="y")


def _draw_budgets(axes: Any, recipes: Sequence[str], outcome: Outcome) -> None:
    """Accuracy against budget."""
    ends = []
    for recipe, look in zip((r for r in recipes if r != FULL), _LINES, strict=True):
        known = [(float(size), outcome.accuracy.get(Arm(recipe, size))) for size in BUDGETS]
        ends.append(_draw_line(axes, [(at, value) for at, value in known if value], recipe, look))
    full = outcome.accuracy.get(Arm(FULL, WHOLE))
    if full is not None:
        axes.axhline(100 * full.mean, color=GREY, lw=1, linestyle=(0, (1, 1.5)))
        ends.append((100 * full.mean, FULL, GREY))
    _name_lines(axes, ends)
    axes.set_xticks([float(size) for size in BUDGETS], BUDGETS)
    axes.set_xlabel("budget, as a share of the context", fontsize=9)
    axes.set_ylabel("pass@1, %", fontsize=9)
    tidy(axes, grid="y")


def _draw_line(
    axes: Any, known: Sequence[tuple[float, Any]], name: str, look: dict[str, Any]
) -> tuple[float, str, Any]:
    """A line with standard errors; returns where it ends, its name and its colour."""
    means = [100 * value.mean for _, value in known]
    errors = [100 * value.standard_error for _, value in known]
    axes.errorbar([at for at, _ in known], means, yerr=errors, capsize=2.5, lw=1.5, markersize=6, **look)
    return (means[-1] if means else 0.0), name, look["color"]


def _name_lines(axes: Any, ends: Sequence[tuple[float, str, Any]]) -> None:
    """Names at the right edge, moved apart."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -3), max(high, 103))
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[0])
    places = spread([(y - low) / (high - low) for y, _, _ in ends], gap=0.07, lowest=0.03, highest=0.97)
    for place, (y, name, color) in zip(places, ends, strict=True):
        line = {"arrowstyle": "-", "color": color, "lw": 0.8, "shrinkA": 1, "shrinkB": 2, "relpos": (0.0, 0.5)}
        axes.annotate(
            plain(name),
            (1.0, (y - low) / (high - low)),
            (1.05, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK,
            annotation_clip=False,
            arrowprops=line,
        )
