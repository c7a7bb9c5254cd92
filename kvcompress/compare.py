"""Compare recipes on one prompt: how far does each move the model's predictions, for how many bytes?

The full cache writes a continuation greedily, with transformers' own growing cache and attention. Every recipe then
reads the prompt and is fed *those* tokens one by one (teacher forcing), so that all recipes predict the same tokens
from the same text, and one early deviation doesn't decide everything after it.
"""

from __future__ import annotations

import inspect
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompress.config import CompressionConfig, load_config
from kvcompress.equal_bytes import Equalized, equalize
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.kernels.backend import Backend
from kvcompress.shapes import layer_shapes

DEFAULT_RECIPES = ("full", "streaming-llm", "snapkv", "r-kv", "cur-dkv", "vase-attnv", "vase-dkv")
# Log-probabilities of the full cache stay in memory up to this size, and go to a temporary file beyond it.
_IN_MEMORY_BYTES = 2**30

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Reference:
    """What the full cache of transformers did.

    Attributes:
        tokens: (T,) int64 generated tokens, on the CPU.
        prompt_tokens: tokens of the prompt.
        kv_bytes: T - 1 sizes of the cache in bytes, after each decode step.
        tokens_per_second: decode steps per second, the prompt left out.
        ended: whether the model ended its answer before the limit.
    """

    tokens: Tensor
    prompt_tokens: int
    kv_bytes: list[int]
    tokens_per_second: float
    ended: bool


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class RecipeResult:
    """One recipe against the reference.

    Attributes:
        config: the recipe as run, ratio budgets turned into tokens.
        kv_bytes: T - 1 sizes of everything the cache holds, in bytes, after each decode step.
        bytes_full: bytes that the full cache holds at the end.
        kl: T - 1 divergences KL(full || recipe) in nats, one per decode step.
        agrees: T - 1 flags, whether the most likely token is the same.
        mean_kl, agreement: their means with standard errors.
        tokens_per_second: decode steps per second, the prompt left out.
        events: compressions. tokens_kept: tokens held per layer and head at the end.
        backend: the attention path that ran.
    """

    config: CompressionConfig
    kv_bytes: list[int]
    bytes_full: int
    kl: list[float]
    agrees: list[bool]
    mean_kl: Estimate
    agreement: Estimate
    tokens_per_second: float
    events: int
    tokens_kept: int
    backend: str

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def bytes_held(self) -> int:
        """Bytes held at the end."""
        return self.kv_bytes[-1]

    @property
    def bytes_peak(self) -> int:
        """Most bytes held after any step."""
        return max(self.kv_bytes)

    @property
    def ratio(self) -> float:
        """How many times smaller than the full cache at the end."""
        return self.bytes_full / self.bytes_held


@dataclass(frozen=True)
class Comparison:
    """The outcome of :func:`compare`; ``equalized`` says what was chosen where equal bytes were asked for."""

    reference: Reference
    results: list[RecipeResult]
    equalized: Equalized | None = None

    @property
    def steps(self) -> int:
        """Tokens that the means are over: all generated ones but the first, which no compression precedes."""
        return len(self.reference.tokens) - 1

    @property
    def block(self) -> int:
        """Block length of the bootstrap that the standard errors come from."""
        return bootstrap_block(self.steps)


