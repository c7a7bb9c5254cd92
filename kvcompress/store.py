"""SlotStore: the cached tokens of a group of layers in fixed slots, replaced in place (design section 5).

Softmax attention doesn't care in which order it meets keys whose position is baked in, so an event overwrites the
slots of the tokens that leave with the tokens that come in, and moves at most ``buffer`` rows per head. Which slot
holds what is decided on the host (:mod:`kvcompress.layout`); this file only moves rows of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcompress.kernels.replace_slots import replace_slots, replacement_plan
from kvcompress.layout import Layout, RowState
from kvcompress.pipeline import Pipeline, check_finite
from kvcompress.scoring import TokenStatistics

EMPTY = -1
# An event gathers the candidates of several layers at once, as many as stay below this many elements (256 MiB in fp32).
_EVENT_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Geometry:
    """What the layers of a store share, scaling of the logits included, since an event scores all layers at once.

    ``latent`` layers keep values as the first channels of keys.
    """

    rows: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    latent: bool = False
    scaling: float = 1.0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        channels = self.key_dim if self.latent else self.key_dim + self.value_dim
        return self.kv_heads * channels * self.dtype.itemsize


class SlotStore:
    """The slots of several layers with equal shapes on one device.

    Attributes:
        layers: indices of the layers, in the order of the leading axis.
        keys: (layers, rows, kv_heads, slots, key_dim). values: (layers, rows, kv_heads, slots, value_dim).
        positions: (layers, rows, kv_heads, slots) int32, -1 where the slot is empty.
        mass: (layers, rows, kv_heads, slots) float32 attention received so far, or None.
        queries: (layers, rows, heads, window, key_dim), the query of token t at t mod window, or None.
    """

    def __init__(self, layers: Sequence[int], geometry: Geometry, layout: Layout, pipeline: Pipeline) -> None:
        self.layers = list(layers)
        self.geometry = geometry
        self.layout = layout
        self.pipeline = pipeline
        g = geometry
        shape = (len(self.layers), g.rows, g.kv_heads, layout.slots)
        # Zeros, since attention over a ragged batch reads unused slots, and masking doesn't remove NaN: 0 * NaN = NaN.
        self.keys = torch.zeros((*shape, g.key_dim), dtype=g.dtype, device=g.device)
        self._values: Tensor | None = None
        if not g.latent:
            self._values = torch.zeros((*shape, g.value_dim), dtype=g.dtype, device=g.device)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=g.device)
        self.mass = torch.zeros(shape, dtype=torch.float32, device=g.device) if pipeline.needs_mass else None
        self.queries: Tensor | None = None
        if pipeline.window:
            window = (len(self.layers), g.rows, g.heads, pipeline.window, g.key_dim)
            self.queries = torch.empty(window, dtype=g.dtype, device=g.device)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors; the inverse is :meth:`from_state_dict`."""
        g = self.geometry
        shape = {"heads": g.heads, "value_dim": g.value_dim, "latent": g.latent, "scaling": g.scaling}
        return {"layers": list(self.layers), "shape": shape, "tensors": self.tensors()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], layout: Layout, pipeline: Pipeline) -> SlotStore:
        """A store that holds copies of what :meth:`state_dict` gave, on the device of those tensors."""
        keys = state["tensors"]["keys"]
        geometry = Geometry(
            rows=keys.shape[1],
            kv_heads=keys.shape[2],
            key_dim=keys.shape[4],
            dtype=keys.dtype,
            device=keys.device,
            **state["shape"],
        )
        store = cls(state["layers"], geometry, layout, pipeline)
        for name, tensor in state["tensors"].items():
            setattr(store, name, tensor.clone())
        return store

    @property
    def values(self) -> Tensor:
        """(layers, rows, kv_heads, slots, value_dim); a view of keys where values are channels of them."""
        return self.keys[..., : self.geometry.value_dim] if self._values is None else self._values

    def tensors(self) -> dict[str, Tensor]:
        """Everything the store holds, by attribute name."""
        named = {
            "keys": self.keys,
            "_values": self._values,
            "positions": self.positions,
            "mass": self.mass,
            "queries": self.queries,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _per_slot(self) -> dict[str, Tensor]:
        """What moves with a token: keys, values (unless they are channels of keys), positions, mass."""
        return {name.lstrip("_"): tensor for name, tensor in self.tensors().items() if name != "queries"}

    def keep_layers(self, count: int) -> None:
        """Drop all layers but the first ``count``."""
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor[:count].clone())
        del self.layers[count:]

    def map_rows(self, index: Tensor) -> None:
        """Replace the batch by ``rows[index]``; ``index`` is (new rows,) int64."""
        index = index.to(self.geometry.device)
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(1, index))
        self.geometry = replace(self.geometry, rows=len(index))

    def to(self, device: torch.device) -> None:
        """Move everything to another device."""
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))
        self.geometry = replace(self.geometry, device=device)

    def relayout(self, layout: Layout, before: Sequence[RowState], after: Sequence[RowState]) -> None:
        """Move to a layout with another number of old slots, each row from its ``before`` to its ``after`` slots."""
        fresh = SlotStore(self.layers, self.geometry, layout, self.pipeline)
        held = self._per_slot()
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            source = self.index(self.layout.slots_in_use(old))
            target = self.index(layout.slots_in_use(new))
            for name, tensor in fresh._per_slot().items():
                tensor[:, row, :, target] = held[name][:, row, :, source]
        for name, tensor in fresh.tensors().items():
            if name != "queries":
                setattr(self, name, tensor)
        self.layout = layout

    def clear(self, row: int, slots: Sequence[int]) -> None:
        """Mark slots of one row as empty in all layers."""
        if slots:
            self.positions[:, row, :, self.index(slots)] = EMPTY

    def write_column(self, layer: int, slot: int, time: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one new token into the same slot of every row, at the same position ``time``.

        Args:
            queries: (rows, heads, 1, key_dim). keys, values: (rows, kv_heads, 1, dim).
        """
        self.keys[layer, :, :, slot] = keys[:, :, 0]
        if self._values is not None:
            self._values[layer, :, :, slot] = values[:, :, 0]
        self.positions[layer, :, :, slot] = time
        if self.mass is not None:
            self.mass[layer, :, :, slot] = 0.0
        if self.queries is not None:
            self.queries[layer, :, :, time % self.queries.shape[3]] = queries[:, :, 0]

    def write_one_each(
        self, layer: int, rows: Tensor, slots: Tensor, times: Tensor, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Write one new token per row, each into its own slot at its own position; shapes as in :meth:`write_column`.

        Args:
            rows, slots, times: (rows,) int64.
        """
        self.keys[layer][rows, :, slots] = keys[:, :, 0]
        if self._values is not None:
            self._values[layer][rows, :, slots] = values[:, :, 0]
        self.positions[layer][rows, :, slots] = times[:, None].to(torch.int32)
        if self.mass is not None:
            self.mass[layer][rows, :, slots] = 0.0
        if self.queries is not None:
            self.queries[layer][rows, :, times % self.queries.shape[3]] = queries[:, :, 0]

    def write(
        self,
        layer: int,
        rows: Sequence[int],
        slots: Sequence[int],
        keys: Tensor,
        values: Tensor,
        first: Sequence[int],
        mass: Tensor | None,
    ) -> None:
        """Write the same number of new tokens into the same slots of several rows of one layer.

        Args:
            layer: index along the leading axis.
            slots: one slot per new token.
            keys, values: (len(rows), kv_heads, len(slots), dim).
            first: position of the first new token of each row.
            mass: (len(rows), kv_heads, len(slots)) attention that the tokens have received already; None where nobody
                accumulates it.
        """
        row = self.index(rows)[:, None]
        slot = self.index(slots)[None, :]
        self.keys[layer][row, :, slot] = keys.transpose(1, 2)
        if self._values is not None:
            self._values[layer][row, :, slot] = values.transpose(1, 2)
        positions = self.index(first)[:, None] + torch.arange(len(slots), device=self.geometry.device)
        self.positions[layer][row, :, slot] = positions[:, :, None].to(torch.int32)
        if self.mass is not None:
            assert mass is not None
            self.mass[layer][row, :, slot] = mass.transpose(1, 2)

    def write_queries(self, layer: int, rows: Sequence[int], queries: Tensor, first: Sequence[int]) -> None:
        """Remember the last queries of several rows of one layer.

        Args:
            queries: (len(rows), heads, count, key_dim), the last ``count`` ones matter if more than the window.
            first: position of the first query of each row.
        """
        if self.queries is None:
            return
        window = self.queries.shape[3]
        count = min(window, queries.shape[2])
        skipped = queries.shape[2] - count
        times = self.index(first)[:, None] + skipped + torch.arange(count, device=self.geometry.device)
        row = self.index(rows)[:, None]
        self.queries[layer][row, :, times % window] = queries[:, :, skipped:].transpose(1, 2)

    def _window(self, part: slice, row_index: Tensor, rows: Sequence[RowState]) -> Tensor:
        """(layers * rows, heads, W, key_dim), the last W queries of each row in order of time."""
        g = self.geometry
        if self.queries is None:
            count = len(self.layers[part]) * len(rows)
            return torch.empty(count, g.heads, 0, g.key_dim, dtype=g.dtype, device=g.device)
        window = self.queries.shape[3]
        count = min(window, min(row.seen for row in rows))
        times = self.index([row.seen for row in rows])[:, None] - count + torch.arange(count, device=g.device)
        # Advanced indices on both sides of a slice come first: (rows, W, layers, heads, dim).
        picked = self.queries[part].permute(1, 3, 0, 2, 4)[row_index[:, None], times % window]
        return picked.permute(2, 0, 3, 1, 4).flatten(0, 1)

    def index(self, values: Sequence[int]) -> Tensor:
        """Host integers as an int64 tensor on the store's device."""
        return torch.tensor(list(values), dtype=torch.int64).to(self.geometry.device, non_blocking=True)

    def _slices(self, rows: int, candidates: int) -> list[slice]:
        g = self.geometry
        step = max(1, _EVENT_ELEMENTS // max(1, rows * g.kv_heads * candidates * max(g.key_dim, g.value_dim)))
        return [slice(start, start + step) for start in range(0, len(self.layers), step)]

    def compress_in_place(self, rows: Sequence[int], states: Sequence[RowState], sequences: Sequence[int]) -> None:
        """Steady event of all layers for rows in the same phase: overwrite victims, free the older half.

        Args:
            rows: all rows of the batch, or a single one.
            states: their states before the event; same ``old``, ``ring`` and ``flipped``.
            sequences: what keys their random numbers.
        """
        flipped, buffer, old = states[0].flipped, self.layout.buffer, self.layout.old
        start, stop = (0, buffer + old) if flipped else (buffer, 2 * buffer + old)
        for part in self._slices(len(rows), stop - start):
            # Views of the pools, so that writing to them writes to the store.
            pools = {
                name: tensor[part].flatten(0, 1) if len(rows) > 1 else tensor[part, rows[0]]
                for name, tensor in self._per_slot().items()
            }
            spans = {name: pool[:, :, start:stop] for name, pool in pools.items()}
            tokens = self._statistics(spans, part, rows, states, sequences)
            keep = self.pipeline.select(tokens).keep
            # Candidates in slot order, turned so that the old slots come first and the newcomers after them.
            shift = buffer if flipped else 0
            victims, sources = replacement_plan((keep - shift) % (stop - start), buffer)
            sources = start + (sources + shift) % (stop - start)
            victims = victims + buffer
            for pool in pools.values():
                index = sources if pool.dim() == 3 else sources.unsqueeze(-1).expand(*sources.shape, pool.shape[-1])
                replace_slots(pool, victims, pool.gather(2, index))
        freed = slice(0, buffer) if flipped else slice(buffer + old, 2 * buffer + old)
        for row in rows:
            self.positions[:, row, :, freed] = EMPTY

    def compress_rewriting(
        self,
        part: slice,
        rows: Sequence[int],
        states: Sequence[RowState],
        sequences: Sequence[int],
        chunk: dict[str, Tensor] | None = None,
    ) -> None:
        """Event that rewrites the slots of rows of equal state: after a long prompt or a chunk that doesn't fit.

        Args:
            part: layers along the leading axis.
            states: the rows before ``chunk``, except that ``seen`` counts it.
            chunk: new tokens that are not in the slots yet: keys, values, positions, mass of shape
                (len(rows), kv_heads, count[, dim]), for a part of one layer.
        """
        index = self.index(rows)
        used = self.index(self.layout.slots_in_use(states[0]))
        gathered = {}
        for name, tensor in self._per_slot().items():
            present = tensor[part].index_select(1, index).index_select(3, used).flatten(0, 1)
            if chunk is not None:
                present = torch.cat([present, chunk[name].to(present.dtype)], dim=2) if len(used) else chunk[name]
            gathered[name] = present
        buffer = self.layout.buffer
        candidates = {name: tensor[:, :, :-buffer] for name, tensor in gathered.items()}
        tokens = self._statistics(candidates, part, rows, states, sequences)
        keep = self.pipeline.select(tokens, in_order=states[0].events == 0).keep
        survivors = keep.shape[-1]
        layers = len(self.layers[part])
        for name, pool in self._per_slot().items():
            wide = keep if gathered[name].dim() == 3 else keep.unsqueeze(-1).expand(*keep.shape, pool.shape[-1])
            kept = candidates[name].gather(2, wide).unflatten(0, (layers, len(rows)))
            recent = gathered[name][:, :, -buffer:].unflatten(0, (layers, len(rows)))
            if name == "positions":
                pool[part, index] = EMPTY
            pool[part, index, :, buffer : buffer + survivors] = kept.to(pool.dtype)
            pool[part, index, :, buffer + self.layout.old :] = recent.to(pool.dtype)

    def _statistics(
        self,
        slots: dict[str, Tensor],
        part: slice,
        rows: Sequence[int],
        states: Sequence[RowState],
        sequences: Sequence[int],
    ) -> TokenStatistics:
        config = self.pipeline.config
        assert isinstance(config.budget, int)
        layers = self.layers[part]
        positions = slots["positions"].to(torch.int64)
        values = slots["keys"][..., : self.geometry.value_dim] if self.geometry.latent else slots["values"]
        if config.check_finite:
            check_finite(slots["keys"], values, positions, [layer for layer in layers for _ in rows])

        def per_row(values: Sequence[int]) -> Tensor:
            return self.index(values).repeat(len(layers))

        return TokenStatistics(
            keys=slots["keys"],
            values=values,
            queries=self._window(part, self.index(rows), states),
            positions=positions,
            prompt_length=per_row([state.prompt for state in states]),
            sequence=per_row(sequences),
            layer=self.index(layers).repeat_interleave(len(rows)),
            event=per_row([state.events for state in states]),
            seed=config.seed,
            budget=config.budget,
            buffer=config.buffer,
            scaling=self.geometry.scaling,
            mass=slots.get("mass"),
        )
