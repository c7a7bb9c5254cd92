"""Pictures of recordings: which positions stay and why, what is left of the text, and histograms of value ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompress.eval_report.recording import RECENT, SCORED, VALUE_RANGE, Recording
from kvcompress.eval_report.style import INK, new_figure, plain, tidy, to_png

EVICTED, TO_COME = -1, -2
_WHITE, _GREY = "#ffffff", "#dadce0"
# Of the reasons why a position is held (Okabe and Ito); any other stage that protects is green.
_COLORS = {RECENT: "#56B4E9", SCORED: "#0072B2", VALUE_RANGE: "#E69F00", "sinks": "#000000", "prompt": "#CC79A7"}
_OTHER = "#009E73"
_LABELS = {RECENT: "recent: not a candidate yet", SCORED: "kept by its score"}
_BOUNDARY, _BAND = "#B00060", "#d5d7da"
# Rows and columns of a map at most; of longer texts every second, third, ... position and moment is drawn.
_PIXELS = 1500
# Of texts: inches per character, characters per line, and lines at most.
_ACROSS, _DOWN, _LINE, _LINES = 0.088, 0.2, 110, 30


def states(recording: Recording, layer: int, every: int = 1) -> Tensor:
    """What a layer's heads hold after every token read, from the end of the prompt on.

    Between two events all tokens that come are held, so this follows from what the events leave.

    Args:
        every: of moments and positions, only each ``every``-th.

    Returns:
        (kv_heads, moments, positions) int64: index of the reason in ``recording.names``, or ``EVICTED``, or
        ``TO_COME``. Moment i is when ``prompt_tokens + i * every`` tokens have been read.
    """
    heads = len(recording.kept[0][layer])
    moments = range(recording.prompt_tokens, recording.tokens + 1, every)
    found = torch.full((heads, len(moments), recording.tokens), TO_COME)
    last = -1
    for row, read in enumerate(moments):
        while last + 1 < len(recording.seen) and recording.seen[last + 1] <= read:
            last += 1
        seen = recording.seen[last]
        found[:, row, :seen] = EVICTED
        found[:, row].scatter_(1, recording.kept[last][layer], recording.reasons[last][layer])
        found[:, row, seen:read] = 0
    return found[..., ::every]


def draw_map(recording: Recording) -> bytes:
    """PNG: a panel per layer (column) and KV head (row); positions to the right, tokens read downwards."""
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    every = math.ceil(recording.tokens / _PIXELS)
    layers = list(recording.kept[0])
    maps = {layer: states(recording, layer, every) for layer in layers}
    heads = max(len(of) for of in maps.values())
    colors = [_COLORS.get(name, _OTHER) for name in recording.names]
    # By state: reasons, then, counted from the end, what is to come and what is evicted.
    palette = torch.tensor([to_rgb(color) for color in (*colors, _GREY, _WHITE)])
    wide, tall = 11.4 / len(layers), 2.5
    width, height = 0.9 + 11.4 + 0.1, 1.4 + heads * (tall + 0.55)
    figure = new_figure(width, height)
    title = f"{recording.recipe} {recording.budget}: what each KV head holds while the text is read"
    figure.text(0.12 / width, 1 - 0.22 / height, plain(title), fontsize=13, fontweight="bold", va="center")
    for column, layer in enumerate(layers):
        for head, image in enumerate(maps[layer]):
            bottom = height - 0.78 - (head + 1) * tall - head * 0.55
            axes = figure.add_axes(
                ((0.8 + column * wide) / width, bottom / height, (wide - 0.25) / width, tall / height)
            )
            area = (0, recording.tokens, recording.tokens + 0.5, recording.prompt_tokens - 0.5)
            # Colours rather than numbers, so that pixels that fall together are mixed and none is lost.
            axes.imshow(palette[image].numpy(), aspect="auto", extent=area)
            axes.axvline(recording.prompt_tokens, color=_BOUNDARY, lw=1.4, linestyle="--")
            axes.set_title(f"layer {layer}, head {head}", loc="left", fontsize=10)
            axes.tick_params(labelsize=9, labelleft=column == 0)
            if column == 0:
                axes.set_ylabel("tokens read", fontsize=9)
            if head == len(maps[layer]) - 1:
                axes.set_xlabel("position", fontsize=9)
    used = set(torch.cat([image.flatten() for image in maps.values()]).tolist())
    looks: list[Any] = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.6, label=plain(_LABELS.get(name, f"protected by {name}")))
        for index, (name, color) in enumerate(zip(recording.names, colors, strict=True))
        if index in used
    ]
    looks += [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.6, label=label)
        for color, label in ((_WHITE, "evicted"), (_GREY, "not yet read"))
    ]
    looks.append(Line2D([], [], color=_BOUNDARY, lw=1.4, linestyle="--", label="end of the prompt"))
    figure.legend(handles=looks, loc="lower left", ncols=len(looks), frameon=False, fontsize=9, columnspacing=1.5)
    return to_png(figure)


def draw_texts(recordings: Sequence[Recording]) -> bytes:
    """PNG: the text under every recipe, each token as dark as the share of heads that hold it at the end."""
    from matplotlib import colormaps
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    lines = text_lines(recordings[0].texts)
    left_out = max(0, len(lines) - _LINES)
    if left_out:
        lines = [*lines[: _LINES // 2], [], *lines[-_LINES // 2 :]]
    block = 0.42 + _DOWN * len(lines)
    width, height = 0.3 + _ACROSS * _LINE, 1.0 + block * len(recordings)
    figure = new_figure(width, height)
    title = "What is left of the text when the answer ends"
    figure.text(0.12 / width, 1 - 0.22 / height, title, fontsize=13, fontweight="bold", va="center")
    shades = colormaps["Blues"]
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    top = 0.5
    boxes: list[Any] = []
    colors: list[Any] = []
    for recording in recordings:
        kept = 100 * float(recording.shares.mean())
        name = f"{recording.recipe} {recording.budget}: {kept:.0f} % of all tokens, mean over heads"
        axes.text(0.12, top + 0.16, plain(name), fontsize=10, va="center", color=INK)
        for number, line in enumerate(lines):
            y, column = top + 0.32 + number * _DOWN, 0
            if not line:
                axes.text(0.15, y + _DOWN / 2, f"... {left_out} lines ...", fontsize=8, va="center", color=INK)
            for index, shown in line:
                share = float(recording.shares[index])
                x, wide = 0.15 + column * _ACROSS, len(shown) * _ACROSS
                boxes.append(Rectangle((x, y), wide, _DOWN - 0.02))
                colors.append(shades(0.75 * share))
                if index == recording.prompt_tokens:
                    axes.plot([x, x], [y - 0.01, y + _DOWN], color=_BOUNDARY, lw=1.8)
                for place, letter in enumerate(shown):
                    axes.text(
                        x + (place + 0.5) * _ACROSS, y + _DOWN / 2, plain(letter), fontsize=8.5, family="monospace",
                        ha="center", va="center", color="white" if share > 0.7 else INK,
                    )  # fmt: skip
                column += len(shown)
        top += block
    axes.add_collection(PatchCollection(boxes, facecolors=colors, linewidths=0, zorder=1))
    _draw_scale(axes, shades, top + 0.1)
    return to_png(figure)


def text_lines(texts: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Tokens as (number, what is shown of it) in lines; white space is made visible, what has no glyph a box."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties(family="monospace"))).get_charmap()
    visible = {" ": "\u2423", "\n": "\u21b5", "\t": "\u2192"}
    lines: list[list[tuple[int, str]]] = [[]]
    column = 0
    for index, text in enumerate(texts):
        letters = [visible.get(letter, letter) for letter in text] or ["\u00b7"]
        shown = "".join(letter if ord(letter) in glyphs else "\u25a1" for letter in letters)[:_LINE]
        if column + len(shown) > _LINE:
            lines.append([])
            column = 0
        lines[-1].append((index, shown))
        column += len(shown)
    return lines


def _draw_scale(axes: Any, shades: Any, top: float) -> None:
    axes.text(0.15, top + 0.1, "held by", fontsize=9, va="center", color=INK)
    for step in range(5):
        x = 0.75 + 0.75 * step
        axes.fill_between([x, x + 0.7], top, top + 0.2, color=shades(0.75 * step / 4), lw=0)
        color = "white" if step > 2 else INK
        axes.text(x + 0.35, top + 0.1, f"{25 * step} %", fontsize=8.5, ha="center", va="center", color=color)
    axes.text(4.6, top + 0.1, "of all heads; line: the end of the prompt", fontsize=9, va="center", color=INK)


def draw_spreads(recording: Recording) -> bytes:
    """PNG: a histogram per layer of all heads' value spreads, and the thresholds of the stage ``value_range``."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    layers = list(recording.spreads)
    columns = min(4, len(layers))
    rows = math.ceil(len(layers) / columns)
    wide, tall = 2.9, 2.6
    # Three panels' room for title and legend, be there ever so few layers.
    width, height = max(9.0, wide * columns + 0.3), tall * rows + 0.85
    figure = new_figure(width, height)
    title = f"{recording.recipe} {recording.budget}: {recording.statistic} of every token's value vectors"
    figure.text(0.12 / width, 1 - 0.22 / height, plain(title), fontsize=13, fontweight="bold", va="center")
    for index, layer in enumerate(layers):
        row, column = divmod(index, columns)
        left, bottom = 0.65 + column * wide, height - 0.75 - row * tall - (tall - 0.85)
        axes = figure.add_axes((left / width, bottom / height, (wide - 0.55) / width, (tall - 0.85) / height))
        _draw_histogram(axes, recording.spreads[layer].flatten(), limits(recording, layer))
        axes.set_title(f"layer {layer}", loc="left", fontsize=10)
        axes.set_xlabel(f"{recording.statistic} (logarithmic)", fontsize=9)
        if column == 0:
            axes.set_ylabel("vectors", fontsize=9)
    if recording.thresholds:
        handles = [
            Line2D([], [], color=INK, lw=1.6, label="threshold of protection: median over events and heads"),
            Patch(facecolor=_BAND, label="lowest to highest"),
            Patch(facecolor=_COLORS[VALUE_RANGE], label="at or above the median"),
        ]
        figure.legend(handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=9)
    return to_png(figure)


