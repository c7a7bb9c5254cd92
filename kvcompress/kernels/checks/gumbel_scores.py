"""Cases of :mod:`kvcompress.kernels.gumbel_scores`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcompress.kernels.checks.cases import SEED, Arguments, Case, vectors, within_poison
from kvcompress.kernels.gumbel_scores import gumbel_scores, token_words
from kvcompress.kernels.philox import stream_of

# (rows, kv_heads, N): one token, lengths around a block, an odd number of heads.
SHAPES = [(1, 1, 1), (2, 3, 511), (3, 1, 512), (1, 2, 513), (2, 2, 1100)]
HEAVY = (576, 8, 2112)
SEEDS = [0, 1, 16, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0x123456789ABCDEF0]
STREAMS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, stream_of("sample")]


def cases() -> Iterator[Case]:
    for seed in SEEDS:
        yield _words(SHAPES[1], seed, STREAMS[-1])
    for stream in STREAMS[:-1]:
        yield _words(SHAPES[1], SEEDS[-1], stream)
    for shape in (SHAPES[0], *SHAPES[2:]):
        yield _words(shape, SEEDS[-1], STREAMS[-1])
    yield _words(HEAVY, SEEDS[-1], STREAMS[-1], heavy=True)
    for shape in SHAPES:
        yield _scores(shape, "probabilities", 1.0)
    for temperature in (0.3, 1e-7, 1e4):
        yield _scores(SHAPES[1], "probabilities", temperature)
        yield _scores(SHAPES[1], "logits", temperature)
    for kind in ("zero", "tiny", "huge", "logits"):
        yield _scores(SHAPES[3], kind, 1.0)
    yield _scores(HEAVY, "probabilities", 0.3, heavy=True)


def _place(device: torch.device, shape: tuple[int, int, int], seed: int, stream: int) -> dict[str, object]:
    """Sequences, layers, events and positions from end to end of what they can be."""
    rows, kv_heads, tokens = shape
    generator = torch.Generator().manual_seed(SEED)

    def numbers(smallest: int, largest: int, *shape: int) -> torch.Tensor:
        drawn = torch.randint(smallest, largest, shape, generator=generator)
        drawn.view(-1)[-1] = largest
        return drawn.to(device)

    return {
        "positions": within_poison(numbers(0, 2**32 - 1, rows, kv_heads, tokens)),
        "seed": seed,
        "sequence": numbers(-(2**63), 2**63 - 1, rows),
        "layer": numbers(0, 65535, rows),
        "event": numbers(0, 2**32 - 1, rows),
        "stream": stream,
    }


def _words(shape: tuple[int, int, int], seed: int, stream: int, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        return _place(device, shape, seed, stream)

    name = f"{'x'.join(map(str, shape))}, seed {seed}, stream {stream}"
    return Case("token_words", name, token_words, make, exact=True, heavy=heavy)


def _scores(shape: tuple[int, int, int], kind: str, temperature: float, heavy: bool = False) -> Case:
    def make(device: torch.device) -> Arguments:
        normal = vectors(device, "normal", *shape, dtype=torch.float32)
        weights = {
            "probabilities": (4 * normal).softmax(dim=-1),
            "zero": normal.clamp_min(0),
            "tiny": normal.abs() * 1e-40,
            "huge": normal.abs() * 1e37,
            "logits": 30 * normal,
        }[kind]
        place = _place(device, shape, SEEDS[-1], STREAMS[-1])
        return {"scores": within_poison(weights), **place, "temperature": temperature, "log": kind != "logits"}

    name = f"{kind}, {'x'.join(map(str, shape))}, temperature {temperature}"
    return Case("gumbel_scores", name, gumbel_scores, make, heavy=heavy)
