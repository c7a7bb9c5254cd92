"""CompressedCache: the transformers cache that keeps its full-attention layers in slot stores.

Attention modules call ``update(keys, values, layer)`` and hand what it returns to the attention function. Here
``update`` stores nothing: it returns the new states marked with their layer, and the attention wrapper
(:mod:`kvcompress.attention`) calls :meth:`CompressedCache.attend`, which attends to everything stored plus the new
tokens, then writes them, then compresses. Sliding-window, chunked and linear-attention layers are transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvcompress import own_layers, saving
from kvcompress.config import CompressionConfig, load_config
from kvcompress.errors import CacheError, UnsupportedModelError
from kvcompress.event import run_event
from kvcompress.footprint import growing_layout
from kvcompress.forward import LayerCall, chunk, decode
from kvcompress.identity import Identities
from kvcompress.kernels.backend import Backend, check_backend
from kvcompress.kernels.backend import backend as running_by
from kvcompress.layer import CompressedLayer
from kvcompress.layout import Layout, RowState
from kvcompress.pipeline import Pipeline, check_protected
from kvcompress.stats import CacheStats
from kvcompress.step import StepPlan, new_tokens, plan_step, slots_needed, with_prompts
from kvcompress.store import Geometry, SlotStore
from kvcompress.support import PREFIX, compressible_layers, layer_devices

# Slots are added to a cache that doesn't evict in steps of a quarter of its size, at least this many.
_GROWTH = 256


class CompressedCache(Cache):
    """A cache under a compression recipe, for a model that :func:`kvcompress.apply` has wrapped.

    Args:
        model: the model, or its config (then all layers are taken to be on one device).
        config: anything :func:`kvcompress.load_config` takes; its budget must be a number of tokens.
        sequence_ids: integers that key the random numbers of each sequence; by default a hash of its prompt and its
            occurrence among equal prompts of the batch, and the row index where token ids are not known.
        reserve: tokens per sequence to make room for at once, where the recipe doesn't evict; without it the cache
            grows in blocks, which copies what it holds.
        backend: what operations run by; see :mod:`kvcompress.kernels.backend`.

    Raises:
        UnsupportedModelError: if no layer of the model can be compressed.
        ConfigError: if the recipe is not possible, or the backend cannot run where the model is.
    """

    def __init__(
        self,
        model: PreTrainedModel | PreTrainedConfig,
        config: str | Path | Mapping[str, Any] | CompressionConfig,
        sequence_ids: Sequence[int] | None = None,
        reserve: int | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.reserve = reserve
        self.backend: Backend = backend
        self.kernels: dict[str, str] = {}
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
        self._placement = layer_devices(model) if isinstance(model, PreTrainedModel) else {}
        self.latent_rank: int | None = getattr(self.model_config, "kv_lora_rank", None)
        self._storage = None if self.config.storage == "model" else getattr(torch, self.config.storage)
        self.identities = Identities(sequence_ids)
        self._forget()

    def _forget(self) -> None:
        self.columns = 0
        self.rows: list[RowState] = []
        self.stores: list[SlotStore] = []
        self.interior_padding = False
        self._unread_mask: Tensor | None = None
        self._plan: StepPlan | None = None
        self._incoming: Tensor | None = None
        self.layout = Layout(0, 0)

    def __repr__(self) -> str:
        return f"CompressedCache({self.config.name}, {len(self.compressed)} layers, {self.columns} tokens seen)"

    # -- what the model wrapper tells the cache ------------------------------------------------------------------

    def check_wrapped(self) -> None:
        """Refuse to serve a model whose attention is not ours."""
        if not str(self.model_config._attn_implementation).startswith(PREFIX):
            raise UnsupportedModelError(
                "CompressedCache: the model's attention is "
                f"{self.model_config._attn_implementation!r}; call kvcompress.apply(model, ...) before using it"
            )

    def expect_prompt(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Declare the whole prompt before it is fed in chunks, so that it keys the random numbers and counts as one.

        Args:
            input_ids: (prompts, columns). attention_mask: same shape, 0 for padding, or None.
        """
        self.identities.declare(input_ids, attention_mask, whole=True)

    def observe_inputs(self, input_ids: Tensor | None, attention_mask: Tensor | None, rows: int) -> None:
        """Take note of the tokens of a call before it runs: they key the random numbers and make up the history.

        Args:
            input_ids: (rows, columns) of this call only, or None. attention_mask: 2-D, past columns included.
        """
        self._check_batch(rows)
        self._recover()
        self._incoming = input_ids
        if self.columns or not (self.config.evicts or self.config.quantizes) or input_ids is None:
            return
        mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        if mask is not None:
            mask = mask[:, -input_ids.shape[1] :]
        self.identities.declare(input_ids, mask, whole=False)
        if not self.config.evicts:
            return
        longest = input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())
        longest = max([longest, *(self.identities.prompt_lengths or ())])
        check_protected(self.config, longest, candidates=longest)

    def matches_history(self, input_ids: Tensor) -> bool:
        """Whether input_ids begins with the tokens that this cache has seen (True where that is unknown)."""
        return self.identities.matches(input_ids, self.columns)

    def _check_batch(self, rows: int) -> None:
        if self.rows and rows != len(self.rows):
            raise CacheError(
                f"batch: this cache holds {len(self.rows)} sequences, the call has {rows}; use one cache per batch"
            )

    def _recover(self) -> None:
        """After a call that failed half way: take back what a decode step wrote, or refuse to go on."""
        plan = self._plan
        if plan is None:
            return
        events = any(group.event for group in plan.groups)
        if not plan.decode or events or self.pipeline.needs_mass or self.own_layers():
            raise CacheError(
                "cache: an earlier call failed half way, so layers disagree about what they hold; call reset()"
            )
        for store in self.stores:
            for index, row in enumerate(self.rows):
                store.clear(index, [self.layout.next_slot(row)])
        self._plan = None

    # -- one forward pass ----------------------------------------------------------------------------------------

    def attend(self, layer: int, call: LayerCall) -> Tensor:
        """Attend to everything stored and to the new tokens, then store them, then compress.

        Returns:
            (rows, heads, length, dim), what the model's own attention function would return before its transpose.
        """
        if layer == self.compressed[0]:
            self._plan = self._begin(call)
        plan = self._plan
        if plan is None:
            raise CacheError(f"layer {layer} was called before layer {self.compressed[0]}, out of order")
        with torch.no_grad(), torch.inference_mode(False):
            store, local = self._store_of(layer, call.geometry(self._storage))
        with running_by(self.backend, self.kernels):
            out = decode(store, local, plan, call) if plan.decode else chunk(store, local, plan, call, self._keys)
            if layer == self.compressed[-1]:
                self._finish(plan)
        return out

    @property
    def _keys(self) -> list[int]:
        assert self.identities.keys is not None
        return self.identities.keys

    def _begin(self, call: LayerCall) -> StepPlan:
        """Plan a forward pass; the slots it needs exist afterwards."""
        rows, length, mask = call.queries.shape[0], call.queries.shape[2], call.mask
        self._check_batch(rows)
        if mask is not None and mask.dim() == 4 and mask.shape[-1] != length:
            raise CacheError(
                f"attention_mask: shape {tuple(mask.shape)} covers {mask.shape[-1]} columns, but over a compressed "
                f"cache only the {length} new ones can be masked; give a 2-D padding mask"
            )
        self.identities.settle(rows)
        states = self.rows or [RowState() for _ in range(rows)]
        counts = new_tokens(self._valid(mask, states, rows, length), rows, length)
        if any(row.seen and count < length for row, count in zip(states, counts, strict=True)):
            self.interior_padding = True
        states = with_prompts(states, counts, self.identities.prompt_lengths)
        needed = slots_needed(self.config, states, counts)
        if needed > self.layout.capacity:
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
                "attention_mask: masks a single-token step of a sequence that has begun; pad on the left, before "
                "the prompt"
            )
        self._unread_mask = None

    def _grow(self, states: list[RowState], needed: int) -> list[RowState]:
        """Enlarge the layout to ``needed`` slots; returns the rows as they lie in it."""
        if self.config.evicts:
            return self._relayout(states, self.pipeline.layout(needed - 2 * self.config.buffer, self.config.buffer))
        held = self.layout.capacity
        tokens = needed - 1 if self.config.quantizes else needed
        tokens = max(tokens, held + max(_GROWTH, held // 4) if held else self.reserve or tokens + _GROWTH)
        return self._relayout(states, growing_layout(self.pipeline, tokens))

    def _relayout(self, states: list[RowState], layout: Layout) -> list[RowState]:
        moved = [replace(layout.refilled(row)) for row in states]
        with torch.no_grad(), torch.inference_mode(False):
            for store in self.stores:
                store.relayout(layout, states, moved)
        self.layout = layout
        if self.rows:
            self.rows = moved
        return moved

    def _store_of(self, layer: int, geometry: Geometry) -> tuple[SlotStore, int]:
        """The store of a layer and its place in it; allocates the store of all layers alike at its first layer."""
        for store in self.stores:
            if layer in store.layers:
                if store.geometry != geometry:
                    store = self._split(store, layer, geometry)
                return store, store.layers.index(layer)
        taken = {index for store in self.stores for index in store.layers}
        check_backend(self.backend, geometry.device)
        place = self._placement.get(layer)
        alike = [i for i in self.compressed if i >= layer and i not in taken and self._placement.get(i) == place]
        store = SlotStore(alike, geometry, self.layout, self.pipeline)
        self.stores.append(store)
        return store, 0

    def _split(self, store: SlotStore, layer: int, geometry: Geometry) -> SlotStore:
        """Give layers from ``layer`` on a store of their own, since their shapes differ from those before."""
        if any(row.held for row in self.rows):
            raise CacheError(
                f"layer {layer}: keys and values have changed to {geometry} from {store.geometry} within one cache"
            )
        later = SlotStore(store.layers[store.layers.index(layer) :], geometry, self.layout, self.pipeline)
        store.keep_layers(store.layers.index(layer))
        if not store.layers:
            self.stores.remove(store)
        self.stores.append(later)
        return later

    def _finish(self, plan: StepPlan) -> None:
        """All layers have attended: compress what a decode step filled up, and commit the lengths."""
        if plan.decode and any(group.event for group in plan.groups):
            self._check_unread_mask()
            with torch.no_grad(), torch.inference_mode(False):
                for group in plan.groups:
                    if group.event is None:
                        continue
                    written = [self.layout.appended(row, 1) for row in group.before]
                    keys = [self._keys[row] for row in group.rows]
                    for store in self.stores:
                        run_event(store, group.rows, written, keys, group.event)
        self.rows = plan.after
        self.columns += plan.length
        self.identities.see(self._incoming)
        self._plan = self._incoming = None
        if self.config.evicts and self.layout.capacity > self.config.max_slots:
            self._shrink()

    def _shrink(self) -> None:
        """Return to K + B slots once no deferred prompt needs more."""
        limit = self.config.max_slots
        if all(row.held <= limit and (row.events or row.seen >= row.prompt) for row in self.rows):
            self._relayout(self.rows, self.pipeline.layout(self.config.old_slots, self.config.buffer))

    # -- cache operations ----------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        """Whether a rollback leaves no trace: nothing is evicted or adds up over time, and other layers can crop."""
        lasting = self.config.evicts or self.pipeline.needs_mass
        return not lasting and all(layer.is_croppable for layer in self.own_layers())

    @property
    def is_initialized(self) -> bool:
        return bool(self.rows)

    @property
    def batch_size(self) -> int:
        return len(self.rows) if self.rows else -1

    def own_layers(self) -> list[CacheLayerMixin]:
        """The layers that stay transformers' own, in order."""
        return [layer for layer in self.layers if not isinstance(layer, CompressedLayer)]

    def reset(self) -> None:
        """Forget everything; the next call starts a new batch."""
        self.identities.reset()
        self._forget()
        # New layers, since those of linear attention keep the size of their batch over a reset.
        fresh = DynamicCache(config=self.model_config).layers
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, CompressedLayer):
                if getattr(layer, "record_past", False):
                    fresh[index].activate_past_recording()
                self.layers[index] = fresh[index]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as a negative number, within what has not been compressed.

        Raises:
            CacheError: if a compression has come after the tokens to remove; the cache is left as it was.
        """
        # A tensor, from the assisted generation of transformers 5.17.
        tokens_to_remove = int(tokens_to_remove)
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
                    store.clear(index, self.layout.slots_in_use(row)[-removed:] if removed else [])
                cropped.append(self.layout.cropped(row, removed))
            self.rows = cropped
            self.columns -= count
            self.identities.forget_history()
        for layer in self.own_layers():
            layer.crop(tokens_to_remove)

    def _check_crop(self, count: int) -> None:
        if count > self.columns:
            raise CacheError(f"crop: cannot remove {count} tokens, the cache has seen {self.columns}")
        if self.interior_padding:
            raise CacheError("crop: the batch has padding after its prompts, so rows cannot be rolled back by columns")
        if self.pipeline.needs_mass:
            raise CacheError(
                f"crop: {self.config.name} adds up the attention that tokens receive, and cannot take back what "
                "removed tokens gave"
            )
        own_layers.check_can_roll_back(self.own_layers())
        for index, row in enumerate(self.rows):
            allowed = row.ring if row.events or self.layout.coded else row.held
            if count > allowed and row.seen > allowed:
                raise CacheError(
                    f"crop: cannot remove {count} tokens of sequence {index}: its first {row.seen - row.ring} tokens "
                    f"have been compressed, so at most {allowed} can be removed"
                )
            if self.config.evicts and row.held >= self.config.max_slots and self.pipeline.window:
                raise CacheError(
                    f"crop: sequence {index} holds a deferred prompt whose last queries are needed; "
                    "set prefill: compress"
                )

    def _map_rows(self, index: Tensor) -> None:
        if not self.rows:
            return
        chosen = index.nonzero().flatten() if index.dtype == torch.bool else index
        picked = [int(i) for i in chosen.tolist()]
        with torch.no_grad(), torch.inference_mode(False):
            for store in self.stores:
                store.map_rows(chosen)
            self.identities.map_rows(picked)
        self.rows = [self.rows[i] for i in picked]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i of the batch becomes what row beam_idx[i] was; beams of one parent share its random numbers."""
        self._map_rows(beam_idx)
        for layer in self.own_layers():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch."""
        own_layers.check_can(self.own_layers(), "batch_select_indices")
        self._map_rows(indices)
        for layer in self.own_layers():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the copies get random numbers of their own."""
        own_layers.check_can(self.own_layers(), "batch_repeat_interleave")
        if self.rows:
            device = self.stores[0].geometry.device
            self._map_rows(torch.arange(len(self.rows), device=device).repeat_interleave(repeats))
            self.identities.renumber()
        for layer in self.own_layers():
            layer.batch_repeat_interleave(repeats)

    def to(self, device: torch.device | str) -> CompressedCache:
        """Move everything held to a device; returns self."""
        target = torch.device(device)
        for store in self.stores:
            store.to(target)
        self.identities.to(target)
        for layer in self.own_layers():
            own_layers.map_tensors(layer, lambda tensor: tensor.to(target))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything held, as plain data that ``torch.save`` and ``torch.load(weights_only=True)`` take."""
        return saving.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, on the device its tensors are on.

        Raises:
            CacheError: if it comes from another recipe or another model.
        """
        saving.load_state(self, state)

    # -- what it holds -------------------------------------------------------------------------------------------

    def until_event(self) -> int | None:
        """Tokens that can still come in before the next event, that one included; None if there is none to come.

        So many tokens at once give what one at a time gives: nothing is evicted or encoded in between.
        """
        config = self.config
        room = [config.max_slots - row.held for row in self.rows] if config.evicts else []
        if config.quantizes:
            room += [2 * config.buffer - row.ring for row in self.rows]
        return min(room, default=None)

    def stats(self) -> CacheStats:
        """Bytes held and tokens kept now; see :class:`CacheStats`."""
        self._check_unread_mask()
        others = sum(tensor.nbytes for layer in self.own_layers() for tensor in own_layers.tensors_of(layer))
        held = sum(store.nbytes for store in self.stores)
        per_token = sum(len(store.layers) * store.geometry.bytes_per_token for store in self.stores)
        return CacheStats(
            bytes_held=held + others,
            bytes_full=per_token * sum(row.seen for row in self.rows) + others,
            events=[row.events for row in self.rows],
            tokens_seen=[row.seen for row in self.rows],
            tokens_kept=[row.held for row in self.rows],
            precisions=self._precisions(),
            backend=self.kernels.get("decode_attention", "none"),
            kernels=dict(self.kernels),
        )

    def _precisions(self) -> dict[str, list[int]]:
        if not self.stores:
            return {}
        names = [str(self.stores[0].geometry.dtype).removeprefix("torch.")]
        names += [rung.label for rung in self.stores[0].rungs]
        counts: dict[str, list[int]] = {name: [0] * len(self.rows) for name in names}
        for index, row in enumerate(self.rows):
            high, *coded = self.layout.divide(row.old)
            for name, count in zip(names, [high + row.ring, *coded], strict=True):
                counts[name][index] += count
        return counts

    def kept_positions(self, layer: int, row: int = 0) -> Tensor:
        """Positions of the tokens held by one sequence in one layer: (kv_heads, tokens) int64, ascending."""
        for store in self.stores:
            if layer in store.layers:
                return store.held_positions(store.layers.index(layer), row)
        raise CacheError(f"layer {layer}: holds no compressed tokens; compressed layers: {self.compressed}")
