"""SlotStore: the cached tokens of a group of layers in fixed slots, replaced in place (design section 5).

Softmax attention doesn't care in which order it meets keys whose position is baked in, so an event overwrites the
slots of the tokens that leave with the tokens that come in. Which slot holds what is decided on the host
(:mod:`kvcompress.layout`), what stays at which precision by an event (:mod:`kvcompress.event`); this file holds the
tensors and moves rows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvcompress.layout import Layout, RowState
from kvcompress.pipeline import Pipeline
from kvcompress.quant.coded import Coded
from kvcompress.stages import Rung

EMPTY = -1


@dataclass(frozen=True)
class Geometry:
    """What the layers of a store share, scaling of the logits included, since an event scores all layers at once.

    ``dtype`` is that of the slots. ``latent`` layers keep values as the first channels of keys.
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
        """Bytes of one token's keys and values in one layer, in the type of the slots."""
        channels = self.key_dim if self.latent else self.key_dim + self.value_dim
        return self.kv_heads * channels * self.dtype.itemsize

    @property
    def dims(self) -> dict[str, int]:
        """Size of the vectors that are stored, by the names of a rung's codecs."""
        return {"keys": self.key_dim} if self.latent else {"keys": self.key_dim, "values": self.value_dim}


class SlotStore:
    """The slots of several layers with equal shapes on one device.

    Attributes:
        layers: indices of the layers, in the order of the leading axis.
        tensors: everything held, by name; the first two axes are (layers, rows).
            ``keys``, ``values``: (layers, rows, kv_heads, slots, dim); no ``values`` where they are channels of keys.
            ``positions``: (layers, rows, kv_heads, slots) int32, -1 where the slot is empty.
            ``mass``: (layers, rows, kv_heads, slots) float32 attention received so far, if a stage adds it up.
            ``statistic.NAME``: (layers, rows, kv_heads, slots), of the value vectors of old tokens under a store stage.
            ``queries``: (layers, rows, heads, window, key_dim), the query of token t at t mod window, if a stage
            looks at queries.
            ``rungR.keys.PART``, ``rungR.values.PART``: parts of the codes of coded pool R = 1, 2, ..., and
            ``rungR.positions`` and so on, as above.
    """

    def __init__(self, layers: Sequence[int], geometry: Geometry, layout: Layout, pipeline: Pipeline) -> None:
        self.layers = list(layers)
        self.geometry = geometry
        self.layout = layout
        self.pipeline = pipeline
        if pipeline.store is not None:
            pipeline.store.check(geometry.dims)
        self.tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._shapes(layout).items():
            # Zeros, since attention over a ragged batch reads unused slots, and masking doesn't remove NaN: 0 * NaN.
            fill = EMPTY if name.endswith("positions") else 0
            self.tensors[name] = torch.full(shape, fill, dtype=dtype, device=geometry.device)

    def _shapes(self, layout: Layout) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        g, pipeline = self.geometry, self.pipeline
        leading = (len(self.layers), g.rows)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

        def add_per_slot(prefix: str, slots: int) -> None:
            per_slot = (*leading, g.kv_heads, slots)
            shapes[prefix + "positions"] = (per_slot, torch.int32)
            if pipeline.needs_mass:
                shapes[prefix + "mass"] = (per_slot, torch.float32)
            for name in pipeline.statistics:
                shapes[f"{prefix}statistic.{name}"] = (per_slot, g.dtype)

        for name, dim in g.dims.items():
            shapes[name] = ((*leading, g.kv_heads, layout.slots, dim), g.dtype)
        add_per_slot("", layout.slots)
        if pipeline.window:
            shapes["queries"] = ((*leading, g.heads, pipeline.window, g.key_dim), g.dtype)
        for index, (rung, slots) in enumerate(zip(self.rungs, layout.coded, strict=True), start=1):
            for name, dim in g.dims.items():
                for part, (shape, dtype, tokens) in getattr(rung, name).parts(dim, g.dtype).items():
                    whole = (*leading, g.kv_heads, slots // tokens, *shape)
                    shapes[f"rung{index}.{name}.{part}"] = (whole, dtype)
            add_per_slot(f"rung{index}.", slots)
        return shapes

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return () if self.pipeline.store is None else self.pipeline.store.rungs

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor:
        """(layers, rows, kv_heads, slots, key_dim)"""
        return self.tensors["keys"]

    @property
    def values(self) -> Tensor:
        """(layers, rows, kv_heads, slots, value_dim); a view of keys where values are channels of them."""
        return self.keys[..., : self.geometry.value_dim] if self.geometry.latent else self.tensors["values"]

    @property
    def positions(self) -> Tensor:
        return self.tensors["positions"]

    @property
    def mass(self) -> Tensor | None:
        return self.tensors.get("mass")

    @property
    def queries(self) -> Tensor | None:
        return self.tensors.get("queries")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def per_slot(self, rung: int = 0) -> dict[str, Tensor]:
        """What moves with a token, by name without the prefix of the pool; 0 is the pool that isn't coded."""
        prefix = f"rung{rung}." if rung else ""
        names = [name for name in self.tensors if name.startswith("rung") == bool(rung) and name != "queries"]
        return {name.removeprefix(prefix): self.tensors[name] for name in names if name.startswith(prefix)}

    def coded(self, rung: int, name: Literal["keys", "values"], layer: int | slice, slots: int) -> Coded:
        """The first ``slots`` slots of coded pool ``rung`` (from 1) in one layer, or several, as codes."""
        g = self.geometry
        codec, channels = getattr(self.rungs[rung - 1], name), None
        if g.latent and name == "values":
            name, channels, codec = "keys", g.value_dim, self.rungs[rung - 1].keys
        dim = g.dims[name]
        parts = {
            part: self.tensors[f"rung{rung}.{name}.{part}"][layer][..., : slots // spec.tokens, :]
            for part, spec in codec.parts(dim, g.dtype).items()
        }
        return Coded(codec, parts, dim, channels)

    def held_positions(self, layer: int, row: int) -> Tensor:
        """(kv_heads, tokens) int64, ascending: positions of the tokens held in all pools."""
        pools = [self.per_slot(rung)["positions"][layer, row] for rung in range(len(self.rungs) + 1)]
        positions = torch.cat(pools, dim=-1)
        return positions[positions != EMPTY].reshape(positions.shape[0], -1).long().sort(dim=-1).values

    # -- the batch, and where it lies ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors; the inverse is :meth:`from_state_dict`."""
        g = self.geometry
        shape = {"heads": g.heads, "value_dim": g.value_dim, "latent": g.latent, "scaling": g.scaling}
        return {"layers": list(self.layers), "shape": shape, "tensors": dict(self.tensors)}

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
        store.tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        return store

    def keep_layers(self, count: int) -> None:
        """Drop all layers but the first ``count``."""
        self.tensors = {name: tensor[:count].clone() for name, tensor in self.tensors.items()}
        del self.layers[count:]

    def map_rows(self, index: Tensor) -> None:
        """Replace the batch by ``rows[index]``; ``index`` is (new rows,) int64."""
        index = index.to(self.geometry.device)
        self.tensors = {name: tensor.index_select(1, index) for name, tensor in self.tensors.items()}
        self.geometry = replace(self.geometry, rows=len(index))

    def to(self, device: torch.device) -> None:
        """Move everything to another device."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.geometry = replace(self.geometry, device=device)

    def relayout(self, layout: Layout, before: Sequence[RowState], after: Sequence[RowState]) -> None:
        """Move to a layout with another number of old slots, each row from its ``before`` to its ``after`` slots."""
        fresh = SlotStore(self.layers, self.geometry, layout, self.pipeline)
        held = self.per_slot()
        for row, (old, new) in enumerate(zip(before, after, strict=True)):
            source = self.index(self.layout.slots_in_use(old))
            target = self.index(layout.slots_in_use(new))
            for name, tensor in fresh.per_slot().items():
                tensor[:, row, :, target] = held[name][:, row, :, source]
        for rung in range(1, len(self.rungs) + 1):
            # Coded slots fill up from the first one, and only ever become more.
            for name, tensor in self.per_slot(rung).items():
                fresh.per_slot(rung)[name][:, :, :, : tensor.shape[3]] = tensor
        if self.queries is not None:
            fresh.tensors["queries"] = self.queries
        self.tensors = fresh.tensors
        self.layout = layout

    def clear(self, row: int, slots: Sequence[int]) -> None:
        """Mark slots of one row as empty in all layers."""
        if slots:
            self.positions[:, row, :, self.index(slots)] = EMPTY

    def index(self, values: Sequence[int]) -> Tensor:
        """Host integers as an int64 tensor on the store's device."""
        return torch.tensor(list(values), dtype=torch.int64).to(self.geometry.device, non_blocking=True)

    # -- new tokens ----------------------------------------------------------------------------------------------

    def write_column(self, layer: int, slot: int, time: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one new token into the same slot of every row, at the same position ``time``.

        Args:
            queries: (rows, heads, 1, key_dim). keys, values: (rows, kv_heads, 1, dim).
        """
        self.keys[layer, :, :, slot] = keys[:, :, 0]
        if not self.geometry.latent:
            self.values[layer, :, :, slot] = values[:, :, 0]
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
        dtype = self.geometry.dtype
        self.keys[layer][rows, :, slots] = keys[:, :, 0].to(dtype)
        if not self.geometry.latent:
            self.values[layer][rows, :, slots] = values[:, :, 0].to(dtype)
        self.positions[layer][rows, :, slots] = times[:, None].to(torch.int32)
        if self.mass is not None:
            self.mass[layer][rows, :, slots] = 0.0
        if self.queries is not None:
            self.queries[layer][rows, :, times % self.queries.shape[3]] = queries[:, :, 0].to(dtype)

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
        dtype = self.geometry.dtype
        self.keys[layer][row, :, slot] = keys.transpose(1, 2).to(dtype)
        if not self.geometry.latent:
            self.values[layer][row, :, slot] = values.transpose(1, 2).to(dtype)
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
        self.queries[layer][row, :, times % window] = queries[:, :, skipped:].transpose(1, 2).to(self.geometry.dtype)

    def window(self, part: slice, rows: Sequence[int], states: Sequence[RowState]) -> Tensor:
        """(layers * rows, heads, W, key_dim), the last W queries of each row in order of time."""
        g = self.geometry
        if self.queries is None:
            count = len(self.layers[part]) * len(rows)
            return torch.empty(count, g.heads, 0, g.key_dim, dtype=g.dtype, device=g.device)
        window = self.queries.shape[3]
        count = min(window, min(state.seen for state in states))
        times = self.index([state.seen for state in states])[:, None] - count + torch.arange(count, device=g.device)
        # Advanced indices on both sides of a slice come first: (rows, W, layers, heads, dim).
        picked = self.queries[part].permute(1, 3, 0, 2, 4)[self.index(rows)[:, None], times % window]
        return picked.permute(2, 0, 3, 1, 4).flatten(0, 1)
