"""Generation end to end: models of real shapes with random weights, under their own cache and under recipes.

A whole run would take hours, so its time is put together from measured steps. Caches that grow are measured at several
lengths, recipes that evict at several lengths while they fill up and then over whole periods of ``buffer`` steps, the
events among them; between two lengths the time of a step is taken to be linear. Caches are filled with random keys and
values, as a random model has them, instead of reading a prompt; every step that is timed is the whole model's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.cache_utils import DynamicCache

import kvcompress
from kvcompress.bench.gpu.timing import Clock, Row, difference, first_line, free, synchronize
from kvcompress.cache import CompressedCache
from kvcompress.forward import LayerCall
from kvcompress.model import cache_keyword

# Largest |a - b| / |b| of logits: attention is rounded to bfloat16 in another order, in every layer.
TOLERANCE = 0.05
OWN = "own"
GROWING = ("full", "int4")
EVICTING = ("vase-attnv", "r-kv", "vase-dkv", "vase-attnv-int4", "vase-dkv-int4")

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        models: fields of a Qwen3 config by name.
        batch: sequences. prompt, total: tokens of a sequence before and after. budget: of recipes that evict.
        contexts: lengths at which growing caches are measured, from ``prompt`` to ``total``.
        filling: lengths at which recipes that evict are, from ``prompt`` on.
        steps: measured at each length, at least. warmup: steps before them.
        fields: of every recipe, replaced.
    """

    models: dict[str, dict[str, Any]]
    batch: int
    prompt: int
    total: int
    budget: int
    contexts: tuple[int, ...]
    filling: tuple[int, ...]
    steps: int = 10
    warmup: int = 4
    fields: dict[str, Any] = field(default_factory=dict)


PLAN = Plan(
    models={
        "Qwen3-4B": _QWEN3
        | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
        | {"tie_word_embeddings": True},
        "Qwen3-14B": _QWEN3
        | {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17408}
        | {"tie_word_embeddings": False},
    },
    batch=16,
    prompt=256,
    total=16384,
    budget=2048,
    contexts=(256, 2048, 4096, 8192, 16384),
    filling=(256, 1024, 2048),
)
TOY = Plan(
    models={
        "toy": {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 128,
            "tie_word_embeddings": True,
        }
    },
    batch=1,
    prompt=8,
    total=32,
    budget=16,
    contexts=(8, 32),
    filling=(8, 16),
    steps=2,
    warmup=1,
    fields={"buffer": 4},
)


class OutOfTimeError(Exception):
    """The clock is over."""


class Step(NamedTuple):
    """Milliseconds of one decode step, and until the call returned; as good as equal, the device waits for Python."""

    ms: float
    host_ms: float
    event: bool


class Session:
    """A model and a cache of its own kind or a compressed one."""

    def __init__(self, model: Any, cache: Any, batch: int) -> None:
        self.model, self.cache, self.batch = model, cache, batch
        self.keyword = cache_keyword(model)
        self.ids = torch.randint(model.config.vocab_size, (batch, 1), device=model.device)

    @torch.no_grad()
    def call(self, ids: Tensor) -> Tensor:
        """(rows, 1, vocabulary) logits after the last token."""
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.keyword: self.cache})
        logits: Tensor = out.logits
        return logits

    @property
    def until_event(self) -> int | None:
        return self.cache.until_event() if isinstance(self.cache, CompressedCache) else None

    def step(self) -> Step:
        event = self.until_event == 1
        synchronize(self.model.device)
        start = time.perf_counter()
        self.call(self.ids)
        returned = time.perf_counter()
        synchronize(self.model.device)
        return Step(1000 * (time.perf_counter() - start), 1000 * (returned - start), event)

    def steps(self, count: int, clock: Clock) -> list[Step]:
        steps = []
        for _ in range(count):
            if clock.is_over:
                raise OutOfTimeError
            steps.append(self.step())
        return steps

    @torch.no_grad()
    def fill(self, tokens: int) -> None:
        """Put so many random tokens into an empty cache, by the way that a prompt takes but for the model's work."""
        config = self.model.config
        like: dict[str, Any] = {"dtype": self.model.dtype, "device": self.model.device}
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if isinstance(self.cache, CompressedCache):
            ids = torch.randint(config.vocab_size, (self.batch, tokens), device=self.model.device)
            self.cache.observe_inputs(ids, None, self.batch)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(self.batch, kv_heads, tokens, dim, **like) for _ in range(2))
            if not isinstance(self.cache, CompressedCache):
                self.cache.update(keys, values, layer)
                continue
            queries = torch.randn(self.batch, heads, 1, dim, **like).expand(-1, -1, tokens, -1)
            call = LayerCall(
                queries=queries, keys=keys, values=values, mask=None, scaling=dim**-0.5, softcap=None, sinks=None,
                dense=functools.partial(_unchanged, queries), project=_unchanged,
            )  # fmt: skip
            self.cache.attend(layer, call)


