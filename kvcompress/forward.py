"""One layer of one forward pass: attend to the slots and the new tokens, then write the new tokens, then compress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompress.kernels.decode_attention import attention_mass, slot_attention
from kvcompress.step import RowGroup, StepPlan, chunk_mask
from kvcompress.store import EMPTY, Geometry, SlotStore


@dataclass(frozen=True)
class LayerCall:
    """What a model asks of one layer.

    Attributes:
        queries: (rows, heads, length, key_dim). keys: (rows, kv_heads, length, key_dim). values: (rows, kv_heads,
            length, value_dim). Of the new tokens, after RoPE.
        mask: what transformers prepared for the new columns, or None.
        scaling: factor on the logits. softcap: soft cap on them, or None. sinks: (heads,) sink logits, or None.
        dense: attention over the new tokens alone by the model's own function: (rows, heads, length, dim).
        project: turns attention output over slots into what the model expects; the identity except for latents.
        latent: values are the first value_dim channels of keys and are not stored again (multi-head latent attention).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    dense: Callable[[], Tensor]
    project: Callable[[Tensor], Tensor]
    latent: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(
            rows=self.keys.shape[0],
            heads=self.queries.shape[1],
            kv_heads=self.keys.shape[1],
            key_dim=self.keys.shape[3],
            value_dim=self.values.shape[3],
            dtype=self.keys.dtype,
            device=self.keys.device,
            latent=self.latent,
            scaling=self.scaling,
        )


def decode(store: SlotStore, local: int, plan: StepPlan, call: LayerCall) -> Tensor:
    """One real token in every row: write it to its slot, then attend to the slots in use.

    Args:
        local: index of the layer in the store.
    """
    with torch.no_grad(), torch.inference_mode(False):
        _write_decoded(store, local, plan, call)
    start, stop = plan.span
    keys = store.keys[local, :, :, start:stop]
    values = store.values[local, :, :, start:stop]
    mask = None
    if plan.masked:
        device = keys.device
        if device not in plan.in_use:
            plan.in_use[device] = _slots_in_use(store, local, start, stop)
        mask = plan.in_use[device]
    out = slot_attention(call.queries, keys, values, mask, call.scaling, call.softcap, call.sinks)
    if store.mass is not None:
        with torch.no_grad():
            mass = attention_mass(call.queries, keys, mask, call.scaling, call.softcap, call.sinks)
            store.mass[local, :, :, start:stop] += mass
    return call.project(out)


def _slots_in_use(store: SlotStore, local: int, start: int, stop: int) -> Tensor:
    """(rows, 1, 1, stop - start) bool; heads of a row use the same slots."""
    return (store.positions[local, :, :1, start:stop] != EMPTY).unsqueeze(2)


def _write_decoded(store: SlotStore, local: int, plan: StepPlan, call: LayerCall) -> None:
    queries, keys, values = call.queries.detach(), call.keys.detach(), call.values.detach()
    column = plan.column
    if column is not None:
        store.write_column(local, *column, queries, keys, values)
    else:
        store.write_one_each(local, *plan.indices(keys.device), queries, keys, values)


def chunk(store: SlotStore, local: int, plan: StepPlan, call: LayerCall, sequences: list[int]) -> Tensor:
    """Several new tokens, or padding among them: attention over slots and chunk, then writing and compression.

    Args:
        sequences: what keys the random numbers of each row.
    """
    keys, device = call.keys, call.keys.device
    start, stop = plan.span
    stored = stop - start if plan.stored else 0
    allowed = None
    if stored or store.mass is not None:
        real = torch.zeros(len(plan.after), plan.length, dtype=torch.bool)
        for group in plan.groups:
            real[group.rows, plan.length - group.new :] = True
        real = real.to(device)
        allowed = chunk_mask(call.mask, real, plan.length, device).expand(len(plan.after), -1, -1, -1)
    if stored:
        assert allowed is not None
        in_use = _slots_in_use(store, local, start, stop)
        allowed = torch.cat([in_use.expand(-1, -1, plan.length, -1), allowed], dim=-1)
        keys = torch.cat([store.keys[local, :, :, start:stop], keys], dim=2)
        values = torch.cat([store.values[local, :, :, start:stop], call.values], dim=2)
        out = call.project(slot_attention(call.queries, keys, values, allowed, call.scaling, call.softcap, call.sinks))
    else:
        out = call.dense()
    with torch.no_grad(), torch.inference_mode(False):
        mass = None
        if store.mass is not None:
            assert allowed is not None
            counted = allowed & real[:, None, :, None]
            mass = attention_mass(call.queries, keys, counted, call.scaling, call.softcap, call.sinks)
            if stored:
                store.mass[local, :, :, start:stop] += mass[..., :stored]
            mass = mass[..., stored:]
        for group in plan.groups:
            if group.new:
                _store_group(store, local, plan, group, call, mass, sequences)
    return out


def _store_group(
    store: SlotStore,
    local: int,
    plan: StepPlan,
    group: RowGroup,
    call: LayerCall,
    mass: Tensor | None,
    sequences: list[int],
) -> None:
    """Write the new tokens of rows in the same state, or compress them together with what the rows hold."""
    rows, first = group.rows, [row.seen for row in group.before]
    every = len(rows) == len(plan.after)

    def of_rows(tensor: Tensor) -> Tensor:
        part = tensor.detach() if every else tensor.detach()[rows]
        return part[:, :, plan.length - group.new :]

    store.write_queries(local, rows, of_rows(call.queries), first)
    if not group.compresses:
        slots = store.layout.next_slots(group.before[0], group.new)
        received = None if mass is None else of_rows(mass)
        store.write(local, rows, slots, of_rows(call.keys), of_rows(call.values), first, received)
        return
    tokens = {"keys": of_rows(call.keys)}
    if not call.latent:
        tokens["values"] = of_rows(call.values)
    if mass is not None:
        tokens["mass"] = of_rows(mass)
    positions = store.index(first)[:, None] + torch.arange(group.new, device=call.keys.device)
    tokens["positions"] = positions[:, None].expand(-1, call.keys.shape[1], -1).to(torch.int32)
    states = [replace(row, seen=row.seen + group.new) for row in group.before]
    keyed = [sequences[row] for row in rows]
    store.compress_rewriting(slice(local, local + 1), rows, states, keyed, tokens)
