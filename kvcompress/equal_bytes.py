"""Give every recipe the setting at which its cache takes the same bytes, so that methods and not sizes are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcompress.config import CompressionConfig
from kvcompress.errors import ConfigError
from kvcompress.footprint import cache_bytes
from kvcompress.quant.allocation import EVICTED, lognormal_sensitivities, rung_error
from kvcompress.quant.ladder import Ladder
from kvcompress.quant.quantize import Quantize
from kvcompress.shapes import LayerShape

# Shares and mean bits are solved to this fraction.
_RESOLUTION = 1000
# What a ladder that may choose both is tried with.
_MEAN_BITS = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 10.0)


@dataclass(frozen=True)
class Solved:
    """A recipe at the bytes it was asked to take.

    Attributes:
        config: with what was chosen filled in. chosen: what that is, for people, such as ``budget 412``.
        bytes_held: what its compressed layers hold per sequence at the end of the context.
    """

    config: CompressionConfig
    chosen: str
    bytes_held: int


@dataclass(frozen=True)
class Equalized:
    """Recipes at equal bytes.

    Attributes:
        target: bytes per sequence. solved: recipes that reach it; the full cache is among them as it is.
        left_out: one sentence per recipe that takes more whatever its setting.
    """

    target: int
    solved: list[Solved]
    left_out: list[str]


def equalize(
    configs: Sequence[CompressionConfig],
    shapes: Sequence[LayerShape],
    tokens: int,
    target: int | float | str,
    dtype: str,
) -> Equalized:
    """Solve every recipe for the same bytes.

    Args:
        target: bytes per sequence, a ratio between 0 and 1 of the full cache's bytes, or the name of one of the
            recipes, whose bytes the others then take. Other arguments as in :func:`solve_for_bytes`.

    Raises:
        ConfigError: if the target is no such thing, or no recipe reaches it.
    """
    by_name = {config.name: config for config in configs}
    if isinstance(target, str):
        if target not in by_name:
            raise ConfigError(
                f"equal bytes: {target!r} is no size (8MiB), no ratio (0.25) and none of the recipes "
                f"{', '.join(by_name)}"
            )
        size = cache_bytes(by_name[target], shapes, tokens, dtype=dtype)
    elif isinstance(target, float):
        if not 0 < target < 1:
            raise ConfigError(
                f"equal bytes: {target} is no ratio of the full cache; use one between 0 and 1, or a size"
            )
        size = int(target * cache_bytes(CompressionConfig(), shapes, tokens, dtype=dtype))
    else:
        size = target
    solved: list[Solved] = []
    left_out: list[str] = []
    for config in configs:
        if not config.stages:
            solved.append(Solved(config, "full", cache_bytes(config, shapes, tokens, dtype=dtype)))
            continue
        try:
            solved.append(solve_for_bytes(config, shapes, tokens, size, dtype))
        except ConfigError as error:
            left_out.append(str(error))
    if all(not entry.config.stages for entry in solved):
        raise ConfigError(f"equal bytes: no recipe reaches {size} bytes per sequence; {'; '.join(left_out)}")
    return Equalized(size, solved, left_out)


def solve_for_bytes(
    config: CompressionConfig, shapes: Sequence[LayerShape], tokens: int, target: int, dtype: str
) -> Solved:
    """The most generous setting of a recipe whose cache takes no more than ``target`` bytes per sequence.

    A recipe that evicts gets its budget, one that only quantizes the share of tokens in full precision, a ladder with
    ``mean_bits`` its bits (and, if it evicts, the pair of bits and budget of least predicted error). A recipe without
    any such setting stays as it is.

    Args:
        shapes: of the compressed layers. tokens: per sequence at the end. dtype: of the model, such as ``bfloat16``.

    Raises:
        ConfigError: if the recipe takes more than ``target`` whatever its setting; names the least it takes.
    """

    def size(candidate: CompressionConfig) -> int:
        return cache_bytes(candidate, shapes, tokens, dtype=dtype)

    ladder = next((stage for stage in config.stages if isinstance(stage, Ladder) and stage.mean_bits), None)
    if config.evicts and ladder is not None:
        return _ladder_and_budget(config, ladder, tokens, target, size)
    quantize = next((stage for stage in config.stages if isinstance(stage, Quantize)), None)
    if config.evicts:
        solved = _with_budget(config, tokens, target, size)
        if quantize is None or solved.config.budget != tokens:
            return solved
        # All tokens fit in codes, and some bytes are left.
        wider = _largest(solved.config, "quantize.share", _RESOLUTION - 1, target, size)
        return Solved(wider.config, f"{solved.chosen}, {wider.chosen}", wider.bytes_held)
    if ladder is not None:
        return _largest(config, "ladder.mean_bits", 16 * _RESOLUTION - 1, target, size)
    if quantize is not None and all(codec.block_tokens == 1 for codec in quantize.rungs[0]):
        return _largest(config, "quantize.share", _RESOLUTION - 1, target, size)
    if size(config) > target:
        raise _too_large(config, size(config), target)
    return Solved(config, "nothing to choose", size(config))


def _with_budget(
    config: CompressionConfig, tokens: int, target: int, size: Callable[[CompressionConfig], int]
) -> Solved:
    low = _bisect(2, tokens, lambda budget: _fits(config, {"budget": budget}, target, size))
    if low is None:
        least = _bisect(2, tokens, lambda budget: not _possible(config, {"budget": budget})) or 1
        raise _too_large(config, size(config.with_fields({"budget": least + 1})), target)
    solved = config.with_fields({"budget": low})
    return Solved(solved, f"budget {low}" + (" (the whole context)" if low == tokens else ""), size(solved))


def _largest(
    config: CompressionConfig, field: str, steps: int, target: int, size: Callable[[CompressionConfig], int]
) -> Solved:
    """Solve for a field in thousandths."""
    low = _bisect(0, steps, lambda step: _fits(config, {field: step / _RESOLUTION}, target, size))
    if low is None:
        least = _bisect(0, steps, lambda step: not _possible(config, {field: step / _RESOLUTION}))
        first = 0 if least is None else least + 1
        raise _too_large(config, size(config.with_fields({field: first / _RESOLUTION})), target)
    solved = config.with_fields({field: low / _RESOLUTION})
    return Solved(solved, f"{field.rpartition('.')[2].replace('_', ' ')} {low / _RESOLUTION:g}", size(solved))


def _ladder_and_budget(
    config: CompressionConfig, ladder: Ladder, tokens: int, target: int, size: Callable[[CompressionConfig], int]
) -> Solved:
    """Of pairs that take the same bytes, the one of least predicted error (:mod:`kvcompress.quant.allocation`)."""
    found: list[tuple[float, Solved]] = []
    failure: ConfigError | None = None
    for mean_bits in _MEAN_BITS:
        if not _possible(config, {"ladder.mean_bits": mean_bits}):
            continue
        try:
            solved = _with_budget(config.with_fields({"ladder.mean_bits": mean_bits}), tokens, target, size)
        except ConfigError as error:
            failure = failure or error
            continue
        chosen = f"mean bits {mean_bits:g}, {solved.chosen}"
        found.append((_predicted_error(solved.config, tokens), Solved(solved.config, chosen, solved.bytes_held)))
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=lambda pair: pair[0])[1]


def _predicted_error(config: CompressionConfig, tokens: int) -> float:
    """Error of attention if the tokens of largest sensitivity climb highest and the smallest are evicted."""
    (ladder,) = config.of_role(Ladder)
    counts = ladder.divide(config.old_slots, None)
    sensitivities = lognormal_sensitivities(max(tokens - config.buffer, sum(counts)), ladder.spread)
    ordered = sensitivities.sort(descending=True).values
    error, start = 0.0, 0
    for count, bits in zip(counts, (16, *ladder.bits), strict=True):
        error += float(ordered[start : start + count].sum()) * rung_error(bits)
        start += count
    return error + float(ordered[start:].sum()) * EVICTED


def _possible(config: CompressionConfig, fields: dict[str, float]) -> bool:
    try:
        config.with_fields(fields)
    except ConfigError:
        return False
    return True


def _fits(
    config: CompressionConfig, fields: dict[str, float], target: int, size: Callable[[CompressionConfig], int]
) -> bool | None:
    """Whether the recipe takes no more than the target; None where the setting is impossible (too small)."""
    return size(config.with_fields(fields)) <= target if _possible(config, fields) else None


def _bisect(low: int, high: int, holds: Callable[[int], bool | None]) -> int | None:
    """Largest number at which ``holds`` is true, where it is None (too small), then True, then False."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        verdict = holds(middle)
        if verdict is True:
            best = middle
        if verdict is False:
            high = middle - 1
        else:
            low = middle + 1
    return best


def _too_large(config: CompressionConfig, least: int, target: int) -> ConfigError:
    return ConfigError(
        f"{config.name}: takes at least {least} bytes per sequence at this context, more than the {target} asked for; "
        "allow more bytes or leave it out"
    )
