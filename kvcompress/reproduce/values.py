"""Claim e: ranges and quantization errors of the values that the model makes of its own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcompress.bench.precision import made_up_layer, range_and_error, saved_by_full_precision, snapshots
from kvcompress.eval.summary import estimate
from kvcompress.quant.uniform import Uniform
from kvcompress.reproduce.claims import Measurement
from kvcompress.reproduce.verdicts import Finding, judge

BITS = (4, 2)
# Of the vectors of a head, that count as the widest.
WIDEST = 0.25
# First tokens of a text, which the paper leaves out as well: attention sinks of small values.
_SINKS = 4
# Tokens of the shortest text that says something about correlations, the 64 that are left out included.
_LEAST = 2 * 64
# (sequence, layer): (spearman, share) by bits.
Measured = list[list[dict[int, dict[str, float]]]]


def measure_values(model: Any, texts: Sequence[Sequence[int]]) -> Measured:
    """What the claim is about, for each text and layer.

    Args:
        texts: token ids of prompts with answers. The last 64 tokens of each are left out
            (:func:`kvcompress.bench.precision.snapshots`), and so are texts that leave next to nothing.

    Returns:
        For each text and layer, by bits: ``spearman`` of range and squared error over tokens and KV heads, ``pearson``
        of the same, ``share`` of the squared error in the widest quarter of each head's vectors minus that of a random
        quarter. Quantized per token, one group per head, minimum and maximum exact.
    """
    found: Measured = []
    for number, text in enumerate(texts):
        if len(text) < _LEAST:
            continue
        layers = []
        for layer in snapshots(model, torch.tensor([list(text)], device=model.device)):
            values = layer.values[:, :, _SINKS:]
            by_bits = {}
            for bits in BITS:
                codec = Uniform(bits=bits)
                left = saved_by_full_precision(values, codec, WIDEST, seed=number)
                by_bits[bits] = {**range_and_error(values, codec), "share": left["random"] - left["range"]}
            layers.append(by_bits)
        found.append(layers)
    return found


def by_chance(dim: int) -> str:
    """What both measures are for Gaussian vectors of equal scale, whose ranges differ by chance alone."""
    values = made_up_layer(tokens=4096, dim=dim, sigma=0.0).values
    said = []
    for bits in BITS:
        codec = Uniform(bits=bits)
        left = saved_by_full_precision(values, codec, WIDEST)
        rank = range_and_error(values, codec)["spearman"]
        said.append(f"{rank:.2f} and {100 * (left['random'] - left['range']):+.0f} points at {bits} bits")
    return (
        f"claim e: of Gaussian vectors of equal scale and {dim} channels, whose ranges differ by chance alone, "
        f"correlation and additional part of the error are {'; '.join(said)}"
    )


def findings_of(measurement: Measurement, measured: Measured) -> list[Finding]:
    """One per layer: the mean over texts, with a bootstrap over texts."""
    findings = []
    for layer in range(len(measured[0]) if measured else 0):
        values = [text[layer][measurement.bits][measurement.what] for text in measured]
        value = estimate(values)
        label = f"layer {layer}, {measurement.bits} bits"
        unit = "correlation" if measurement.what == "spearman" else "share of error"
        verdict = judge(value, measurement.bar)
        findings.append(Finding(label, unit, value, len(values), measurement.bar, verdict))
    return findings
