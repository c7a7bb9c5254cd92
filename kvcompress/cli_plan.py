"""``kvcompress plan``: what fits into a memory, from the config of a model or from shapes alone."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from kvcompress.cli_recipes import AsJson, print_json
from kvcompress.errors import KVCompressError
from kvcompress.quantities import BYTES, COUNTS, TOKENS, parse_quantity
from kvcompress.stages import StoreStage

if TYPE_CHECKING:
    from kvcompress.plan import ModelSize, Plan, RecipePlan

DEFAULT_RECIPES = "full,int8,int4,vase-attnv,vase-attnv-int4"
Tokens = Annotated[
    str | None,
    typer.Option("--context", help="Tokens per sequence: 16384 or 16K (K is 1024); by default the model's most."),
]
Memory = Annotated[str | None, typer.Option(help="Of the device: 80GB (10^9 bytes) or 24GiB (2^30 bytes); G is GB.")]
Reserve = Annotated[str | None, typer.Option(help="Kept free for activations: 4GiB, or a share; by default 10%.")]
Recipes = Annotated[
    list[str] | None, typer.Option("--recipes", "-r", help=f"Names or YAML files, by default {DEFAULT_RECIPES}.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipes that have it, e.g. budget=2048."),
]
WeightBits = Annotated[float | None, typer.Option(help="Bits per parameter of quantized weights, scales included.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; by default the config's.")]


def plan(
    command: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Hub id or local folder; only its config is read.")] = None,
    context: Tokens = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    memory: Memory = None,
    reserve: Reserve = None,
    recipes: Recipes = None,
    settings: Settings = None,
    dtype: Dtype = None,
    weight_bits: WeightBits = None,
    layers: Annotated[int | None, typer.Option(help="Without a model: attention layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Without a model: query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Without a model: KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Without a model: size of a head.")] = None,
    parameters: Annotated[str | None, typer.Option(help="Without a model: how many, as 4B or 135M.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what fits into a memory: exact bytes of weights and cache, the largest batch, budget and context."""
    from kvcompress import console
    from kvcompress.compare import comparison_configs
    from kvcompress.models import DTYPES
    from kvcompress.plan import MAX_CONTEXT, PlanRequest
    from kvcompress.plan import plan as run

    if batch < 1:
        raise KVCompressError(f"--batch: {batch} must be at least 1")
    if weight_bits is not None and not 0 < weight_bits <= 64:
        raise KVCompressError(f"--weight-bits: {weight_bits:g} must be above 0 and at most 64")
    total = None if memory is None else parse_quantity("--memory", memory, BYTES, "80GB, 24GiB or a number of bytes")
    kept = _reserved(reserve, total)
    length = None if context is None else parse_quantity("--context", context, TOKENS, "16384 or 16K", most=MAX_CONTEXT)
    if dtype is not None and dtype not in DTYPES:
        raise KVCompressError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    kind = None if dtype is None else str(DTYPES[dtype]).removeprefix("torch.")
    names = [name.strip() for part in recipes or [DEFAULT_RECIPES] for name in part.split(",")]
    configs = comparison_configs(names, overrides=console.parse_overrides(settings or []))
    shapes = {"--layers": layers, "--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is None:
        size = _from_shapes(shapes, parameters, kind or "bfloat16")
    else:
        if told := [option for option, value in {**shapes, "--parameters": parameters}.items() if value is not None]:
            raise KVCompressError(f"{told[0]}: comes from the config of model {model!r}; leave out one of the two")
        size = _from_model(model, kind)
    length = length or size.max_context
    if length is None:
        raise KVCompressError("--context: missing; give tokens per sequence, such as 16K")
    request = PlanRequest(length, batch, total, kept, None if weight_bits is None else Fraction(str(weight_bits)))
    result = run(size, configs, request)
    if as_json:
        print_json({**_document(result), "command": command.obj})
        return
    screen = console.screen()
    screen.print(_headline(result), soft_wrap=True)
    screen.print(_table(result))
    for note in _notes(result):
        screen.print(note, style="dim")


def _reserved(text: str | None, memory: int | None) -> int:
    if memory is None:
        if text is not None:
            raise KVCompressError(f"--reserve: {text!r} has no effect without --memory")
        return 0
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text or "10%")
    if share is not None and Fraction(share[1]) < 100:
        return int(memory * Fraction(share[1]) / 100)
    return parse_quantity("--reserve", text or "", BYTES, "4GiB, or a share of the memory below 100%", least=0)


