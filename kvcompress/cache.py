"""CompressedCache: the transformers cache that keeps its full-attention layers in slot stores.

Attention modules call ``update(keys, values, layer)`` and hand what it returns to the attention function. Here
``update`` stores nothing: it returns the new states marked with their layer, and the attention wrapper
(:mod:`kvcompress.attention`) calls :meth:`CompressedCache.attend`, which attends to everything stored plus the new
tokens, then writes them, then compresses. Sliding-window, chunked and linear-attention layers are transformers' own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from kvcompress.config import CompressionConfig, load_config
from kvcompress.errors import CacheError, UnsupportedModelError
from kvcompress.kernels.decode_attention import attention_mass, slot_attention
from kvcompress.layout import Layout, RowState
from kvcompress.pipeline import Pipeline, check_protected
from kvcompress.step import StepPlan, chunk_mask, is_steady, new_tokens, plan_step, slots_needed, with_prompts
from kvcompress.store import EMPTY, Geometry, SlotStore

# Slots are added to a cache that doesn't evict in steps of a quarter of its size, at least this many.
_GROWTH = 256
_HISTORY_BASE = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds.

    Attributes:
        bytes_held: bytes of all tensors held: slots in use or not, positions, query window, layers left as they are.
        bytes_full: bytes that a full cache would hold for the tokens seen (padding not counted).
        events: compressions of each sequence (each covers all layers).
        tokens_seen: tokens of each sequence.
        tokens_kept: slots in use of each sequence, per compressed layer and KV head.
        backend: what computed attention over the slots.
    """

    bytes_held: int
    bytes_full: int
    events: list[int]
    tokens_seen: list[int]
    tokens_kept: list[int]
    backend: str

    @property
    def ratio(self) -> float:
        """How many times smaller than a full cache; below 1 while the slots are not used yet."""
        return self.bytes_full / self.bytes_held if self.bytes_held else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


class NewStates:
    """Keys or values that ``update`` passes on to the attention wrapper, with the layer that they belong to."""

    def __init__(self, layer: CompressedLayer, states: Tensor) -> None:
        self.layer = layer
        self.states = states

    @property
    def shape(self) -> torch.Size:
        return self.states.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    @property
    def device(self) -> torch.device:
        return self.states.device


