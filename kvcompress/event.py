"""An event: tokens leave the buffer, candidates are evicted, and what stays gets its precision and its slot.

Candidates are the old tokens of all pools and the tokens that leave the buffer. The pipeline chooses who stays. Codes
that stay are not touched. Of the candidates in full precision the store stage's ranking keeps as many as there are
slots for; the others are encoded, once and for good, into the free slots of the coded pools, the highest rung first.
Without a store stage all of them keep their precision. An event moves no token that keeps its pool: it overwrites the
slots of those that leave, at most ``buffer`` rows per head in the steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompress.kernels.precision import coarse
from kvcompress.kernels.replace_slots import plan_replacement, replace_slots, take
from kvcompress.kernels.value_statistics import value_statistic
from kvcompress.layout import Event, RowState
from kvcompress.pipeline import check_finite
from kvcompress.scoring import TokenStatistics, largest
from kvcompress.store import EMPTY, SlotStore

# An event works on several layers at once, as many as have fewer candidates than so many elements: 256 MiB in float32,
# or 4 GiB on accelerators, which would rather make few launches.
_ELEMENTS, _ELEMENTS_ON_ACCELERATORS = 1 << 26, 1 << 30


def run_event(
    store: SlotStore,
    rows: Sequence[int],
    states: Sequence[RowState],
    sequences: Sequence[int],
    event: Event,
    layer: int | None = None,
    chunk: dict[str, Tensor] | None = None,
) -> None:
    """Carry out an event for rows of equal state.

    Args:
        rows: indices in the batch.
        states: their states before it, except that ``seen`` counts the chunk.
        sequences: what keys their random numbers.
        layer: place of the only layer concerned in the store; None for all of them.
        chunk: new tokens that are not in the slots yet: keys, values, positions, mass of shape
            (len(rows), kv_heads, count[, dim]), for an event of one layer.
    """
    g = store.geometry
    keyed = list(zip(rows, states, sequences, range(len(rows)), strict=True))
    # A store works on views of all rows or of one, so that writing to them writes to the store.
    batches = [keyed] if len(rows) == g.rows else [[row] for row in keyed]
    for batch in batches:
        some, before, keys, index = (list(column) for column in zip(*batch, strict=True))
        step = _layers_at_once(store, event, len(some))
        parts = [slice(layer, layer + 1)] if layer is not None else _slices(len(store.layers), step)
        new = chunk
        if chunk is not None and len(batches) > 1:
            new = {name: tensor[index] for name, tensor in chunk.items()}
        for part in parts:
            _Event(store, part, some, before, keys, event).run(new)


def _layers_at_once(store: SlotStore, event: Event, rows: int) -> int:
    """Layers that one pass handles, so that what it copies and decodes stays within bounds."""
    g, layout = store.geometry, store.layout
    accelerated = g.device.type != "cpu"
    by_score = store.pipeline.store is not None and store.pipeline.store.ranks_by_score
    if accelerated and event.rotates and not (layout.coded and (event.evicts or by_score)):
        # Nothing is gathered or decoded, and kernels need no copies.
        return len(store.layers)
    candidates = rows * g.kv_heads * (layout.slots + sum(layout.coded)) * max(g.key_dim, g.value_dim)
    return max(1, (_ELEMENTS_ON_ACCELERATORS if accelerated else _ELEMENTS) // max(1, candidates))


def _slices(count: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, count, step)]


@dataclass
class _Event:
    """One event of some layers, for all rows or a single one; its tensors are (layers * rows, kv_heads, ...)."""

    store: SlotStore
    part: slice
    rows: list[int]
    states: list[RowState]
    sequences: list[int]
    event: Event

    @cached_property
    def in_place(self) -> bool:
        """Whether the candidates lie side by side: all old slots are in use, and the half next to them leaves."""
        return self.event.rotates and self.store.layout.divide(self.states[0].old)[0] == self.store.layout.high

    @cached_property
    def leaving_first(self) -> bool:
        """Whether the tokens that leave the ring come before the old ones among the candidates."""
        return self.in_place and self.states[0].flipped

    def _apart(self, tensor: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
        """What belongs to the candidates in old slots, and what to those that leave the ring."""
        count = tensor.shape[dim]
        leaving = max(0, self.event.leaving)
        if self.leaving_first:
            return tensor.narrow(dim, leaving, count - leaving), tensor.narrow(dim, 0, leaving)
        return tensor.narrow(dim, 0, count - leaving), tensor.narrow(dim, count - leaving, leaving)

    @property
    def evicted(self) -> int:
        """Candidates of each head that go."""
        return max(0, self.states[0].old + self.event.leaving - self.event.room) if self.event.evicts else 0

    def run(self, chunk: dict[str, Tensor] | None) -> None:
        store, layout, event, state = self.store, self.store.layout, self.event, self.states[0]
        high, *coded = layout.divide(state.old)
        fresh, recent = self._gather(high, chunk)
        if store.pipeline.config.check_finite:
            self._check_finite(fresh)
        stays_fresh, stays_coded, ranks = self._judge(fresh, high, coded)
        old = high + sum(coded) + event.leaving
        to_high, *to_coded = layout.divide(min(old, event.room) if event.evicts else old)
        if not store.rungs:
            self._place_high(fresh, stays_fresh, high, to_high)
        else:
            place = _places(ranks, fresh["positions"], stays_fresh)
            start = torch.full_like(place[..., :1], to_high)
            for rung, (held, stays, slots) in enumerate(zip(coded, stays_coded, to_coded, strict=True), start=1):
                free = slots - stays.sum(dim=-1, keepdim=True)
                comes = (place >= start) & (place < start + free)
                self._place_coded(rung, fresh, comes, stays, held, slots)
                start = start + free
            self._place_high(fresh, stays_fresh & (place < to_high), high, to_high)
        self._settle_ring(recent, to_high)

    # -- reading -------------------------------------------------------------------------------------------------

    def _view(self, tensor: Tensor) -> Tensor:
        """(layers, rows, ...) -> (layers * rows, ...), a view that writes through."""
        return tensor[self.part].flatten(0, 1) if len(self.rows) > 1 else tensor[self.part, self.rows[0]]

    def _pool(self, rung: int = 0) -> dict[str, Tensor]:
        return {name: self._view(tensor) for name, tensor in self.store.per_slot(rung).items()}

    def _gather(self, high: int, chunk: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """The candidates in full precision, and the tokens that stay in the buffer unless they are in place."""
        if self.in_place:
            start = 0 if self.leaving_first else self.store.layout.buffer
            span = slice(start, start + high + self.event.leaving)
            fresh, recent = {name: pool[:, :, span] for name, pool in self._pool().items()}, None
        else:
            fresh, recent = self._copies(high, chunk)
        for name in self.store.pipeline.statistics:
            # Of tokens that leave the buffer, once; for the others it is known.
            known, _ = self._apart(fresh[f"statistic.{name}"])
            leaving = coarse(value_statistic(self._apart(self._values(fresh))[1], name))
            rounded = leaving.clamp_max(torch.finfo(known.dtype).max).to(known.dtype)
            both = [rounded, known] if self.leaving_first else [known, rounded]
            fresh[f"statistic.{name}"] = torch.cat(both, dim=2)
        return fresh, recent

    def _copies(self, high: int, chunk: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """:meth:`_gather`, where candidates lie in several places."""
        layout, event, state = self.store.layout, self.event, self.states[0]
        ring = layout.ring_slots(state)[: layout.buffer if event.rotates else None]
        slots = self.store.index([*range(layout.buffer, layout.buffer + high), *ring])
        count = high + event.leaving
        fresh: dict[str, Tensor] = {}
        recent: dict[str, Tensor] = {}
        for name, pool in self._pool().items():
            tokens = pool.index_select(2, slots)
            if chunk is not None:
                statistic = name.startswith("statistic")
                new = pool.new_zeros(1).expand(chunk["positions"].shape) if statistic else chunk[name].to(pool.dtype)
                tokens = torch.cat([tokens, new], dim=2)
            fresh[name], recent[name] = tokens[:, :, :count], tokens[:, :, count:]
        return fresh, None if event.rotates else recent

    def _values(self, tokens: dict[str, Tensor]) -> Tensor:
        return tokens["keys"][..., : self.store.geometry.value_dim] if self.store.geometry.latent else tokens["values"]

    def _check_finite(self, fresh: dict[str, Tensor]) -> None:
        """Of the tokens that leave the buffer; the others have been through this."""
        layers = [layer for layer in self.store.layers[self.part] for _ in self.rows]
        keys, values, positions = (self._apart(t)[1] for t in (fresh["keys"], self._values(fresh), fresh["positions"]))
        check_finite(keys, values, positions, layers)

    # -- judging -------------------------------------------------------------------------------------------------

    def _judge(
        self, fresh: dict[str, Tensor], high: int, coded: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Who stays, of the candidates in full precision and of each coded pool, and the ranks of the former.

        Returns:
            (rows, kv_heads, N) bool, the same per coded pool, and (rows, kv_heads, N) float32 or None without a store
            stage.
        """
        pipeline = self.store.pipeline
        by_score = pipeline.store is not None and pipeline.store.ranks_by_score
        count = fresh["positions"].shape[2]
        if not self.event.evicts and not by_score:
            stays = torch.ones_like(fresh["positions"], dtype=torch.bool)
            tokens = self._statistics(fresh, [])
            return stays, [self._all(held, stays) for held in coded], pipeline.precision(tokens, None)
        tokens = self._statistics(fresh, coded)
        if self.event.evicts:
            in_order = self.states[0].events == 0 and pipeline.store is None
            selection = pipeline.select(tokens, in_order=in_order)
            keep, scores = selection.keep, selection.scores
            stays = torch.zeros(tokens.shape, dtype=torch.bool, device=keep.device).scatter(-1, keep, True)
        else:
            stays = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.positions.device)
            scores = pipeline.score_all(tokens)
        ranks = None
        if pipeline.store is not None:
            ranks = pipeline.precision(tokens, scores if by_score else None)[..., :count]
        of_fresh, *of_coded = stays.split([count, *coded], dim=-1)
        return of_fresh, of_coded, ranks

    @staticmethod
    def _all(count: int, like: Tensor) -> Tensor:
        return torch.ones(*like.shape[:2], count, dtype=torch.bool, device=like.device)

    def _statistics(self, fresh: dict[str, Tensor], coded: Sequence[int]) -> TokenStatistics:
        """The candidates in full precision, then those of each coded pool, decoded."""
        store, config, states = self.store, self.store.pipeline.config, self.states
        tokens = dict(fresh)
        tokens["values"] = self._values(fresh)
        for rung, held in enumerate(coded, start=1):
            if not held:
                continue
            pool = {name: tensor[:, :, :held] for name, tensor in self._pool(rung).items()}
            tokens["keys"] = torch.cat([tokens["keys"].float(), self._vectors(rung, "keys", held)], dim=2)
            tokens["values"] = torch.cat([tokens["values"].float(), self._vectors(rung, "values", held)], dim=2)
            for name in tokens.keys() - {"keys", "values"}:
                tokens[name] = torch.cat([tokens[name], pool[name]], dim=2)
        layers = store.layers[self.part]

        def per_row(values: Sequence[int]) -> Tensor:
            return store.index(values).repeat(len(layers))

        count = tokens["positions"].shape[2]
        assert not isinstance(config.budget, float)
        return TokenStatistics(
            keys=tokens["keys"],
            values=tokens["values"],
            queries=store.window(self.part, self.rows, states),
            positions=tokens["positions"].to(torch.int64),
            prompt_length=per_row([state.prompt for state in states]),
            sequence=per_row(self.sequences),
            layer=store.index(layers).repeat_interleave(len(self.rows)),
            event=per_row([state.events for state in states]),
            seed=config.seed,
            # Room for all where nothing is evicted.
            budget=count + config.buffer if config.budget is None else config.budget,
            buffer=config.buffer,
            scaling=store.geometry.scaling,
            mass=tokens.get("mass"),
            known={name: tokens[f"statistic.{name}"].float() for name in store.pipeline.statistics},
        )

    def _vectors(self, rung: int, name: Literal["keys", "values"], held: int) -> Tensor:
        """(layers * rows, kv_heads, held, dim) float32 of a coded pool."""
        coded = self.store.coded(rung, name, self.part, held)
        parts = {
            part: tensor.flatten(0, 1) if len(self.rows) > 1 else tensor[:, self.rows[0]]
            for part, tensor in coded.parts.items()
        }
        return replace(coded, parts=parts).vectors()

    # -- placing -------------------------------------------------------------------------------------------------

    def _place_high(self, fresh: dict[str, Tensor], stays: Tensor, held: int, slots: int) -> None:
        """Bring the candidates marked by ``stays`` into the first ``slots`` of the high-precision slots.

        Args:
            stays: (rows, kv_heads, N), ``slots`` of them per head. ``held`` candidates lie in order there already: the
                first ones, or the last ones where those that leave the ring come first.
        """
        in_place = min(held, slots, stays.shape[-1])
        if self.leaving_first:
            comes, stays = self._apart(stays)[1], self._apart(stays)[0]
        else:
            comes = stays[..., in_place:]
        remain = F.pad(stays[..., :in_place], (0, slots - in_place))
        replacement = plan_replacement(remain, comes, min(slots, comes.shape[-1]))
        first = self.store.layout.buffer
        for name, pool in self._pool().items():
            arrivals = self._apart(fresh[name])[1] if self.leaving_first else fresh[name][:, :, in_place:]
            replace_slots(pool[:, :, first : first + slots], replacement, arrivals, taken=False)

    def _place_coded(
        self, rung: int, fresh: dict[str, Tensor], comes: Tensor, stays: Tensor, held: int, slots: int
    ) -> None:
        """Encode the candidates marked by ``comes`` into the free ones of the first ``slots`` slots of a coded pool.

        Args:
            comes: (rows, kv_heads, N). stays: (rows, kv_heads, held), tokens of the pool that are not evicted.
        """
        # No more free slots in any head than those not used yet and those of evicted tokens.
        width = min(slots, slots - held + self.evicted, comes.shape[-1])
        if not width:
            return
        replacement = plan_replacement(F.pad(stays, (0, slots - held)), comes, width)
        dtype = self.store.geometry.dtype
        arrivals = {name: take(tokens, replacement.arrivals) for name, tokens in fresh.items()}
        for name in self.store.geometry.dims:
            encoded = getattr(self.store.rungs[rung - 1], name).encode(arrivals.pop(name), dtype)
            arrivals |= {f"{name}.{part}": tensor for part, tensor in encoded.items()}
        for name, pool in self._pool(rung).items():
            tokens = pool.shape[2] and self.store.layout.coded[rung - 1] // pool.shape[2]
            if tokens > 1:
                # Metadata of consecutive tokens. All arrivals are new ones then, in order, and nothing is overwritten.
                pool[:, :, held // tokens : slots // tokens] = arrivals[name]
            else:
                replace_slots(pool[:, :, :slots], replacement, arrivals[name])

    def _settle_ring(self, recent: dict[str, Tensor] | None, high: int) -> None:
        """Free the slots of the tokens that left the ring, and write those that stay unless they are in place."""
        layout, state = self.store.layout, self.states[0]
        positions = self._pool()["positions"]
        if recent is None:
            half = slice(0, layout.buffer) if state.flipped else slice(layout.buffer + layout.high, None)
            positions[:, :, half] = EMPTY
            return
        positions[:, :, : layout.buffer] = EMPTY
        positions[:, :, layout.buffer + high :] = EMPTY
        count = recent["positions"].shape[2]
        slots = self.store.index([layout.ring_slot(index, flipped=False) for index in range(count)])
        for name, pool in self._pool().items():
            pool.index_copy_(2, slots, recent[name])


def _places(ranks: Tensor | None, positions: Tensor, stays: Tensor) -> Tensor:
    """(rows, kv_heads, N) int64: 0 for the candidate of highest rank, 1 for the next; those that leave come last."""
    assert ranks is not None
    # In order of position first, so that equal ranks favour the more recent token whatever slot it comes from.
    by_time = torch.argsort(positions, dim=-1)
    lowest = torch.finfo(ranks.dtype).min
    ordered = ranks.clamp_min(lowest).masked_fill(~stays, -torch.inf).gather(-1, by_time)
    best_first = by_time.gather(-1, largest(ordered, ordered.shape[-1]))
    return torch.argsort(best_first, dim=-1)