def _unchanged(out: Tensor) -> Tensor:
    return out


class Timed(NamedTuple):
    """Steps at one length of a cache.

    Attributes:
        context: tokens of a sequence at the end. steps: all of them. buffer: steps from one event to the next.
    """

    context: int
    steps: list[Step]
    buffer: int

    @property
    def plain_ms(self) -> float:
        """Median of the steps without an event."""
        return statistics.median(step.ms for step in self.steps if not step.event)

    @property
    def event_ms(self) -> float | None:
        """What a step with an event takes longer: the median, None if there was none."""
        extra = [step.ms - self.plain_ms for step in self.steps if step.event]
        return statistics.median(extra) if extra else None

    @property
    def ms(self) -> float:
        """Of a step, the events spread over the steps between them."""
        return self.plain_ms + (self.event_ms or 0.0) / self.buffer


def make_model(fields: dict[str, Any], device: torch.device) -> Any:
    """A Qwen3 with random weights in bfloat16, made where it will be."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**fields), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def streamed_bytes(model: Any) -> int:
    """Bytes of the weights that every decode step reads: all but the table of embeddings, unless it is the head too."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    return sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not table)


def attended_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache, slots not in use included, positions and the like left out."""
    if not isinstance(cache, CompressedCache):
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    named = (item for store in cache.stores for item in store.tensors.items())
    return sum(tensor.nbytes for name, tensor in named if {"keys", "values"} & set(name.split(".")))


def integrate(points: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Integral from start to stop of the piecewise linear function through (x, y), constant beyond the outermost."""

    def value(x: float) -> float:
        if x <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if left <= x <= right:
                return low + (high - low) * (x - left) / (right - left) if right > left else high
        return points[-1][1]

    cuts = [start, *(x for x, _ in points if start < x < stop), stop]
    return sum((b - a) * (value(a) + value(b)) / 2 for a, b in pairwise(cuts))


# -- one model ---------------------------------------------------------------------------------------------------


def measure_all(device: torch.device, clock: Clock, copy: float | None, plan: Plan) -> Iterator[Row]:
    """One row per model and cache.

    Args:
        copy: bytes per second of a copy, for the floor of a step; None leaves it out.
    """
    names = (OWN, GROWING[0], EVICTING[0], GROWING[1], *EVICTING[1:])
    for name, fields in plan.models.items():
        # What is left goes to the models in equal parts.
        models = list(plan.models)
        part = clock.share(1 / (len(models) - models.index(name)))
        model = None
        try:
            if part.is_over:
                raise OutOfTimeError
            model = make_model(fields, device)
            failure = gate(model, plan)
            if failure is None:
                for recipe in names:
                    yield {"model": name, "cache": recipe, **_row(model, recipe, part, copy, plan)}
                    free(device)
        except torch.OutOfMemoryError as error:
            failure = {"skipped": f"the model does not fit: {first_line(error)}"}
        except OutOfTimeError:
            failure = {"skipped": "no time left"}
        except Exception as error:
            failure = {"failed": first_line(error)}
        if failure is not None:
            yield from ({"model": name, "cache": recipe, **failure} for recipe in names)
        model = None
        free(device)


def gate(model: Any, plan: Plan) -> Row | None:
    """Why nothing should be timed: the full cache gives other logits than the model's own, or not by its kernel."""
    ids = torch.randint(model.config.vocab_size, (plan.batch, plan.prompt + 1), device=model.device)
    logits = []
    for recipe in (OWN, "full"):
        with _compressed(model, recipe, plan) as handle:
            session = Session(model, _new_cache(model, handle), plan.batch)
            session.call(ids[:, :-1])
            logits.append(session.call(ids[:, -1:]))
            ran = session.cache.stats().backend if handle else None
    error = difference(logits[1], logits[0])
    if not error <= TOLERANCE:
        return {"failed": f"logits of the full cache differ by {error:.2g}, more than {TOLERANCE:g}: not timed"}
    return None if ran == "triton" else {"failed": f"attention ran by {ran}, not by its kernel: not timed"}


def _compressed(model: Any, recipe: str, plan: Plan) -> Any:
    if recipe == OWN:
        return nullcontext()
    fields = dict(plan.fields)
    if recipe in EVICTING:
        fields["budget"] = plan.budget
    # Room for all steps that are measured at the last length.
    room = plan.total + 64
    return kvcompress.apply(model, recipe, context_length=room, backend="triton", **fields)


def _new_cache(model: Any, handle: Any) -> Any:
    return handle.new_cache() if handle else DynamicCache(config=model.config)