def _from_shapes(shapes: Mapping[str, int | None], parameters: str | None, dtype: str) -> ModelSize:
    from kvcompress.plan import ModelSize
    from kvcompress.shapes import LayerShape

    given = {option: value for option, value in shapes.items() if value is not None}
    if not given:
        raise KVCompressError(f"model: none given; give a hub id, a local folder, or shapes ({', '.join(shapes)})")
    for option in shapes:
        if given.get(option, 0) < 1:
            told = f"{given[option]} must be at least 1" if option in given else "missing"
            raise KVCompressError(f"{option}: {told}; without a model give {', '.join(shapes)}")
    layers, heads, kv_heads, dim = given.values()
    if heads % kv_heads:
        raise KVCompressError(f"--heads: {heads} must be a multiple of the {kv_heads} KV heads")
    count = None if parameters is None else parse_quantity("--parameters", parameters, COUNTS, "4B, 135M or 0", 0)
    alike = tuple(LayerShape(layer, heads, kv_heads, dim, dim) for layer in range(layers))
    return ModelSize(f"{layers} layers x {kv_heads} KV heads x {dim}", dtype, alike, parameters=count)


def _from_model(name: str, dtype: str | None) -> ModelSize:
    import transformers

    from kvcompress.plan import measure

    # Remarks on slow kernels and the like are of no use where nothing is computed.
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\..*")
    folder = Path(name).expanduser()
    allowed = "give a hub id (org/name), a local folder with a config.json, or shapes (--layers and so on)"
    local = folder.exists()
    if local and not (folder / "config.json").is_file():
        raise KVCompressError(f"model: {name!r} holds no config.json; {allowed}")
    trouble = None if local else _hub_trouble(name)
    try:
        # What was downloaded before will do; and transformers would ask an absent hub for half a minute.
        config = transformers.AutoConfig.from_pretrained(
            str(folder) if local else name, local_files_only=local or trouble is not None, trust_remote_code=False
        )
    except Exception as error:  # transformers and the hub's client each have their own
        reason = trouble or _first_line(error)
        if local:
            raise KVCompressError(f"model: the config of {name} cannot be read: {reason}") from error
        told = f"{name!r} is no local folder and cannot be had from the hub ({reason})"
        raise KVCompressError(f"model: {told}; {allowed}") from error
    return measure(config, name, dtype)


