"""Loop share and unfinished share, recipe by budget: how answers fail."""

from __future__ import annotations

from typing import Any

from kvcompress.eval_report.results import Panel
from kvcompress.eval_report.style import new_figure, plain, to_png

_SHARES = (("answers that end in a loop, %", "loops"), ("answers cut off unfinished, %", "unfinished"))
# Inches: height of a row, least width of a cell, which has to hold "12.3 ± 4.5", and most of two maps side by side.
_ROW, _CELL, _WIDE = 0.28, 0.86, 8.0


def draw_loops(panel: Panel, budgets: list[str]) -> bytes:
    """PNG: two maps of recipes by budgets with the numbers in them; darker is more, and what wasn't run is hatched."""
    recipes = list(dict.fromkeys(point.recipe for point in panel.points))
    used = [budget for budget in budgets if any(point.budget == budget for point in panel.points)]
    names = 0.35 + 0.085 * max(len(recipe) for recipe in recipes)
    cell = max(_CELL, 0.1 + 0.085 * max(len(budget) for budget in used))
    wide, tall = max(2.8, cell * len(used)), _ROW * len(recipes)
    # Side by side where that leaves letters large enough on a page, else one above the other.
    beside = 2 * wide <= _WIDE
    width = names + (2 * wide + 0.4 if beside else wide) + 0.35
    height = 0.45 + (tall + 0.9) * (1 if beside else 2)
    figure = new_figure(width, height)
    title = f"{panel.name}: answers that went wrong (± 1 standard error)"
    figure.text(0.12 / width, 1 - 0.22 / height, plain(title), fontsize=12, fontweight="bold", va="center")
    for index, (heading, field) in enumerate(_SHARES):
        column, row = (index, 0) if beside else (0, index)
        left, bottom = names + column * (wide + 0.4), height - 0.8 - tall - row * (tall + 0.9)
        axes = figure.add_axes((left / width, bottom / height, wide / width, tall / height))
        _draw_map(axes, panel, recipes, used, field)
        axes.set_title(heading, loc="left", fontsize=10)
        axes.set_yticks(range(len(recipes)), [plain(recipe) for recipe in recipes] if column == 0 else [])
    return to_png(figure)


def _draw_map(axes: Any, panel: Panel, recipes: list[str], budgets: list[str], field: str) -> None:
    shares = {(point.recipe, point.budget): getattr(point, field) for point in panel.points}
    grid = [
        [100 * shares[recipe, budget].mean if (recipe, budget) in shares else float("nan") for budget in budgets]
        for recipe in recipes
    ]
    axes.patch.set(hatch="////", facecolor="white", edgecolor="#dadce0")
    # Not up to black: the darkest cell must differ from the ink of what stands in it.
    axes.imshow(grid, cmap="Greys", vmin=0, vmax=115, aspect="auto")
    for (recipe, budget), share in shares.items():
        axes.text(
            budgets.index(budget),
            recipes.index(recipe),
            f"{100 * share.mean:.1f} ± {100 * share.standard_error:.1f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share.mean > 0.55 else "#202124",
        )
    axes.set_xticks(range(len(budgets)), [plain(budget) for budget in budgets])
    axes.set_xlabel("budget (- is a recipe without one)" if "-" in budgets else "budget", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_color("#9aa0a6")
