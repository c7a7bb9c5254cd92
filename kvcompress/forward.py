"""One layer of one forward pass: attend to the slots and the new tokens, then write the new tokens, then compress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompress.event import run_event
from kvcompress.kernels.backend import note
from kvcompress.kernels.decode_attention import decode_attention
from kvcompress.kernels.flash_attention import covered_by_flash_attn, flash_attention
from kvcompress.kernels.segment_attention import Segment, segment_attention, segment_mass
from kvcompress.kernels.slot_attention import attention_mass, slot_attention
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

    def geometry(self, dtype: torch.dtype | None) -> Geometry:
        """What a store for this layer looks like; ``dtype`` of its slots, None for the model's own."""
        return Geometry(
            rows=self.keys.shape[0],
            heads=self.queries.shape[1],
            kv_heads=self.keys.shape[1],
            key_dim=self.keys.shape[3],
            value_dim=self.values.shape[3],
            dtype=dtype or self.keys.dtype,
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
    device = call.keys.device

    def in_use(pool: int, slots: slice) -> Tensor | None:
        if not (plan.coded_masked if pool else plan.masked):
            return None
        if (device, pool) not in plan.in_use:
            plan.in_use[device, pool] = _slots_in_use(store, local, pool, slots)
        return plan.in_use[device, pool]

    span = slice(start, stop)
    mask = in_use(0, span)
    keys, values = store.keys[local, :, :, span], store.values[local, :, :, span]
    options = (call.scaling, call.softcap, call.sinks)
    segments = [Segment(keys, values, mask), *_coded_segments(store, local, plan, in_use)]
    out, _ = decode_attention(call.queries, segments, *options)
    if store.mass is not None:
        with torch.no_grad():
            if len(segments) == 1 and keys.dtype == call.queries.dtype:
                _add_mass(store, local, plan, [attention_mass(call.queries, keys, mask, *options)])
            else:
                _add_mass(store, local, plan, segment_mass(call.queries, segments, *options))
    return call.project(out)


def _coded_segments(
    store: SlotStore, local: int, plan: StepPlan, in_use: Callable[[int, slice], Tensor | None]
) -> list[Segment]:
    """The coded pools of a layer, those without tokens left out."""
    return [
        Segment(
            store.coded(rung, "keys", local, slots),
            store.coded(rung, "values", local, slots),
            in_use(rung, slice(0, slots)),
        )
        for rung, slots in enumerate(plan.coded, start=1)
        if slots
    ]


def _add_mass(store: SlotStore, local: int, plan: StepPlan, masses: list[Tensor]) -> None:
    """Add the attention that the slots of the span and of the coded pools in use have received."""
    rungs = [0, *(rung for rung, slots in enumerate(plan.coded, start=1) if slots)]
    for rung, mass in zip(rungs, masses, strict=True):
        start = 0 if rung else plan.span[0]
        store.per_slot(rung)["mass"][local, :, :, start : start + mass.shape[-1]] += mass


def _slots_in_use(store: SlotStore, local: int, rung: int, slots: slice) -> Tensor:
    """(rows, 1, 1, slots) bool; heads of a row use the same slots."""
    return (store.per_slot(rung)["positions"][local, :, :1, slots] != EMPTY).unsqueeze(2)


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
    device = call.keys.device
    allowed = None
    if plan.stored or store.mass is not None:
        real = torch.zeros(len(plan.after), plan.length, dtype=torch.bool)
        for group in plan.groups:
            real[group.rows, plan.length - group.new :] = True
        real = real.to(device)
        allowed = chunk_mask(call.mask, real, plan.length, device).expand(len(plan.after), -1, -1, -1)
    options = (call.scaling, call.softcap, call.sinks)
    segments: list[Segment] = []
    if plan.stored:
        assert allowed is not None
        segments = _segments(store, local, plan)
        out = call.project(_attend_chunk(segments, call, allowed, options))
    else:
        out = _prefill(call)
    with torch.no_grad(), torch.inference_mode(False):
        mass = None
        if store.mass is not None:
            assert allowed is not None
            segments.append(Segment(call.keys, call.values, allowed))
            counted = [s._replace(mask=s.mask & real[:, None, :, None]) for s in segments if s.mask is not None]
            *received, mass = segment_mass(call.queries, counted, *options)
            if plan.stored:
                _add_mass(store, local, plan, received)
        for group in plan.groups:
            if group.new:
                _store_group(store, local, plan, group, call, mass, sequences)
    return out


def _prefill(call: LayerCall) -> Tensor:
    """Attention of the first tokens to each other: by the model's own function, unless flash-attn is to be used."""
    # Without a mask, transformers means plain causal attention. Latents are expanded by the model's own function.
    if not call.latent and covered_by_flash_attn(call.queries, call.keys, call.values, call.mask, call.sinks):
        note("prefill", "flash_attn")
        return flash_attention(call.queries, call.keys, call.values, call.scaling, call.softcap, causal=True)
    note("prefill", "model")
    return call.dense()


def _segments(store: SlotStore, local: int, plan: StepPlan) -> list[Segment]:
    """What a layer holds, with masks for queries of several tokens."""

    def in_use(pool: int, slots: slice) -> Tensor:
        return _slots_in_use(store, local, pool, slots).expand(-1, -1, plan.length, -1)

    span = slice(*plan.span)
    own = Segment(store.keys[local, :, :, span], store.values[local, :, :, span], in_use(0, span))
    return [own, *_coded_segments(store, local, plan, in_use)]


def _attend_chunk(
    segments: list[Segment], call: LayerCall, allowed: Tensor, options: tuple[float, float | None, Tensor | None]
) -> Tensor:
    """Attention of a chunk to what is stored and to itself, by ``allowed``."""
    keys, values, mask, _ = segments[0]
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    assert mask is not None
    if len(segments) > 1 or keys.dtype != call.queries.dtype:
        return segment_attention(call.queries, [*segments, Segment(call.keys, call.values, allowed)], *options)
    keys, values = torch.cat([keys, call.keys], dim=2), torch.cat([values, call.values], dim=2)
    return slot_attention(call.queries, keys, values, torch.cat([mask, allowed], dim=-1), *options)


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
    if group.event is None:
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
    run_event(store, rows, states, keyed, group.event, local, tokens)
