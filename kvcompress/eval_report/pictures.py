"""Pictures of recordings: retained-token maps, and histograms of value ranges with what is protected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvcompress.eval_report.recording import Recording
from kvcompress.eval_report.style import INK, new_figure, plain, tidy, to_png

_EVICTED, _KEPT, _TO_COME = 0, 1, 2
_COLORS = ("#ffffff", "#0072B2", "#dadce0")
_BOUNDARY = "#D55E00"


def retained(recording: Recording, layer: int) -> Tensor:
    """(kv_heads, moments, tokens) uint8: 1 where a position is held, 0 where it is gone, 2 where it is yet to come."""
    heads = recording.kept[0][layer].shape[0]
    states = torch.full((heads, len(recording.seen), recording.tokens), _TO_COME, dtype=torch.uint8)
    for moment, (seen, kept) in enumerate(zip(recording.seen, recording.kept, strict=True)):
        states[:, moment, :seen] = _EVICTED
        states[:, moment].scatter_(1, kept[layer], _KEPT)
    return states


def draw_map(recording: Recording) -> bytes:
    """PNG: a panel per layer (column) and KV head (row); positions to the right, time downwards."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    layers = list(recording.kept[0])
    states = {layer: retained(recording, layer) for layer in layers}
    heads = max(len(of) for of in states.values())
    wide, tall = 9.6 / len(layers), min(2.2, max(1.3, 0.1 + 0.05 * len(recording.seen)))
    width, height = 0.9 + 9.6 + 0.2, 1.35 + heads * (tall + 0.45)
    figure = new_figure(width, height)
    title = f"{recording.recipe} {recording.budget}: positions held, by layer and KV head"
    figure.text(0.12 / width, 1 - 0.22 / height, plain(title), fontsize=12, fontweight="bold", va="center")
    ticks = sorted({round(k * (len(recording.seen) - 1) / 4) for k in range(5)})
    for column, layer in enumerate(layers):
        for head, image in enumerate(states[layer]):
            bottom = height - 0.75 - (head + 1) * tall - head * 0.45
            axes = figure.add_axes(
                ((0.8 + column * wide) / width, bottom / height, (wide - 0.25) / width, tall / height)
            )
            axes.imshow(
                image.numpy(), cmap=ListedColormap(_COLORS), vmin=0, vmax=2, aspect="auto", interpolation="nearest"
            )
            axes.axvline(recording.prompt_tokens - 0.5, color=_BOUNDARY, lw=1.4, linestyle="--")
            axes.set_title(f"layer {layer}, head {head}", loc="left", fontsize=8.5)
            axes.set_yticks(ticks, [f"{recording.seen[tick]:,}" for tick in ticks] if column == 0 else [])
            axes.tick_params(labelsize=8)
            if column == 0:
                axes.set_ylabel("tokens read", fontsize=8.5)
            if head == len(states[layer]) - 1:
                axes.set_xlabel("position", fontsize=8.5)
    looks: list[Any] = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.6, label=label)
        for color, label in zip(_COLORS, ("evicted", "held", "not yet read"), strict=True)
    ]
    from matplotlib.lines import Line2D

    looks.append(Line2D([], [], color=_BOUNDARY, lw=1.4, linestyle="--", label="end of the prompt"))
    figure.legend(handles=looks, loc="lower center", ncols=4, frameon=False, fontsize=8.5)
    return to_png(figure)


def draw_spreads(recording: Recording) -> bytes:
    """PNG: a histogram per layer of all heads' value spreads, and the thresholds of the stage ``value_range``."""
    layers = list(recording.spreads)
    columns = min(4, len(layers))
    rows = math.ceil(len(layers) / columns)
    wide, tall = 3.3, 2.4
    # Two panels' room for the title, be there ever so few layers.
    width, height = max(7.0, wide * columns + 0.3), tall * rows + 0.75
    figure = new_figure(width, height)
    title = f"value {recording.statistic} per token and KV head (logarithmic), {recording.recipe} {recording.budget}"
    figure.text(0.12 / width, 1 - 0.22 / height, plain(title), fontsize=12, fontweight="bold", va="center")
    for index, layer in enumerate(layers):
        row, column = divmod(index, columns)
        left, bottom = 0.6 + column * wide, height - 0.75 - row * tall - (tall - 0.85)
        axes = figure.add_axes((left / width, bottom / height, (wide - 0.6) / width, (tall - 0.85) / height))
        _draw_histogram(axes, recording.spreads[layer].flatten(), limits(recording, layer))
        axes.set_title(f"layer {layer}", loc="left", fontsize=9)
        if column == 0:
            axes.set_ylabel("vectors", fontsize=8.5)
    if recording.thresholds:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        figure.legend(
            handles=[
                Line2D([], [], color=INK, lw=1.6, label="threshold of protection, median over events and heads"),
                Patch(facecolor=_BOUNDARY, alpha=0.3, label="from the lowest to the highest"),
            ],
            loc="lower center",
            ncols=2,
            frameon=False,
            fontsize=8,
        )
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
    axes.stairs(counts.tolist(), edges.tolist(), fill=True, color="#56B4E9", edgecolor="#0072B2", linewidth=0.8)
    axes.set_xscale("log")
    tidy(axes, grid="y")
    if limit is not None:
        axes.axvspan(limit[0], limit[2], color=_BOUNDARY, alpha=0.3, lw=0)
        axes.axvline(limit[1], color=INK, lw=1.6)
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    ticks = [10 ** (math.log10(low) + k * (math.log10(high) - math.log10(low)) / 3) for k in range(4)]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=8)
