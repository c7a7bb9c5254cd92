"""The documentation keeps up with the code: all stages and recipes are in it, links lead somewhere, its code runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import kvcompress
from kvcompress.stages import registered_stages

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], key=str)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_stage_is_in_the_concepts():
    text = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    assert [name for name in registered_stages() if f"`{name}`" not in text] == []


def test_every_recipe_is_listed_with_its_description():
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    for name in kvcompress.recipe_names():
        config = kvcompress.load_config(name)
        stages = " → ".join(stage.stage for stage in config.stages) or "none"
        assert f"| `{name}` | {config.description} | {stages} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_the_stage_of_the_tutorial_runs(tmp_path, monkeypatch):
    stage, use = blocks("docs/writing-a-stage.md", "python")
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "value_diff.py").write_text(stage, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    *lines, last = use.strip().splitlines()
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    expression, expected = last.split("#")
    assert eval(expression, names) == eval(expected)
    sys.modules.pop("my_package", None)


def test_the_overrides_of_the_recipe_page_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-recipe.yaml").write_text(yaml.safe_dump({"stages": []}), encoding="utf-8")
    (code,) = blocks("docs/recipes.md", "python")
    configs = [eval(line, {"kvcompress": kvcompress}) for line in code.strip().splitlines()]
    assert [config.budget for config in configs] == [512, 1024, None, 256]


def test_the_error_on_the_recipe_page_is_what_is_raised():
    text = " ".join((ROOT / "docs/recipes.md").read_text(encoding="utf-8").split())
    with pytest.raises(kvcompress.ConfigError) as caught:
        kvcompress.load_config("vase-attnv", budget=64)
    assert f"ConfigError: {caught.value}" in text
