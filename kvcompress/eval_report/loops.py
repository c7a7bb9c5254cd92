"""Loop share and unfinished share, recipe by budget: how answers fail."""

from __future__ import annotations

from typing import Any

from kvcompress.eval_report.results import Panel
from kvcompress.eval_report.style import new_figure, plain, to_png

_SHARES = (("answers that end in a loop, %", "loops"), ("answers cut off unfinished, %", "unfinished"))


def draw_loops(panel: Panel, budgets: list[str]) -> bytes:
    """PNG: two maps of recipes by budgets with the numbers in them; darker is more, and what wasn't run is blank."""
    recipes = list(dict.fromkeys(point.recipe for point in panel.points))
    used = [budget for budget in budgets if any(point.budget == budget for point in panel.points)]
    names = 0.35 + 0.085 * max(len(recipe) for recipe in recipes)
    cell = max(0.62, 0.1 + 0.085 * max(len(budget) for budget in used))
    wide = max(2.5, cell * len(used))
    width, height = names + 2 * wide + 0.75, 1.25 + 0.27 * len(recipes)
    figure = new_figure(width, height)
    figure.text(0.12 / width, 1 - 0.2 / height, plain(panel.name), fontsize=12, fontweight="bold", va="center")
    for index, (title, field) in enumerate(_SHARES):
        axes = figure.add_axes(
            (
                (names + index * (wide + 0.4)) / width,
                0.5 / height,
                wide / width,
                0.27 * len(recipes) / height,
            )
        )
        _draw_map(axes, panel, recipes, used, field)
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_yticks(range(len(recipes)), [plain(recipe) for recipe in recipes] if index == 0 else [])
    return to_png(figure)


def _draw_map(axes: Any, panel: Panel, recipes: list[str], budgets: list[str], field: str) -> None:
    shares = {(point.recipe, point.budget): 100 * getattr(point, field) for point in panel.points}
    grid = [[shares.get((recipe, budget), float("nan")) for budget in budgets] for recipe in recipes]
    axes.imshow(grid, cmap="Greys", vmin=0, vmax=115, aspect="auto")
    for (recipe, budget), share in shares.items():
        axes.text(
            budgets.index(budget),
            recipes.index(recipe),
            f"{share:.1f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share > 55 else "#202124",
        )
    axes.set_xticks(range(len(budgets)), [plain(budget) for budget in budgets])
    axes.set_xlabel("budget", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_color("#9aa0a6")