def _hub_trouble(name: str) -> str | None:
    """Why the hub doesn't answer, or None if it does; asked once, without retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # no network, or not even a name
        # Where the hub does answer, transformers finds better words for it.
        return None if isinstance(error, HfHubHTTPError) and error.response.status_code < 500 else _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _bytes(size: float) -> str:
    from kvcompress.report import format_bytes

    return format_bytes(size)


def _headline(result: Plan) -> str:
    model, request = result.model, result.request
    parts = [f"{model.name} in {model.dtype}"]
    if result.weight_bytes is not None and model.parameters is not None:
        bits = "" if request.weight_bits is None else f" at {float(request.weight_bits):g} bits"
        count = f"{model.parameters / 1e9:.4g}B" if model.parameters >= 1e9 else f"{model.parameters / 1e6:.4g}M"
        parts.append(f"{count} parameters{bits} = {_bytes(result.weight_bytes)}")
    parts.append(f"batch {request.batch:,} x {request.context:,} tokens")
    if request.memory is not None and result.available is not None:
        parts.append(
            f"memory {_bytes(request.memory)} ({request.memory / 10**9:.4g} GB) - reserve "
            f"{_bytes(request.reserve)} - weights = {_bytes(result.available)} for the cache"
        )
    return "; ".join(parts)


def _table(result: Plan) -> Table:
    limited = result.available is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True)
    table.add_column("keeps", overflow="fold")
    weighed = "with\nweights" if result.weight_bytes is not None else "whole\nbatch"
    largest = ("fits", "largest\nbatch", "largest K\nor tokens") if limited else ()
    for heading in ("per\ntoken", "per\nsequence", "ratio", weighed, *largest):
        table.add_column(heading, justify="right", no_wrap=True)
    for recipe in (result.reference, *result.recipes):
        total = recipe.cache_bytes if recipe.total_bytes is None else recipe.total_bytes
        sizes = [_bytes(recipe.bytes_per_token), _bytes(recipe.bytes_per_sequence)]
        cells = [_name(recipe), _keeps(recipe), *sizes, f"{recipe.ratio:.2f}x", _bytes(total)]
        if limited:
            cells += ["yes" if recipe.fits else "no", f"{recipe.largest_batch:,}", _largest(recipe)]
        table.add_row(*cells, style="dim" if recipe.config is None else None, end_section=recipe.config is None)
    return table


def _name(recipe: RecipePlan) -> str:
    return "(transformers)" if recipe.config is None else recipe.config.name


def _keeps(recipe: RecipePlan) -> str:
    """What a recipe keeps, in which precision: ``K 1,024, int4``."""
    if recipe.config is None:
        return "all"
    labels = [rung.label for stage in recipe.config.of_role(StoreStage) for rung in stage.rungs]
    storage = [recipe.config.storage] if recipe.config.storage != "model" else []
    kept = [f"K {recipe.config.budget:,}"] if recipe.config.evicts else []
    return ", ".join([*kept, *storage, *labels]) or "all"


def _largest(recipe: RecipePlan) -> str:
    if recipe.config is None or not recipe.config.evicts:
        return f"{recipe.largest_context:,}"
    return "none" if recipe.largest_budget is None else f"K {recipe.largest_budget:,}{'+' if recipe.keeps_all else ''}"


def _notes(result: Plan) -> list[str]:
    model, context = result.model, result.request.context
    notes = [
        "Exact bytes of what kvcompress.apply(model, recipe, context_length=...) holds at that context; what evicts "
        "takes them from the first token on. ratio: transformers' cache / this one. 1 GB = 10^9, 1 GiB = 2^30 bytes."
    ]
    if any(recipe.keeps_all for recipe in result.recipes):
        notes.append("+: more would fit, but evict nothing within the context.")
    if model.windows:
        windows = " or ".join(f"{window:,}" for window in sorted({layer.window for layer in model.windows}))
        notes.append(f"Layers that keep a window of {windows} tokens under any recipe: {len(model.windows)}, counted.")
    if model.state_bytes:
        notes.append(f"Linear-attention states, {_bytes(model.state_bytes)} per sequence, are counted.")
    if model.max_context is not None and context > model.max_context:
        notes.append(f"The context goes past the {model.max_context:,} tokens of the model.")
    configs = [recipe.config for recipe in result.recipes if recipe.config is not None and recipe.config.evicts]
    if names := ", ".join(config.name for config in configs if config.max_slots > context):
        notes.append(f"{names}: K + B is more than the context, so nothing is evicted; lower the budget.")
    if names := ", ".join(config.name for config in configs if config.prefill == "defer"):
        notes.append(f"{names}: a deferred prompt is held whole at first, which is not counted.")
    return [*notes, *model.notes]


def _document(result: Plan) -> dict[str, Any]:
    model, request = result.model, result.request

    def row(recipe: RecipePlan) -> dict[str, Any]:
        config = None if recipe.config is None else recipe.config.model_dump(mode="json")
        return {"recipe": _name(recipe), **asdict(replace(recipe, config=None)), "config": config}

    bits = None if request.weight_bits is None else float(request.weight_bits)
    limits = {"bytes": request.memory, "reserve_bytes": request.reserve, "available_bytes": result.available}
    return {
        "model": {"name": model.name, "dtype": model.dtype, "parameters": model.parameters},
        "weights": {"bits": bits, "bytes": result.weight_bytes},
        "layers": {"compressed": len(model.shapes), "window": len(model.windows)},
        "request": {"context": request.context, "batch": request.batch},
        "memory": None if request.memory is None else limits,
        "transformers": row(result.reference),
        "recipes": [row(recipe) for recipe in result.recipes],
        "notes": _notes(result),
    }
