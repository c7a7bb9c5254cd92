"""The command line. Results go to standard output, everything else to standard error; bad input is exit status 2."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcompress.cli_demo import demo
from kvcompress.cli_eval import evaluate
from kvcompress.cli_models import load_for_command
from kvcompress.cli_plan import plan
from kvcompress.cli_recipes import BAD_INPUT, AsJson, print_json, recipes_app
from kvcompress.cli_report import report
from kvcompress.cli_reproduce import reproduce
from kvcompress.config import load_config
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.quantities import BYTES, parse_quantity

INTERRUPTED = 130
# typer has its own copy of click in newer releases; either way this is the base of all usage errors.
_UsageError: Any = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """Ends every command with one line and an exit status instead of a traceback or a usage page."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        arguments = list(sys.argv[1:] if args is None else args)
        extra |= {"standalone_mode": False, "obj": shlex.join(["kvcompress", *arguments])}
        sys.exit(self._status(arguments, prog_name or "kvcompress", **extra))

    def _status(self, arguments: list[str], prog_name: str, **extra: Any) -> int:
        try:
            status = super().main(arguments, prog_name, **extra)
            sys.stdout.flush()
            return status if isinstance(status, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            return INTERRUPTED
        except KVCompressError as error:
            return _complain(str(error))
        except _UsageError as error:
            return _complain(error.format_message() or f"see {prog_name} --help")
        except BrokenPipeError:
            # The reader of our output has left; keep Python from complaining when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141


app = typer.Typer(
    cls=_Commands,
    help="Compress the KV cache of language models: generate, compare recipes, inspect them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(recipes_app, name="recipes")
app.command("plan")(plan)
app.command("demo")(demo)
app.command("eval")(evaluate)
app.command("report")(report)
app.command("reproduce")(reproduce)


def main() -> None:
    """Entry point of the ``kvcompress`` command."""
    app()


def _complain(message: str) -> int:
    print(f"kvcompress: error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_INPUT


Prompt = Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)]
Model = Annotated[str, typer.Option("--model", "-m", help="Hub id, local folder, .gguf file, reasoner or smollm2.")]
File = Annotated[str | None, typer.Option("--file", "-f", help="Read the prompt from this file (- is standard input).")]
System = Annotated[str | None, typer.Option(help="System message for the chat template.")]
NoChat = Annotated[bool, typer.Option("--no-chat", help="Pass the prompt as it is, without the chat template.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipe, e.g. value_range.share=0.5."),
]
Budget = Annotated[
    str | None, typer.Option(help="Tokens kept per layer and head, or a ratio between 0 and 1 of prompt and answer.")
]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to generate at most.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float16, bfloat16 or auto; float32 on a CPU, else the model's own by default."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; the first GPU if there is one.")]
BackendName = Annotated[
    str, typer.Option("--backend", help="auto, triton, flash_attn or torch: what runs attention and compression.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling and of the recipe's random stages.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        import kvcompress

        print(f"kvcompress {kvcompress.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    context: typer.Context,
    prompt: Prompt = None,
    model: Model = "smollm2",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipe name or YAML file.")] = "vase-attnv",
    settings: Settings = None,
    budget: Budget = None,
    max_new_tokens: NewTokens = 512,
    file: File = None,
    system: System = None,
    no_chat: NoChat = False,
    seed: Seed = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; 0 is greedy.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Sample from the likeliest tokens of this mass.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    backend: BackendName = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer a prompt with a compressed KV cache."""
    from kvcompress import console

    _check_count("--max-new-tokens", max_new_tokens, 1)
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise KVCompressError(f"--temperature: {temperature} must be 0 (greedy) or a positive number")
    if top_p is not None and not 0 < top_p <= 1:
        raise KVCompressError(f"--top-p: {top_p} must be above 0 and at most 1")
    overrides = console.parse_overrides(settings or [])
    for name, value in (("budget", _parse_budget(budget)), ("seed", seed)):
        if value is not None:
            if name in overrides:
                raise ConfigError(f"{name}: given both as --{name} and as --set {name}=...; give one of them")
            overrides[name] = value
    config = load_config(recipe, overrides)
    text = console.read_prompt(prompt, file)

    loaded, tokenizer = load_for_command(model, dtype, device)
    chosen = _parse_backend(backend, loaded.device)
    from kvcompress.environment import versions
    from kvcompress.generation import TimedStreamer
    from kvcompress.generation import generate as run
    from kvcompress.model import apply
    from kvcompress.models import encode_prompt

    encoded = encode_prompt(tokenizer, text, system=system, chat=False if no_chat else None)
    prompt_tokens = encoded["input_ids"].shape[1]
    _warn_length(loaded, prompt_tokens + max_new_tokens)
    streamer = TimedStreamer(tokenizer, visible=not as_json)
    with apply(loaded, config, context_length=prompt_tokens + max_new_tokens, backend=chosen) as handle:
        tokens = run(
            loaded,
            encoded,
            streamer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=config.seed,
        )
        stats = handle.stats()
        resolved = handle.config
    console.screen(stderr=True).print(
        console.stats_line(stats, len(tokens), streamer.tokens_per_second), style="dim", soft_wrap=True
    )
    if as_json:
        print_json(
            {
                "text": tokenizer.decode(tokens, skip_special_tokens=True),
                "tokens": tokens.tolist(),
                "prompt_tokens": prompt_tokens,
                "first_token_seconds": streamer.first_token_seconds,
                "decode_tokens_per_second": streamer.tokens_per_second,
                "cache": stats.as_dict(),
                "config": resolved.model_dump(mode="json"),
                "settings": {
                    "command": context.obj,
                    "model": model,
                    "max_new_tokens": max_new_tokens,
                    "temperature": temperature,
                    "top_p": top_p,
                    "versions": versions(),
                },
            }
        )


@app.command()
def compare(
    context: typer.Context,
    prompt: Prompt = None,
    model: Model = "smollm2",
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Recipe name or YAML file; repeatable.")
    ] = None,
    settings: Settings = None,
    budget: Budget = None,
    buffer: Annotated[int | None, typer.Option(help="Recent tokens that are never evicted.")] = None,
    max_new_tokens: NewTokens = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.")] = False,
    equal_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Same bytes for all: a size (8MiB), a ratio of the full cache (0.25), or a recipe."
        ),
    ] = None,
    file: File = None,
    system: System = None,
    no_chat: NoChat = False,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
    backend: BackendName = "auto",
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Write compare.json and compare.png here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far recipes move a model's predictions from those of the full cache, on one prompt.

    The full cache answers greedily; every recipe is then fed that answer token by token. --budget and --buffer go to
    the recipes that evict, --set stage.field=... to those that have the stage. --equal-bytes chooses budgets and shares
    instead, so that all take the same bytes.
    """
    from kvcompress import console
    from kvcompress.compare import DEFAULT_RECIPES, comparison_configs
    from kvcompress.compare import compare as run

    _check_count("--max-new-tokens", max_new_tokens, 2)
    configs = comparison_configs(
        recipe or DEFAULT_RECIPES,
        budget=_parse_budget(budget),
        buffer=buffer,
        seed=seed,
        overrides=console.parse_overrides(settings or []),
    )
    text = console.read_prompt(prompt, file)
    if output_dir is not None:
        _make_folder(output_dir)

    loaded, tokenizer = load_for_command(model, dtype, device)
    chosen = _parse_backend(backend, loaded.device)
    from kvcompress.models import encode_prompt
    from kvcompress.report import comparison_document, write_figure, write_json

    encoded = encode_prompt(tokenizer, text, system=system, chat=False if no_chat else None)
    _warn_length(loaded, encoded["input_ids"].shape[1] + max_new_tokens)
    with console.comparison_progress() as progress:
        comparison = run(
            loaded,
            encoded["input_ids"],
            configs,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            equal_bytes=_parse_equal_bytes(equal_bytes),
            backend=chosen,
            progress=progress,
        )
    seeds = {config.seed for config in configs}
    settings_used = {
        "command": context.obj,
        "model": model,
        "prompt": text,
        "seed": seeds.pop() if len(seeds) == 1 else None,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
        "equal_bytes": equal_bytes,
        "backend": chosen,
        "batch_size": 1,
    }
    document = comparison_document(comparison, loaded, settings_used)
    if output_dir is not None:
        write_json(output_dir / "compare.json", document)
        write_figure(output_dir / "compare.png", comparison, _title(model, comparison))
    if as_json:
        print_json(document)
    else:
        console.screen().print(console.comparison_table(comparison))
    if output_dir is not None:
        for name in ("compare.json", "compare.png"):
            print(f"wrote {output_dir / name}", file=sys.stderr)


@app.command(
    name="lm-eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def lm_eval(context: typer.Context) -> None:
    """Run EleutherAI's lm-eval on a compressed model; every option is lm-eval's own.

    --model_args pretrained=Qwen/Qwen3-4B,recipe=vase-attnv,budget=4096 --tasks gsm8k,hendrycks_math500
    """
    try:
        from kvcompress.harness import main as run
    except ImportError as error:
        raise KVCompressError(f"lm-eval: {error}; install it with pip install 'kvcompress[eval]'") from error
    run(context.args)


@app.command()
def env() -> None:
    """Print versions, platform and devices, for a bug report."""
    from kvcompress.environment import bug_report

    for name, value in bug_report().items():
        print(f"{name + ':':<15} {value}")


def _warn_length(model: Any, tokens: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        print(
            f"kvcompress: warning: prompt and answer of {tokens:,} tokens go past the {limit:,} of the model",
            file=sys.stderr,
        )


def _parse_budget(budget: str | None) -> int | float | None:
    if budget is None:
        return None
    from kvcompress.console import parse_scalar

    value = parse_scalar("--budget", budget)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise KVCompressError(f"--budget: {budget!r} is not a number of tokens, nor a ratio between 0 and 1")
    return value


def _parse_backend(name: str, device: Any) -> Any:
    from kvcompress.kernels.backend import check_backend

    check_backend(name, device)
    return name


def _parse_equal_bytes(text: str | None) -> int | float | str | None:
    """A size, a ratio of the full cache, or, if it is neither, what may be the name of a recipe."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        return value if value < 1 else int(value)
    return parse_quantity("--equal-bytes", text, BYTES, "8MiB") if text[:1].isdigit() else text


def _check_count(option: str, value: int, least: int) -> None:
    if value < least:
        raise KVCompressError(f"{option}: {value} must be at least {least}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVCompressError(f"--output-dir: {folder} cannot be made: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise KVCompressError(f"--output-dir: {folder} is not writable")


def _title(model: str, comparison: Any) -> str:
    bounded = [result.config for result in comparison.results if result.config.evicts]
    budgets = {config.budget for config in bounded}
    if len(budgets) != 1:
        return f"{Path(model).name}: {len(comparison.results)} recipes"
    return f"{Path(model).name}: {len(bounded)} recipe{'s'[: len(bounded) > 1]} at a budget of {budgets.pop():,} tokens"
