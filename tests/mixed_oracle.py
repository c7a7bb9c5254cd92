"""An independent reading of mixed precision, in the manner of oracle.py.

The oracle keeps, per layer and KV head, a plain dict from position to token: its vectors as they were, what attention
sees of them, and what it is: ``RING``, ``FULL`` or the number of its rung. What attention sees of a token on a rung is
what the codec makes of the original vectors, taken once. Which tokens leave the buffer, who keeps precision and who
falls to which rung is written out with sorted lists. Shares nothing with the store, the layout, the plan, the event or
the wrapper; the codecs, the scoring core and ``select_tokens`` have tests of their own.

A code is a rounded number, so the last bit of a vector decides between two codes that are a whole step apart. To make
that no matter of luck, the oracle is shown the keys and values that the library was given (``witness``). It checks
them against its own, to rounding, and encodes these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import torch
from oracle import Oracle
from tiny import feed
from torch import Tensor

import kvcompress
from kvcompress import CompressionConfig, select_tokens
from kvcompress.cache import CompressedCache
from kvcompress.pipeline import Pipeline
from kvcompress.quant.codec import Codec, Part
from kvcompress.scoring import TokenStatistics

RING, FULL = "ring", "full"
# Both sides see the same codes, so that float32 rounding is all that is left: logits of a few units come out of two
# layers within some 1e-5. A code that is one off, in one channel of one token, moves them by 1e-3 and more.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Token:
    """One token of one head, ``seen`` by attention; ``statistics`` are those of its original value vector."""

    key: Tensor
    value: Tensor
    seen: tuple[Tensor, Tensor]
    kind: str | int = RING
    mass: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)


class MixedOracle(Oracle):
    """Runs one unpadded sequence through a model under a recipe with a store stage, call by call."""

    def __init__(self, model: Any, config: CompressionConfig, sequence_id: int = 0, prompt_length: int | None = None):
        super().__init__(model, config, sequence_id, prompt_length)
        self.pipeline = Pipeline(config)
        self.store = config.stages[-1]
        self.dtype = torch.float32 if config.storage == "model" else getattr(torch, config.storage)
        self.tokens: dict[int, list[dict[int, Token]]] = {}
        self.witness: dict[int, tuple[Tensor, Tensor]] = {}

    # -- one call of one layer -----------------------------------------------------------------------------------

    def attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        kv_heads, total, new = key.shape[1], key.shape[2], query.shape[2]
        heads = self.tokens.setdefault(layer, [{} for _ in range(kv_heads)])
        keys, values = self.witness.pop(layer)
        for given, own in ((keys, key), (values, value)):
            torch.testing.assert_close(given, own[0, :, total - new :], rtol=1e-3, atol=1e-3)
        # A decoded token is read back from its slot; several at once meet each other before they are stored.
        decoded = new == 1 and total > 1
        group = query.shape[1] // kv_heads
        out = torch.zeros(1, query.shape[1], new, value.shape[3], dtype=query.dtype)
        for head, held in enumerate(heads):
            fresh = {}
            for index in range(new):
                stored = (keys[head, index].to(self.dtype), values[head, index].to(self.dtype))
                seen = stored if decoded else (keys[head, index], values[head, index])
                fresh[total - new + index] = Token(*stored, seen)
            all_tokens = {**held, **fresh}
            positions = sorted(all_tokens)
            k, v = (torch.stack([all_tokens[p].seen[part].float() for p in positions]).double() for part in (0, 1))
            future = torch.tensor(positions)[None, :] > torch.arange(total - new, total)[:, None]
            logits = query[0, head * group : (head + 1) * group].double() @ k.T * scaling
            weights = torch.softmax(logits.masked_fill(future, -torch.inf), dim=-1)
            out[0, head * group : (head + 1) * group] = (weights @ v).to(out.dtype)
            for position, share in zip(positions, weights.mean(dim=0).sum(dim=0).tolist(), strict=True):
                all_tokens[position].mass += share
            for token in fresh.values():
                token.seen = (token.key, token.value)
            held.update(fresh)
        past = self.queries.get(layer)
        self.queries[layer] = query if past is None else torch.cat([past, query], dim=2)
        leaving, evicts = self._leaving(heads[0])
        if leaving:
            self._event(layer, leaving, evicts, scaling)
        return out

    def _leaving(self, held: dict[int, Token]) -> tuple[list[int], bool]:
        """Tokens that now leave the buffer, and whether candidates are evicted."""
        ring = sorted(p for p, token in held.items() if token.kind == RING)
        buffer = self.config.buffer
        if self.config.evicts:
            budget = self.config.budget
            if len(held) >= budget + buffer:
                return ring[: len(ring) - buffer], True
            if len(ring) >= 2 * buffer:
                room = budget - buffer - (len(held) - len(ring))
                return ring[: min(len(ring) - buffer, room)], False
        elif len(ring) >= 2 * buffer:
            return ring[: (len(ring) - buffer) // buffer * buffer], False
        return [], False

    # -- an event ------------------------------------------------------------------------------------------------

    def _event(self, layer: int, leaving: list[int], evicts: bool, scaling: float) -> None:
        heads = self.tokens[layer]
        for held in heads:
            for position in leaving:
                held[position].statistics = {name: self._statistic(held[position].value, name) for name in self._names}
        candidates = [sorted(set(leaving) | {p for p, t in held.items() if t.kind != RING}) for held in heads]
        scores, keep = None, candidates
        statistics = self._token_statistics(layer, candidates, scaling)
        if evicts:
            scores, keep = self._select(layer, candidates, statistics)
            self.events[layer] = self.events.get(layer, 0) + 1
        elif self.store.ranks_by_score:
            scores = self.pipeline.score_all(statistics)[0]
        random = statistics.uniform("quantize")[0] if getattr(self.store, "by", "") == "random" else None
        for head, held in enumerate(heads):
            ranks = {}
            for index, position in enumerate(candidates[head]):
                drawn = None if random is None else float(random[head, index].float())
                score = None if scores is None else scores[head, index]
                ranks[position] = self._rank(position, held[position], drawn, score)
            for position in set(candidates[head]) - set(keep[head]):
                del held[position]
            self._place(held, keep[head], leaving, ranks)

    @property
    def _names(self) -> set[str]:
        return {name for stage in self.config.stages for name in stage.statistics}

    def _statistic(self, value: Tensor, name: str) -> float:
        """Rounded to 11 bits, then to the type of the slots, when the token leaves the buffer."""
        numbers = value.double()
        number = {"range": numbers.max() - numbers.min(), "absmax": numbers.abs().max()}[name]
        return float(number.half().to(self.dtype))

    def _token_statistics(self, layer: int, candidates: list[list[int]], scaling: float) -> TokenStatistics:
        def stacked(part: int) -> Tensor:
            rows = [[held[p].seen[part].float() for p in order] for held, order in pairs]
            return torch.stack([torch.stack(row) for row in rows])[None]

        pairs = list(zip(self.tokens[layer], candidates, strict=True))
        known = {name: torch.tensor([[[h[p].statistics[name] for p in o] for h, o in pairs]]) for name in self._names}
        one = torch.ones(1, dtype=torch.int64)
        return TokenStatistics(
            keys=stacked(0),
            values=stacked(1),
            queries=self.queries[layer][:, :, -self.config.buffer :].to(self.dtype).float(),
            positions=torch.tensor(candidates)[None],
            prompt_length=self.prompt * one,
            sequence=self.sequence_id * one,
            layer=layer * one,
            event=self.events.get(layer, 0) * one,
            seed=self.config.seed,
            budget=self.config.budget or len(candidates[0]) + self.config.buffer,
            buffer=self.config.buffer,
            scaling=scaling,
            known=known,
        )

    def _select(
        self, layer: int, candidates: list[list[int]], tokens: TokenStatistics
    ) -> tuple[Tensor | None, list[list[int]]]:
        """Scores (kv_heads, N), and the survivors of each head."""
        if self.config.name == "h2o":
            return None, [self._heavy_hitters(*pair) for pair in zip(self.tokens[layer], candidates, strict=True)]
        if any(stage.statistics for stage in self.config.stages[:-1]):
            # select_tokens would compute them anew, from what the codecs have made of the values.
            selection = self.pipeline.select(tokens)
        else:
            selection = select_tokens(
                self.config,
                tokens.keys,
                tokens.values,
                tokens.queries,
                positions=tokens.positions,
                prompt_length=self.prompt,
                sequence_ids=[self.sequence_id],
                layer=layer,
                event=self.events.get(layer, 0),
                scaling=tokens.scaling,
            )
        keep = [[order[i] for i in row] for order, row in zip(candidates, selection.keep[0].tolist(), strict=True)]
        return selection.scores[0], keep

    def _heavy_hitters(self, held: dict[int, Token], positions: list[int]) -> list[int]:
        room = self.config.budget - self.config.buffer
        local = self.config.budget // 2 - self.config.buffer
        must = {p for p in positions if p < 4} | set(positions[len(positions) - local :] if local else [])
        rest = sorted(set(positions) - must, key=lambda p: (held[p].mass, p), reverse=True)
        return sorted(must | set(rest[: room - len(must)]))

    # -- who gets which precision ----------------------------------------------------------------------------------

    def _rank(self, position: int, token: Token, drawn: float | None, score: Tensor | None) -> float:
        stage = self.store
        if stage.stage == "ladder":
            spread = token.statistics["range"]
            return spread if stage.by == "range" else float(torch.tensor(spread) * score)
        if position < stage.sinks:
            return float("inf")
        if stage.by == "random":
            return drawn
        return token.statistics[stage.by] if stage.share else 0.0

    def _divide(self, old: int) -> list[int]:
        """How many of so many old tokens keep their precision, and how many are on each rung."""
        stage = self.store
        if stage.stage == "ladder":
            counts = [0] * (len(stage.bits) + 1)
            for _ in range(old):
                behind = [share / (2 * n + 1) for share, n in zip(stage.resolved_shares, counts, strict=True)]
                counts[max(range(len(counts)), key=lambda i: (behind[i], -i))] += 1
            return counts
        high = stage.sinks + int(Fraction(str(stage.share)) * (self.config.budget or old))
        return [min(old, high), max(0, old - high)]

    def _place(self, held: dict[int, Token], keep: list[int], leaving: list[int], ranks: dict[int, float]) -> None:
        """Codes stay codes. Of the others the best keep their precision, the next take what each rung has free."""
        best_first = [p for p in keep if held[p].kind in (RING, FULL)]
        best_first.sort(key=lambda p: (ranks[p], p), reverse=True)
        high, *rungs = self._divide(len(keep))
        for position in best_first[:high]:
            held[position].kind = FULL
        start = high
        for rung, count in enumerate(rungs, start=1):
            free = count - sum(held[p].kind == rung for p in keep)
            self._encode(held, sorted(best_first[start : start + free]), rung)
            start += free
        assert start == len(best_first)

    def _encode(self, held: dict[int, Token], positions: list[int], rung: int) -> None:
        reconstructed = []
        for part, codec in enumerate(self.store.rungs[rung - 1] if positions else ()):
            originals = torch.stack([(held[p].key, held[p].value)[part] for p in positions])
            reconstructed.append(codec.reconstruct(codec.encode(originals, self.dtype), originals.shape[-1]))
        for position, key, value in zip(positions, *reconstructed, strict=True):
            assert held[position].kind in (RING, FULL)
            held[position].seen, held[position].kind = (key, value), rung

    def crop(self, count: int) -> None:
        """As if the last tokens had never been."""
        self.seen -= count
        self.cache.crop(-count)
        self.queries = {layer: queries[:, :, : self.seen] for layer, queries in self.queries.items()}
        for held in (held for heads in self.tokens.values() for held in heads):
            for position in [p for p in held if p >= self.seen]:
                assert held.pop(position).kind == RING


def kinds(cache: CompressedCache, layer: int, row: int) -> list[dict[int, str | int]]:
    """Per KV head, in what pool each position lies, read from the tensors."""
    store = next(store for store in cache.stores if layer in store.layers)
    local, layout = store.layers.index(layer), cache.layout
    found: list[dict[int, str | int]] = [{} for _ in range(store.geometry.kv_heads)]
    for rung in range(len(store.rungs) + 1):
        for head, positions in enumerate(store.per_slot(rung)["positions"][local, row].tolist()):
            for slot, position in enumerate(positions):
                middle = layout.buffer <= slot < layout.buffer + layout.high
                if position >= 0:
                    assert position not in found[head], "a token lies in two slots"
                    found[head][position] = rung or (FULL if middle else RING)
    return found


class Pair:
    """A compressed cache and one oracle per row, fed alike and compared after every call."""

    def __init__(self, model: Any, plain: Any, config: CompressionConfig, rows: int, reserve: int | None = None):
        self.model, self.cache = model, CompressedCache(model, config, reserve=reserve)
        self.oracles = [MixedOracle(plain, config) for _ in range(rows)]
        self.mask = torch.zeros(rows, 0, dtype=torch.long)

    def feed(self, chunk: list[list[int]]) -> Tensor:
        """Logits of left-padded rows, after comparison."""
        width = max(map(len, chunk))
        padding = [width - len(row) for row in chunk]
        ids = torch.tensor([[0] * pad + row for pad, row in zip(padding, chunk, strict=True)])
        real = torch.tensor([[0] * pad + [1] * len(row) for pad, row in zip(padding, chunk, strict=True)])
        self.mask = torch.cat([self.mask, real], dim=1)
        with witnesses() as captured:
            logits = feed(self.model, self.cache, ids, self.mask)
        for row, oracle in enumerate(self.oracles):
            if not chunk[row]:
                continue
            oracle.sequence_id = self.cache.identities.keys[row]
            oracle.witness = {n: (k[row, :, padding[row] :], v[row, :, padding[row] :]) for n, k, v in captured}
            torch.testing.assert_close(logits[row, padding[row] :], oracle(chunk[row]), **CLOSE)
            self.compare(row)
        return logits

    def compare(self, row: int) -> None:
        """The same tokens in the same pools."""
        for layer in self.cache.compressed:
            expected = [{p: token.kind for p, token in held.items()} for held in self.oracles[row].tokens[layer]]
            assert kinds(self.cache, layer, row) == expected, f"layer {layer}, row {row}"
            assert self.cache.kept_positions(layer, row).tolist() == [sorted(held) for held in expected]

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]
        for row, oracle in enumerate(self.oracles):
            oracle.crop(count)
            self.compare(row)

    def pick(self, rows: list[int]) -> None:
        """What becomes of the oracles when the batch does."""
        memo = {id(self.oracles[0].model): self.oracles[0].model}
        self.oracles = [copy.deepcopy(self.oracles[row], dict(memo)) for row in rows]
        self.mask = self.mask[rows]


@contextmanager
def witnesses() -> Iterator[list[tuple[int, Tensor, Tensor]]]:
    """Layer, keys and values of every call of attention over a compressed cache."""
    captured: list[tuple[int, Tensor, Tensor]] = []
    original = CompressedCache.attend

    def attend(self: CompressedCache, layer: int, call: Any) -> Tensor:
        captured.append((layer, call.keys.detach().clone(), call.values.detach().clone()))
        return original(self, layer, call)

    CompressedCache.attend = attend  # type: ignore[method-assign]
    try:
        yield captured
    finally:
        CompressedCache.attend = original  # type: ignore[method-assign]


class Lossless(Codec):
    """Codes that are the numbers themselves; rotated, they are off by the rounding of a rotation and back."""

    codec: Literal["lossless"] = "lossless"

    @property
    def label(self) -> str:
        return "fp32"

    def check(self, dim: int, name: str) -> None:
        pass

    def parts(self, dim: int, dtype: torch.dtype) -> dict[str, Part]:
        return {"codes": Part((dim,), torch.float32)}

    def _encode(self, vectors: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"codes": vectors}

    def decode(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        return parts["codes"]

    def _expected_error(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(vectors.shape[:-1])


def recipe(store: dict[str, Any], base: str | None = None, budget: int = 20, buffer: int = 4, **fields: Any):
    """A store stage alone, or after the stages of an evicting recipe."""
    if base is None:
        return kvcompress.load_config({"stages": [store], "buffer": buffer}, **fields)
    config = kvcompress.load_config(base, budget=budget, buffer=buffer)
    return config.with_fields({"stages": [*config.stages, store], **fields})


def quantize(codec: Any, **fields: Any) -> dict[str, Any]:
    return {"stage": "quantize", "keys": codec, "values": codec, **fields}