def _row(model: Any, recipe: str, clock: Clock, copy: float | None, plan: Plan) -> Row:
    """One cache: measured, put together, or why not."""
    row: Row = {"batch": plan.batch, "prompt": plan.prompt, "total": plan.total}
    measured: list[Timed] = []
    held: Row = {}
    try:
        if clock.is_over:
            raise OutOfTimeError
        with _compressed(model, recipe, plan) as handle:
            if recipe in EVICTING:
                row |= {"budget": plan.budget, "buffer": handle.config.buffer}
            held = _measure(model, handle, measured, clock, plan)
    except torch.OutOfMemoryError as error:
        row["skipped"] = f"does not fit: {first_line(error)}"
    except OutOfTimeError:
        row["skipped"] = "no time left"
    except Exception as error:
        row["failed"] = first_line(error)
    row["points"] = [
        {"context": point.context, "steps": len(point.steps), "ms": point.ms, "event_ms": point.event_ms}
        | {"host_ms": statistics.median(step.host_ms for step in point.steps)}
        for point in measured
    ]
    if "skipped" in row or "failed" in row:
        return row
    row |= held
    if held["attention"] not in (None, "triton"):
        return row | {"failed": f"attention ran by {held['attention']}, not by its kernel"}
    return row | _put_together(measured, model, copy, held["attended_bytes"], plan)


def _measure(model: Any, handle: Any, measured: list[Timed], clock: Clock, plan: Plan) -> Row:
    """Fill ``measured``, and say what the cache holds in the end."""
    evicts = handle is not None and handle.config.evicts
    if handle is not None and handle.config.quantizes:
        # The first event compiles what it needs, and there may be but one to measure at each length.
        session = Session(model, _new_cache(model, handle), plan.batch)
        session.fill(plan.prompt - plan.warmup - plan.steps // 2)
        session.steps(session.until_event or 0, clock)
    for context in plan.filling if evicts else plan.contexts:
        session = Session(model, _new_cache(model, handle), plan.batch)
        measured.append(_at(session, handle, context, clock, plan))
        if not evicts and context == plan.contexts[-1]:
            return _held(session)
        del session
        free(model.device)
    session = Session(model, _new_cache(model, handle), plan.batch)
    measured.append(_steady(session, handle, clock))
    return _held(session)


def _at(session: Session, handle: Any, context: int, clock: Clock, plan: Plan) -> Timed:
    """Steps about a length; where tokens are encoded in blocks, with at least one such block among them."""
    session.fill(context - plan.warmup - plan.steps // 2)
    session.steps(plan.warmup, clock)
    quantizes = handle is not None and handle.config.quantizes
    count = max(plan.steps, session.until_event or 0) if quantizes else plan.steps
    _reset_peak(session.model.device)
    steps = session.steps(count, clock)
    return Timed(context, steps, handle.config.buffer if handle else 1)


def _steady(session: Session, handle: Any, clock: Clock) -> Timed:
    """Two whole periods at the full budget, after two events that compile what they need."""
    config, cache = handle.config, session.cache
    session.fill(config.max_slots - 2)
    while min(row.events for row in cache.rows) < 2:
        session.steps(1, clock)
    _reset_peak(session.model.device)
    steps = session.steps(2 * config.buffer, clock)
    assert sum(step.event for step in steps) == 2, "two periods must have two events"
    return Timed(config.max_slots, steps, config.buffer)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _held(session: Session) -> Row:
    """Bytes, and what ran."""
    cache, device = session.cache, session.model.device
    compressed = isinstance(cache, CompressedCache)
    stats = cache.stats() if compressed else None
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "cache_bytes": stats.bytes_held if stats else attended_bytes(cache),
        "attended_bytes": attended_bytes(cache),
        "attention": stats.backend if stats else None,
        "by_torch": sorted(name for name, by in stats.kernels.items() if by == "torch") if stats else [],
    }


def _put_together(measured: list[Timed], model: Any, copy: float | None, attended: int, plan: Plan) -> Row:
    """Time of a whole run, and the share of events in it."""
    last = measured[-1]
    seconds = integrate([(point.context, point.ms) for point in measured], plan.prompt, plan.total) / 1000
    tokens = plan.batch * (plan.total - plan.prompt)
    row: Row = {
        "measured_steps": sum(len(point.steps) for point in measured),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "end_ms": last.ms,
        "end_host_ms": statistics.median(step.host_ms for step in last.steps if not step.event),
    }
    if copy is not None:
        row["floor_ms"] = (streamed_bytes(model) + attended) / copy * 1000
    if last.event_ms is not None:
        row |= {
            "event_ms": last.event_ms,
            "event_ms_per_layer": last.event_ms / model.config.num_hidden_layers,
            "event_us_per_token": 1000 * last.event_ms / (last.buffer * plan.batch),
            "event_share": last.event_ms / (last.event_ms + last.buffer * last.plain_ms),
        }
    return row
