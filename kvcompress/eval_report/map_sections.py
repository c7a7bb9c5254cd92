"""The sections of a report about single texts: which tokens stay, and which value vectors are protected."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompress.eval_report.html import Markup, Writer, element, slug, table
from kvcompress.eval_report.pictures import draw_map, draw_spreads, draw_texts, limits
from kvcompress.eval_report.recording import Recording

# Of a map, as rows of its table; thousands of them, of thousands of positions each, would be no table.
_MOMENTS = 12


def map_sections(writer: Writer, recordings: Sequence[Recording]) -> list[Markup]:
    """Both sections, or nothing without recordings."""
    return [*_maps(writer, recordings), *_spreads(writer, recordings)] if recordings else []


def _maps(writer: Writer, recordings: Sequence[Recording]) -> list[Markup]:
    content = [
        element("h2", "Which tokens stay"),
        element(
            "p",
            "Every recipe reads the same text: one problem and the answer that the model writes to it with its full "
            "cache.",
        ),
    ]
    if recordings[0].texts:
        content.append(
            writer.figure(
                "texts",
                draw_texts(recordings),
                "The text under every recipe, each token shaded by the share of heads that hold it at the end; the "
                "positions by layer and head are in the tables below.",
                "Problem and answer, each token as dark as the share of all layers' KV heads that hold it when the "
                "answer ends.",
            )
        )
    for number, recording in enumerate(recordings):
        name = f"{recording.recipe} {recording.budget}"
        content.append(
            writer.figure(
                f"map-{number}-{slug(recording.recipe)}",
                draw_map(recording),
                f"Positions that {name} holds over time, by layer and head; those held at the end are in the table.",
                f"{name}: positions held by layer and KV head, over {recording.tokens:,} tokens of which "
                f"{recording.prompt_tokens:,} are the prompt. Positions run to the right, time downwards from the end "
                "of the prompt; the slanted edge is the token just read. A column that goes on to the bottom is a "
                "token that stayed; where it turns white it was evicted. Colours say why it is held: it is recent, a "
                "stage of the recipe protected it at the last event, or its score was among the best.",
            )
        )
        prompt, last = recording.prompt_tokens, len(recording.seen) - 1
        shown = sorted({round(last * k / (_MOMENTS - 1)) for k in range(_MOMENTS)})
        rows = []
        for layer in recording.kept[0]:
            for head in range(len(recording.kept[0][layer])):
                for moment in shown:
                    seen, held = recording.seen[moment], recording.kept[moment][layer][head].tolist()
                    of_prompt = sum(position < prompt for position in held)
                    rows.append([f"{layer}", f"{head}", f"{seen:,}", f"{of_prompt:,}", f"{len(held) - of_prompt:,}",
                                 ranges(held)])  # fmt: skip
        headings = ["layer", "head", "tokens read", "held of the prompt", "held of the answer", "positions"]
        moments = "" if len(shown) == last + 1 else f" ({len(shown)} of {last + 1:,} moments)"
        content.append(table(f"Positions held: {name}{moments}", headings, rows, names=2))
    return content


def ranges(positions: Sequence[int]) -> str:
    """Ascending numbers in short: ``0-3, 7, 9-10``."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _spreads(writer: Writer, recordings: Sequence[Recording]) -> list[Markup]:
    recording = next((r for r in recordings if r.thresholds), recordings[0])
    name = f"{recording.recipe} {recording.budget}"
    protects = "" if recording.thresholds else " It has no stage value_range, so there is no threshold to show."
    rows = []
    for layer, spreads in recording.spreads.items():
        values = spreads.flatten().double()
        found = [float(values.quantile(q)) for q in (0, 0.25, 0.5, 0.75, 1)]
        limit = limits(recording, layer)
        share = "" if limit is None else f"{100 * float((values >= limit[1]).double().mean()):.1f}"
        thresholds = ["", "", ""] if limit is None else [f"{value:.4g}" for value in limit]
        rows.append([f"{layer}", f"{len(values):,}", *(f"{value:.4g}" for value in found), *thresholds, share])
    headings = ["layer", "vectors", "least", "25 %", "median", "75 %", "largest", "lowest threshold"]
    headings += ["median threshold", "highest threshold", "at or above the median threshold, %"]
    return [
        element("h2", "Value ranges and what is protected"),
        writer.figure(
            "value-range",
            draw_spreads(recording),
            f"Histograms of the value {recording.statistic} per layer, with thresholds; numbers in the table below.",
            f"{name}: {recording.statistic} of the value vector of every token and KV head (logarithmic), as the model "
            "made them in this run. The threshold of protection is the least among the candidates that the stage "
            "value_range protected at an event in a head, tokens protected before it (sinks) aside: the median over "
            f"events and heads, and the whole span.{protects}",
        ),
        table(f"Value {recording.statistic} per layer: {name}", headings, rows),
    ]