def comparison_configs(
    recipes: Sequence[str],
    *,
    budget: int | float | None = None,
    buffer: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> list[CompressionConfig]:
    """Read the recipes to compare and give those that evict the same budget and buffer.

    Args:
        recipes: names or paths; each at most once.
        budget: for the recipes that evict. buffer: for those that evict or quantize. seed: for all of them.
        overrides: as for :func:`load_config`; ``stage.field`` goes to the recipes that have the stage, ``budget`` and
            ``buffer`` as above, every other field to all.

    Raises:
        ConfigError: for an unknown or repeated recipe, an override that fits none, or an impossible budget.
    """
    given = dict(overrides or {})
    for name, value in (("budget", budget), ("buffer", buffer), ("seed", seed)):
        if value is not None:
            if name in given:
                raise ConfigError(f"{name}: is set twice, to {value} and by an override to {given[name]}")
            given[name] = value
    configs: list[CompressionConfig] = []
    used: set[str] = set()
    for recipe in recipes:
        base = load_config(recipe)
        if base.name in [config.name for config in configs]:
            raise ConfigError(f"recipe: {base.name!r} is given twice; name each recipe once")
        stages = {stage.stage for stage in base.stages}
        fitting = {key: value for key, value in given.items() if _concerns(key, base, stages)}
        used |= fitting.keys()
        configs.append(load_config(recipe, fitting) if fitting else base)
    unused = sorted(given.keys() - used)
    if unused:
        names = ", ".join(config.name for config in configs)
        raise ConfigError(f"override {unused[0]!r}: fits none of the recipes {names}")
    return configs


def _concerns(key: str, config: CompressionConfig, stages: set[str]) -> bool:
    """Whether an override means anything to a recipe."""
    if key == "budget":
        return config.evicts
    if key == "buffer":
        return config.evicts or config.quantizes
    return "." not in key or key.partition(".")[0] in stages


def compare(
    model: Any,
    input_ids: Tensor,
    configs: Sequence[CompressionConfig],
    *,
    max_new_tokens: int,
    ignore_eos: bool = False,
    equal_bytes: int | float | str | None = None,
    backend: Backend = "auto",
    progress: Progress = lambda name, done, total: None,
) -> Comparison:
    """Run the full cache greedily once, then every recipe teacher-forced on its continuation.

    Args:
        model: a causal language model of transformers without a compression in place.
        input_ids: (1, tokens) int64, the prompt.
        configs: recipes; ratio budgets count prompt and new tokens.
        max_new_tokens: at least 2; fewer are generated if the model ends its answer.
        ignore_eos: go on past the end of the answer.
        equal_bytes: choose the settings of every recipe so that all take these bytes per sequence at the end of
            prompt and ``max_new_tokens``: a number, a ratio of the full cache, or the name of one of the recipes.
        backend: what operations run by; see :func:`kvcompress.apply`.
        progress: called with a recipe's name, steps done and steps in all.

    Raises:
        KVCompressError: if a recipe cannot be run on this model or prompt, or the answer has less than two tokens.
    """
    if max_new_tokens < 2:
        raise KVCompressError(
            f"max_new_tokens: {max_new_tokens} must be at least 2, since the first token precedes any compression"
        )
    input_ids = input_ids.to(model.device)
    length = input_ids.shape[1] + max_new_tokens
    resolved = [config.resolve(length) for config in configs]
    equalized: Equalized | None = None
    if equal_bytes is not None:
        dtype = str(model.dtype).removeprefix("torch.")
        equalized = equalize(resolved, layer_shapes(model.config), length, equal_bytes, dtype)
        resolved = [entry.config for entry in equalized.solved]
    vocabulary = _output_size(model)
    with torch.inference_mode(), _row_store(max_new_tokens - 1, vocabulary) as log_probs:
        reference = _record(model, input_ids, max_new_tokens, ignore_eos, log_probs, progress)
        steps = len(reference.tokens) - 1
        if steps < 1:
            raise KVCompressError(
                "max_new_tokens: the model ended its answer after one token, which leaves nothing to compare; "
                "use another prompt, or ignore the end of the answer (--ignore-eos)"
            )
        # At equal bytes, room for the whole context at once: nobody is charged for slots that a later token might need.
        room = None if equalized is None else length
        results = [
            _replay(model, input_ids, config, room, backend, reference.tokens, log_probs, progress)
            for config in resolved
        ]
    return Comparison(reference, results, equalized)


def bootstrap_block(count: int) -> int:
    """Block length for a series of ``count`` values: the cube root, which balances bias and variance."""
    return max(1, round(count ** (1 / 3)))


def block_bootstrap_error(values: Sequence[float], block: int) -> float:
    """Standard error of the mean of a series whose neighbours are correlated.

    It is the standard deviation of the mean under the circular block bootstrap in the limit of infinitely many
    resamples, which has a closed form: a resample averages n / block blocks drawn independently out of all n blocks
    of neighbours (the last ones wrap around).

    Args:
        values: n numbers. block: neighbours that stay together, between 1 and n.
    """
    series = torch.as_tensor(values, dtype=torch.float64)
    block = min(block, len(series))
    wrapped = torch.cat([series, series[: block - 1]])
    deviations = wrapped.unfold(0, block, 1).mean(-1) - series.mean()
    return math.sqrt(float(deviations.square().mean()) * block / len(series))


def _record(
    model: Any, input_ids: Tensor, max_new_tokens: int, ignore_eos: bool, log_probs: Tensor, progress: Progress
) -> Reference:
    """Generate with the growing cache, and write what predicts token t + 1 into row t of ``log_probs``."""
    from transformers import DynamicCache

    name = "transformers"
    cache = DynamicCache(config=model.config)
    ends = set() if ignore_eos else _end_tokens(model)
    runner = _Runner(model, cache)
    tokens = [int(runner.prefill(input_ids).argmax())]
    kv_bytes: list[int] = []
    progress(name, 0, max_new_tokens - 1)
    while len(tokens) < max_new_tokens and tokens[-1] not in ends:
        logits = runner.step(tokens[-1])
        log_probs[len(tokens) - 1] = logits.log_softmax(-1)
        tokens.append(int(logits.argmax()))
        kv_bytes.append(_cache_bytes(cache))
        progress(name, len(tokens) - 1, max_new_tokens - 1)
    return Reference(
        tokens=torch.tensor(tokens),
        prompt_tokens=input_ids.shape[1],
        kv_bytes=kv_bytes,
        tokens_per_second=runner.tokens_per_second,
        ended=tokens[-1] in _end_tokens(model),
    )


def _replay(
    model: Any,
    input_ids: Tensor,
    config: CompressionConfig,
    context_length: int | None,
    backend: Backend,
    tokens: Tensor,
    reference: Tensor,
    progress: Progress,
) -> RecipeResult:
    """Feed the tokens of the reference and compare with its log-probabilities, (T - 1 or more, vocabulary)."""
    from kvcompress.model import apply

    steps = len(tokens) - 1
    kl: list[Tensor] = []
    agrees: list[Tensor] = []
    kv_bytes: list[int] = []
    with apply(model, config, context_length=context_length, backend=backend) as handle:
        cache = handle.new_cache()
        runner = _Runner(model, cache)
        runner.prefill(input_ids)
        progress(config.name, 0, steps)
        for step in range(steps):
            log_probs = runner.step(int(tokens[step])).log_softmax(-1)
            full = reference[step].to(log_probs.device)
            kl.append(_divergence(full, log_probs))
            agrees.append(full.argmax() == log_probs.argmax())
            kv_bytes.append(cache.stats().bytes_held)
            progress(config.name, step + 1, steps)
        stats = cache.stats()
    divergences = torch.stack(kl).double().tolist()
    agreements = torch.stack(agrees).tolist()
    if not all(math.isfinite(value) for value in divergences):
        first = next(step for step, value in enumerate(divergences) if not math.isfinite(value))
        raise KVCompressError(f"recipe {config.name}: the KL divergence at step {first + 1} is {divergences[first]}")
    return RecipeResult(
        config=config,
        kv_bytes=kv_bytes,
        bytes_full=stats.bytes_full,
        kl=divergences,
        agrees=agreements,
        mean_kl=_estimate(divergences),
        agreement=_estimate([float(same) for same in agreements]),
        tokens_per_second=runner.tokens_per_second,
        events=stats.events[0],
        tokens_kept=stats.tokens_kept[0],
        backend=stats.backend,
    )


class _Runner:
    """Feeds one sequence into a model and times the decode steps."""

    def __init__(self, model: Any, cache: Any) -> None:
        from kvcompress.model import cache_keyword

        self.model = model
        self.options = {cache_keyword(model): cache, "use_cache": True}
        self.seconds = 0.0
        self.steps = 0

    def prefill(self, input_ids: Tensor) -> Tensor:
        """(vocabulary,) float32 logits after the prompt."""
        # Logits of a whole prompt can take more memory than its KV cache.
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        return self.model(input_ids=input_ids, **self.options, **last).logits[0, -1].float()

    def step(self, token: int) -> Tensor:
        """(vocabulary,) float32 logits after one more token."""
        input_ids = torch.tensor([[token]], device=self.model.device)
        self._wait()
        start = time.perf_counter()
        logits = self.model(input_ids=input_ids, **self.options).logits[0, -1].float()
        self._wait()
        self.seconds += time.perf_counter() - start
        self.steps += 1
        return logits

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    @property
    def tokens_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


def _divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) of two (vocabulary,) log-probability vectors, in nats."""
    terms = full.exp() * (full - other)
    # Tokens that the model rules out have probability 0 and log-probability -inf, hence 0 * inf. Rounding can leave
    # the sum of equal distributions a hair below 0.
    return torch.where(full == -torch.inf, 0.0, terms).sum().clamp_min(0.0)


def _estimate(values: list[float]) -> Estimate:
    mean = math.fsum(values) / len(values)
    return Estimate(mean, block_bootstrap_error(values, bootstrap_block(len(values))))


@contextmanager
def _row_store(rows: int, columns: int) -> Iterator[Tensor]:
    """(rows, columns) float32 scratch, in memory or, when large, in a temporary file."""
    size = rows * columns * 4
    if size <= _IN_MEMORY_BYTES:
        yield torch.empty(rows, columns)
        return
    with tempfile.TemporaryDirectory(prefix="kvcompress-", ignore_cleanup_errors=True) as folder:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise KVCompressError(
                f"max_new_tokens: the log-probabilities of {rows} tokens take {size / 2**30:.1f} GiB, but only "
                f"{free / 2**30:.1f} GiB are free in {tempfile.gettempdir()} (set TMPDIR to use another folder)"
            )
        path = Path(folder) / "log-probs"
        yield torch.from_file(str(path), shared=True, size=rows * columns, dtype=torch.float32).view(rows, columns)


def _output_size(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size)


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def _cache_bytes(cache: Any) -> int:
    return sum(value.nbytes for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor))
