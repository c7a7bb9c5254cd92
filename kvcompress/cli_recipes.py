"""``kvcompress recipes``: list, show and check recipes."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcompress.config import json_schema, load_config, recipe_names
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.stages import nearest

BAD_INPUT = 2
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
recipes_app = typer.Typer(help="List, show and check recipes.", rich_markup_mode=None)


def print_json(document: Any) -> None:
    """Write a document to standard output."""
    print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with the package."""
    from kvcompress import console

    configs = [load_config(name) for name in recipe_names()]
    if as_json:
        print_json(
            [
                {
                    "name": config.name,
                    "description": config.description,
                    "stages": [{"stage": stage.stage, "role": stage.role} for stage in config.stages],
                    "budget": config.budget,
                    "buffer": config.buffer if config.evicts else None,
                }
                for config in configs
            ]
        )
    else:
        console.screen().print(console.recipes_table(configs))


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="Name of a recipe.")]) -> None:
    """Print a recipe as it comes with the package, to copy and change."""
    if name not in recipe_names():
        raise ConfigError(f"recipe: {name!r} does not come with the package; {nearest(name, recipe_names())}")
    print((files("kvcompress.configs") / f"{name}.yaml").read_text(encoding="utf-8"), end="")


@recipes_app.command("validate")
def validate_recipes(paths: Annotated[list[str], typer.Argument(help="YAML files.", metavar="PATH...")]) -> None:
    """Check recipe files: one line each, exit status 2 if any is bad."""
    from kvcompress import console

    bad = 0
    for path in paths:
        try:
            config = load_config(Path(path))
        except KVCompressError as error:
            bad += 1
            print(f"bad  {path}: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            size = f"budget {config.budget}, buffer {config.buffer}" if config.evicts else "evicts nothing"
            print(f"ok   {path}: {size}, stages {console.stages_in_short(config)}")
    if bad:
        raise typer.Exit(BAD_INPUT)


@recipes_app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of a recipe, for editors and validators."""
    print_json(json_schema())