def limits(recording: Recording, layer: int) -> tuple[float, float, float] | None:
    """(lowest, median, highest) spread from which a layer's candidates were protected, over events and heads."""
    found = recording.thresholds.get(layer)
    finite = None if found is None else found[found.isfinite()]
    if finite is None or not len(finite):
        return None
    return float(finite.min()), float(finite.median()), float(finite.max())


def _draw_histogram(axes: Any, spreads: Tensor, limit: tuple[float, float, float] | None) -> None:
    # A vector of equal numbers has no logarithm of its range; it is shown at the left end.
    positive = spreads[spreads > 0]
    low = float(positive.min()) if len(positive) else 1.0
    high = max(float(spreads.max()), low * 1.01)
    edges = torch.logspace(math.log10(low), math.log10(high), 41, dtype=torch.float64)
    counts = torch.histc(spreads.clamp_min(low).double().log10(), 40, math.log10(low), math.log10(high))
    if limit is not None:
        axes.axvspan(limit[0], limit[2], color=_BAND, lw=0, zorder=0)
    axes.stairs(counts.tolist(), edges.tolist(), fill=True, color=_COLORS[RECENT], zorder=1)
    if limit is not None:
        wide = spreads[spreads >= limit[1]].double().clamp_min(low).log10()
        above = torch.histc(wide, 40, math.log10(low), math.log10(high))
        axes.stairs(above.tolist(), edges.tolist(), fill=True, color=_COLORS[VALUE_RANGE], zorder=2)
        axes.axvline(limit[1], color=INK, lw=1.6, zorder=4)
    axes.stairs(counts.tolist(), edges.tolist(), color=_COLORS[SCORED], linewidth=0.9, zorder=3)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    tidy(axes, grid="y")
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    ticks = [10 ** (math.log10(low) + k * (math.log10(high) - math.log10(low)) / 3) for k in range(4)]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=9)