class CompressedLayer(CacheLayerMixin):
    """One full-attention layer of a :class:`CompressedCache`, as transformers sees it."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: CompressedCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.cache.is_croppable

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Slots are allocated when attention first runs, since their number depends on the padding."""

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.cache.check_wrapped()
        return NewStates(self, key_states), NewStates(self, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only; the wrapper knows about the stored ones."""
        return query_length, self.cache.columns

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1


class CompressedCache(Cache):
    """A cache under a compression recipe, for a model that :func:`kvcompress.apply` has wrapped.

    Args:
        model: the model, or its config (then all layers are taken to be on one device).
        config: anything :func:`kvcompress.load_config` takes; its budget must be a number of tokens.
        sequence_ids: integers that key the random numbers of each sequence; by default a hash of its prompt and its
            occurrence among equal prompts of the batch, and the row index where token ids are not known.

    Raises:
        UnsupportedModelError: if no layer of the model can be compressed.
        ConfigError: if the recipe is not possible.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        config: str | Path | Mapping[str, Any] | CompressionConfig,
        sequence_ids: Sequence[int] | None = None,
    ) -> None:
        self.config = load_config(config)
        if isinstance(self.config.budget, float):
            raise CacheError(
                f"budget: {self.config.budget} is a ratio; call config.resolve(context_length), or give "
                "context_length to kvcompress.apply"
            )
        model_config = model.config if isinstance(model, PreTrainedModel) else model
        self.model_config = model_config.get_text_config(decoder=True)
        layers = DynamicCache(config=self.model_config).layers
        self.compressed = compressible_layers(self.model_config)
        for index in self.compressed:
            layers[index] = CompressedLayer(self, index)
        super().__init__(layers=layers)
        self.pipeline = Pipeline(self.config)
        self._placement = _layer_devices(model) if isinstance(model, PreTrainedModel) else {}
        self._sequence_ids = None if sequence_ids is None else [int(i) for i in sequence_ids]
        self._declared: list[int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.columns = 0
        self.rows: list[RowState] = []
        self.stores: list[SlotStore] = []
        self.sequences: list[int] | None = None
        self._identities: list[tuple[bytes, int]] | None = None
        self._history: Tensor | None = None
        self._history_known = True
        self._interior_padding = False
        self._unread_mask: Tensor | None = None
        self._plan: StepPlan | None = None
        self._scaling: dict[int, float] = {}
        self.layout = Layout(0, 0)

    def __repr__(self) -> str:
        return f"CompressedCache({self.config.name}, {len(self.compressed)} layers, {self.columns} tokens seen)"

    # -- what the model wrapper tells the cache ------------------------------------------------------------------

    def check_wrapped(self) -> None:
        """Refuse to serve a model whose attention is not ours."""
        if not str(self.model_config._attn_implementation).startswith("kvcompress_"):
            raise UnsupportedModelError(
                "CompressedCache: the model's attention is "
                f"{self.model_config._attn_implementation!r}; call kvcompress.apply(model, ...) before using it"
            )

    def expect_prompt(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Declare the whole prompt before it is fed in chunks, so that it keys the random numbers and counts as one.

        Args:
            input_ids: (prompts, columns). attention_mask: same shape, 0 for padding, or None.
        """
        prompts = _unpadded(input_ids, attention_mask)
        self._declared = [len(prompt) for prompt in prompts]
        self._identify(prompts)

    def observe_inputs(self, input_ids: Tensor | None, attention_mask: Tensor | None, rows: int) -> None:
        """Take note of the tokens of a call before it runs: they key the random numbers and make up the history.

        Args:
            input_ids: (rows, columns) of this call only, or None. attention_mask: 2-D, past columns included.
        """
        if self.rows and rows != len(self.rows):
            raise CacheError(
                f"batch: this cache holds {len(self.rows)} sequences, the call has {rows}; use one cache per batch"
            )
        if input_ids is None:
            self._history_known = False
        elif self._history_known:
            self._history = extend_history(self._history, input_ids)
        if self.columns:
            return
        columns = input_ids.shape[1] if input_ids is not None else None
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if mask is not None and columns is not None:
            mask = mask[:, -columns:]
        if self._declared is None and self._identities is None and input_ids is not None and self.config.evicts:
            self._identify(_unpadded(input_ids, mask))
        if self.config.evicts:
            longest = max(self._declared) if self._declared else _longest(mask, columns)
            if longest is not None and (longest > self.config.budget - self.config.buffer):  # type: ignore[operator]
                check_protected(self.config, longest)

    def matches_history(self, input_ids: Tensor) -> bool:
        """Whether the first ``columns`` of input_ids are the tokens this cache has seen (True where that is unknown)."""
        if not self._history_known or self._history is None or not self.columns:
            return True
        prefix = extend_history(None, input_ids[:, : self.columns].to(self._history.device))
        return prefix.shape == self._history.shape and bool((prefix == self._history).all())

    def _identify(self, prompts: list[list[int]]) -> None:
        digests = [hashlib.blake2b(str(prompt).encode(), digest_size=8).digest() for prompt in prompts]
        self._identities = _numbered(digests)

    def _keys_of_rows(self, rows: int) -> list[int]:
        """64-bit random key of each row of the batch."""
        if self._sequence_ids is not None:
            if len(self._sequence_ids) != rows:
                raise CacheError(f"sequence_ids: {len(self._sequence_ids)} given for a batch of {rows} sequences")
            return list(self._sequence_ids)
        if self._identities is None:
            return list(range(rows))
        if len(self._identities) != rows and rows % len(self._identities) == 0:
            digests = [digest for digest, _ in self._identities for _ in range(rows // len(self._identities))]
            self._identities = _numbered(digests)
        if len(self._identities) != rows:
            raise CacheError(f"batch: {len(self._identities)} prompts were declared for a batch of {rows} sequences")
        return [_sequence_key(*identity) for identity in self._identities]

    # -- one forward pass ----------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        dense: Callable[[], Tensor],
    ) -> Tensor:
        """Attend to everything stored and to the new tokens, then store them, then compress.

        Args:
            layer: index of the layer.
            queries: (rows, heads, length, key_dim). keys: (rows, kv_heads, length, key_dim). values: (rows, kv_heads,
                length, value_dim).
            mask: what transformers prepared for the new columns, or None.
            dense: computes attention over the new tokens alone by the model's own attention function.

        Returns:
            (rows, heads, length, value_dim).
        """
        if layer == self.compressed[0]:
            self._plan = self._begin(queries, mask)
        plan = self._plan
        if plan is None:
            raise CacheError(f"layer {layer} was called before layer {self.compressed[0]}, out of order")
        with torch.no_grad(), torch.inference_mode(False):
            store, local = self._store_of(layer, queries, keys, values)
            if plan.decode:
                _write_decode(store, local, plan, queries.detach(), keys.detach(), values.detach())
        if plan.decode:
            out = _attend_decode(store, local, plan, queries, scaling, softcap, sinks)
        else:
            out = self._attend_chunk(store, local, plan, queries, keys, values, mask, scaling, softcap, sinks, dense)
        self._scaling[layer] = scaling
        if layer == self.compressed[-1]:
            self._finish(plan)
        return out

    def _begin(self, queries: Tensor, mask: Tensor | None) -> StepPlan:
        rows, length = queries.shape[0], queries.shape[2]
        states = self.rows or [RowState() for _ in range(rows)]
        if len(states) != rows:
            raise CacheError(
                f"batch: this cache holds {len(states)} sequences, the call has {rows}; use one cache per batch"
            )
        if mask is not None and mask.dim() == 4 and mask.shape[-1] != length:
            raise CacheError(
                f"attention_mask: shape {tuple(mask.shape)} covers {mask.shape[-1]} columns, but over a compressed "
                f"cache only the {length} new ones can be masked; give a 2-D padding mask"
            )
        if self.sequences is None:
            self.sequences = self._keys_of_rows(rows)
        counts = new_tokens(self._valid(mask, states, rows, length), rows, length)
        if any(row.seen and count < length for row, count in zip(states, counts, strict=True)):
            self._interior_padding = True
        declared = self._declared
        if declared is not None and len(declared) != rows:
            declared = [prompt for prompt in declared for _ in range(rows // len(declared))]
        states = with_prompts(states, counts, declared)
        needed = slots_needed(self.config, states, counts)
        if needed > self.layout.slots:
            states = self._grow(states, needed)
        return plan_step(self.config, self.layout, states, counts, length)

    def _valid(self, mask: Tensor | None, states: list[RowState], rows: int, length: int) -> list[list[bool]] | None:
        """Per row and new column, whether it is a token; None if all are."""
        if mask is None:
            return None
        if mask.dim() == 2:
            valid = mask[:, -length:].bool()
        else:
            diagonal = torch.diagonal(mask[:, 0], dim1=-2, dim2=-1)
            valid = diagonal if diagonal.dtype == torch.bool else diagonal > torch.finfo(diagonal.dtype).min / 2
        valid = valid.expand(rows, length)
        if length == 1 and valid.device.type != "cpu" and all(row.seen for row in states):
            # Reading the mask would wait for the device at every step; remember it and check at the next event.
            self._unread_mask = valid if self._unread_mask is None else self._unread_mask & valid
            return None
        flags: list[list[bool]] = valid.tolist()
        return None if all(map(all, flags)) else flags

    def _check_unread_mask(self) -> None:
        if self._unread_mask is not None and not bool(self._unread_mask.all()):
            raise CacheError(
                "attention_mask: masks a single-token step of a sequence that has begun; pad on the left, before the prompt"
            )
        self._unread_mask = None

    def _grow(self, states: list[RowState], needed: int) -> list[RowState]:
        """Enlarge the layout to ``needed`` slots; returns the rows as they lie in it."""
        if self.config.evicts:
            layout = Layout(needed - 2 * self.config.buffer, self.config.buffer)
        else:
            held = self.layout.slots
            layout = Layout(max(needed, held + max(_GROWTH, held // 4)) if held else needed + _GROWTH, 0)
        return self._relayout(states, layout)

    def _relayout(self, states: list[RowState], layout: Layout) -> list[RowState]:
        moved = [replace(layout.refilled(row)) for row in states]
        with torch.no_grad(), torch.inference_mode(False):
            for store in self.stores:
                store.relayout(layout, states, moved)
        self.layout = layout
        if self.rows:
            self.rows = moved
        return moved

    def _store_of(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[SlotStore, int]:
        """The store of a layer and its place in it; allocates the store of all layers alike at its first layer."""
        for store in self.stores:
            if layer in store.layers:
                if store.geometry != _geometry(queries, keys, values):
                    store = self._split(store, layer, _geometry(queries, keys, values))
                return store, store.layers.index(layer)
        taken = {index for store in self.stores for index in store.layers}
        place = self._placement.get(layer)
        alike = [i for i in self.compressed if i >= layer and i not in taken and self._placement.get(i) == place]
        store = SlotStore(alike, _geometry(queries, keys, values), self.layout, self.pipeline)
        self.stores.append(store)
        return store, 0

    def _split(self, store: SlotStore, layer: int, geometry: Geometry) -> SlotStore:
        """Give layers from ``layer`` on a store of their own, since their shapes differ from those before."""
        if any(row.held for row in self.rows):
            raise CacheError(
                f"layer {layer}: keys and values have changed to {geometry} from {store.geometry} within one cache"
            )
        at = store.layers.index(layer)
        later = SlotStore(store.layers[at:], geometry, self.layout, self.pipeline)
        for name, tensor in store.tensors().items():
            setattr(store, name, tensor[:at].clone())
        del store.layers[at:]
        if not store.layers:
            self.stores.remove(store)
        self.stores.append(later)
        return later

    def _attend_chunk(
        self,
        store: SlotStore,
        local: int,
        plan: StepPlan,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        dense: Callable[[], Tensor],
    ) -> Tensor:
        """Several new tokens, or padding among them: attention over slots and chunk, then writing and compression."""
        start, stop = plan.span
        allowed, seen_keys = None, keys
        if plan.stored or store.mass is not None:
            valid = torch.zeros(len(plan.after), plan.length, dtype=torch.bool)
            for group in plan.groups:
                valid[group.rows, plan.length - group.new :] = True
            valid = valid.to(keys.device)
            allowed = chunk_mask(mask, valid, plan.length, keys.device)
        if plan.stored:
            assert allowed is not None
            in_use = (store.positions[local, :, :1, start:stop] != EMPTY).unsqueeze(2)
            allowed = torch.cat(
                [in_use.expand(-1, -1, plan.length, -1), allowed.expand(len(plan.after), -1, -1, -1)], dim=-1
            )
            seen_keys = torch.cat([store.keys[local, :, :, start:stop], keys], dim=2)
            seen_values = torch.cat([store.values[local, :, :, start:stop], values], dim=2)
            out = slot_attention(queries, seen_keys, seen_values, allowed, scaling, softcap, sinks)
        else:
            out = dense()
        with torch.no_grad(), torch.inference_mode(False):
            chunk_mass = None
            if store.mass is not None:
                assert allowed is not None
                real = allowed & valid[:, None, :, None]
                mass = attention_mass(queries, seen_keys, real, scaling, softcap, sinks)
                stored = mass.shape[-1] - plan.length
                if stored:
                    store.mass[local, :, :, start:stop] += mass[..., :stored]
                chunk_mass = mass[..., stored:]
            self._store_chunk(store, local, plan, queries.detach(), keys.detach(), values.detach(), chunk_mass, scaling)
        return out

    def _store_chunk(
        self,
        store: SlotStore,
        local: int,
        plan: StepPlan,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mass: Tensor | None,
        scaling: float,
    ) -> None:
        assert self.sequences is not None
        for group in plan.groups:
            if not group.new:
                continue
            rows = group.rows
            every = len(rows) == len(plan.after)
            first = [row.seen for row in group.before]

            def of_rows(tensor: Tensor, rows: list[int] = rows, every: bool = every, new: int = group.new) -> Tensor:
                part = tensor if every else tensor[rows]
                return part[:, :, plan.length - new :] if new < plan.length else part

            store.write_queries(local, rows, of_rows(queries), first)
            if not group.compresses:
                slots = self.layout.next_slots(group.before[0], group.new)
                store.write(local, rows, slots, of_rows(keys), of_rows(values), first)
                if store.mass is not None and mass is not None:
                    at = (store._index(rows)[:, None], slice(None), store._index(slots)[None, :])
                    store.mass[local][at] = of_rows(mass).transpose(1, 2)
                continue
            chunk = {"keys": of_rows(keys), "values": of_rows(values)}
            offsets = torch.arange(group.new, device=keys.device)
            positions = store._index(first)[:, None] + offsets
            chunk["positions"] = positions[:, None].expand(-1, keys.shape[1], -1).to(torch.int32)
            if mass is not None:
                chunk["mass"] = of_rows(mass)
            states = [replace(row, seen=row.seen + group.new) for row in group.before]
            sequences = [self.sequences[row] for row in rows]
            store.compress_rewriting(slice(local, local + 1), rows, states, sequences, scaling, chunk)

    def _finish(self, plan: StepPlan) -> None:
        """All layers have attended: compress what a decode step filled up, and commit the lengths."""
        assert self.sequences is not None
        if plan.decode and any(group.compresses for group in plan.groups):
            self._check_unread_mask()
            with torch.no_grad(), torch.inference_mode(False):
                for group in plan.groups:
                    if group.compresses:
                        self._compress_decoded(group.rows, [self.layout.appended(row, 1) for row in group.before])
        self.rows = plan.after
        self.columns += plan.length
        self._plan = None
        if self.config.evicts and self.layout.slots > self.config.budget + self.config.buffer:  # type: ignore[operator]
            self._shrink()

    def _compress_decoded(self, rows: list[int], states: list[RowState]) -> None:
        assert self.sequences is not None
        sequences = [self.sequences[row] for row in rows]
        every = len(rows) == len(self.rows)
        for store in self.stores:
            scaling = self._scaling[store.layers[0]]
            if is_steady(self.config, self.layout, states[0]):
                batches = [(rows, states, sequences)] if every else []
                if not every:
                    batches = [([r], [s], [q]) for r, s, q in zip(rows, states, sequences, strict=True)]
                for batch in batches:
                    store.compress_in_place(*batch, scaling)
            else:
                for local in range(len(store.layers)):
                    store.compress_rewriting(slice(local, local + 1), rows, states, sequences, scaling)

    def _shrink(self) -> None:
        """Return to K + B slots once no deferred prompt needs more."""
        assert isinstance(self.config.budget, int)
        limit = self.config.budget + self.config.buffer
        if all(row.held <= limit and (row.events or row.seen >= row.prompt) for row in self.rows):
            self._relayout(self.rows, Layout(limit - 2 * self.config.buffer, self.config.buffer))

    # -- cache operations ----------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether a rollback leaves no trace: nothing has been or will be evicted, and other layers can crop."""
        others = (layer for layer in self.layers if not isinstance(layer, CompressedLayer))
        return not self.config.evicts and all(layer.is_croppable for layer in others)

    @property
    def is_initialized(self) -> bool:
        return bool(self.rows)

    @property
    def batch_size(self) -> int:
        return len(self.rows) if self.rows else -1

    def _other_layers(self) -> list[CacheLayerMixin]:
        return [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]

    def reset(self) -> None:
        """Forget everything; the next call starts a new batch."""
        self._declared = None
        self._forget()
        for layer in self._other_layers():
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as a negative number, within what has not been compressed.

        Raises:
            CacheError: if a compression has come after the tokens to remove; the cache is left as it was.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop: {tokens_to_remove} is positive; give the number of tokens to remove as a negative one"
            )
        count = -tokens_to_remove
        if count and self.rows:
            self._check_crop(count)
            cropped = []
            for index, row in enumerate(self.rows):
                removed = min(count, row.seen)
                for store in self.stores:
                    store.clear(index, self.layout.slots_in_use(row)[row.held - removed :] if removed else [])
                cropped.append(self.layout.cropped(row, removed))
            self.rows = cropped
            self.columns -= count
            self._history_known = False
        for layer in self._other_layers():
            layer.crop(tokens_to_remove)

    def _check_crop(self, count: int) -> None:
        if count > self.columns:
            raise CacheError(f"crop: cannot remove {count} tokens, the cache has seen {self.columns}")
        if self._interior_padding:
            raise CacheError("crop: the batch has padding after its prompts, so rows cannot be rolled back by columns")
        for index, row in enumerate(self.rows):
            allowed = row.ring if row.events else row.held
            if count > allowed and row.seen > allowed:
                raise CacheError(
                    f"crop: cannot remove {count} tokens of sequence {index}: it was compressed after {row.seen - row.ring} "
                    f"tokens, so at most {allowed} can be removed"
                )
            over = self.config.evicts and row.held >= self.config.budget + self.config.buffer  # type: ignore[operator]
            if over and self.pipeline.window:
                raise CacheError(
                    f"crop: sequence {index} holds a deferred prompt whose last queries are needed; set prefill: compress"
                )

    def _map_rows(self, index: Tensor) -> None:
        if not self.rows:
            return
        chosen = index.nonzero().flatten() if index.dtype == torch.bool else index
        picked = [int(i) for i in chosen.tolist()]
        with torch.no_grad(), torch.inference_mode(False):
            for store in self.stores:
                store.map_rows(chosen)
            if self._history is not None:
                self._history = self._history[chosen.to(self._history.device)]
        self.rows = [self.rows[i] for i in picked]
        for name in ("sequences", "_identities", "_sequence_ids", "_declared"):
            values = getattr(self, name)
            if values is not None and len(values) > max(picked, default=0):
                setattr(self, name, [values[i] for i in picked])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch becomes what row beam_idx[i] was; beams of one parent share its random numbers."""
        self._map_rows(beam_idx)
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch."""
        self._map_rows(indices)
        for layer in self._other_layers():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the copies get random numbers of their own."""
        if self.rows:
            device = self.stores[0].geometry.device
            self._map_rows(torch.arange(len(self.rows), device=device).repeat_interleave(repeats))
            if self._identities is not None and self._sequence_ids is None:
                self._identities = _numbered([digest for digest, _ in self._identities])
                self.sequences = [_sequence_key(*identity) for identity in self._identities]
        for layer in self._other_layers():
            layer.batch_repeat_interleave(repeats)

    def to(self, device: torch.device | str) -> CompressedCache:
        """Move everything held to a device; returns self."""
        target = torch.device(device)
        for store in self.stores:
            store.to(target)
        if self._history is not None:
            self._history = self._history.to(target)
        for layer in self._other_layers():
            for name, value in vars(layer).items():
                if isinstance(value, Tensor):
                    setattr(layer, name, value.to(target))
        return self

    # -- what it holds -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Bytes held and tokens kept now; see :class:`CacheStats`."""
        self._check_unread_mask()
        others = sum(
            value.nbytes
            for layer in self._other_layers()
            for value in vars(layer).values()
            if isinstance(value, Tensor)
        )
        held = sum(store.nbytes for store in self.stores)
        per_token = sum(len(store.layers) * store.geometry.bytes_per_token for store in self.stores)
        return CacheStats(
            bytes_held=held + others,
            bytes_full=per_token * sum(row.seen for row in self.rows) + others,
            events=[row.events for row in self.rows],
            tokens_seen=[row.seen for row in self.rows],
            tokens_kept=[row.held for row in self.rows],
            backend="torch",
        )

    def kept_positions(self, layer: int, row: int = 0) -> Tensor:
        """Positions of the tokens held by one sequence in one layer: (kv_heads, tokens) int64, ascending."""
        for store in self.stores:
            if layer in store.layers:
                positions = store.positions[store.layers.index(layer), row]
                return positions[positions != EMPTY].reshape(positions.shape[0], -1).long().sort(dim=-1).values
        raise CacheError(f"layer {layer}: holds no compressed tokens; compressed layers: {self.compressed}")


def compressible_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the full-attention layers of a decoder config.

    Raises:
        UnsupportedModelError: if there is none, or layers share or index their keys and values.
    """
    layers = DynamicCache(config=config).layers
    shared = getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    if shared:
        raise UnsupportedModelError(
            f"{config.model_type}: layers share each other's keys and values, which is not supported"
        )
    found = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not found:
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise UnsupportedModelError(
            f"{config.model_type}: has no full-attention layer to compress; its cache layers are {', '.join(kinds)}, "
            "whose memory is bounded already or not in keys and values"
        )
    return found


def extend_history(history: Tensor | None, input_ids: Tensor) -> Tensor:
    """Rolling hash of all token ids of each row, in wrapping 64-bit arithmetic: h <- h * A + id per column.

    Args:
        history: (rows,) int64, or None for no tokens yet. input_ids: (rows, columns).
    """
    columns = input_ids.shape[1]
    base = torch.full((columns,), _HISTORY_BASE, dtype=torch.int64, device=input_ids.device)
    powers = torch.cumprod(base, dim=0)
    weights = torch.cat([torch.ones_like(powers[:1]), powers[:-1]]).flip(0)
    added = ((input_ids.to(torch.int64) + 1) * weights).sum(dim=1)
    return added if history is None or not columns else history * powers[-1] + added


def _geometry(queries: Tensor, keys: Tensor, values: Tensor) -> Geometry:
    return Geometry(
        rows=keys.shape[0],
        heads=queries.shape[1],
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        device=keys.device,
    )


def _layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Device of each attention layer, so that layers placed together share a store."""
    devices: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            parameter = next(module.parameters(), None)
            if parameter is not None:
                devices.setdefault(index, parameter.device)
    return devices


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    pairs = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    return [[int(token) for token, real in zip(row, flags, strict=True) if real] for row, flags in pairs]


def _longest(mask: Tensor | None, columns: int | None) -> int | None:
    if mask is not None:
        return int(mask.sum(dim=1).max())
    return columns


def _numbered(digests: list[bytes]) -> list[tuple[bytes, int]]:
    """Each digest with its occurrence number among equal ones."""
    seen: Counter[bytes] = Counter()
    numbered = []
    for digest in digests:
        numbered.append((digest, seen[digest]))
        seen[digest] += 1
    return numbered


def _sequence_key(digest: bytes, occurrence: int) -> int:
    key = hashlib.blake2b(digest + occurrence.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(key, "little", signed=True)


def _write_decode(store: SlotStore, local: int, plan: StepPlan, queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write one new token of every row to its slot."""
    layout = store.layout
    slots = {layout.next_slot(row) for group in plan.groups for row in group.before}
    times = {row.seen for group in plan.groups for row in group.before}
    if len(slots) == 1 and len(times) == 1:
        slot, time = slots.pop(), times.pop()
        store.keys[local, :, :, slot] = keys[:, :, 0]
        store.values[local, :, :, slot] = values[:, :, 0]
        store.positions[local, :, :, slot] = time
        if store.mass is not None:
            store.mass[local, :, :, slot] = 0.0
        if store.queries is not None:
            store.queries[local, :, :, time % store.queries.shape[3]] = queries[:, :, 0]
        return
    for group in plan.groups:
        rows, first = group.rows, [row.seen for row in group.before]
        store.write(local, rows, layout.next_slots(group.before[0], 1), keys[rows], values[rows], first)
        store.write_queries(local, rows, queries[rows], first)


def _attend_decode(
    store: SlotStore,
    local: int,
    plan: StepPlan,
    queries: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One query per row over the slots in use, the new token's among them."""
    start, stop = plan.span
    keys = store.keys[local, :, :, start:stop]
    values = store.values[local, :, :, start:stop]
    mask = None
    if plan.masked:
        mask = (store.positions[local, :, :1, start:stop] != EMPTY).unsqueeze(2)
    out = slot_attention(queries, keys, values, mask, scaling, softcap, sinks)
    if store.mass is not None:
        store.mass[local, :, :, start:stop] += attention_mass(queries, keys, mask, scaling, softcap, sinks)
    return out
