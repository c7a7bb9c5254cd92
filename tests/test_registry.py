"""The stage registry: built-in stages, those of third parties, the schema, and what an import costs."""

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal

import pytest
import torch
import yaml

import kvcompress.policies
import kvcompress.quant
from kvcompress import CompressionConfig, json_schema, load_config, recipe_names, select_tokens
from kvcompress.errors import ConfigError
from kvcompress.stages import ENTRY_POINT_GROUP, ScoreStage, Stage, registered_stages

POLICIES = {
    "sinks", "value_range", "prompt", "recent", "random_tokens", "attention", "redundancy", "leverage",
    "accumulated_attention", "last_query", "key_norm", "value_norm", "key_diff", "recency", "random", "top_k",
    "sample",
}  # fmt: skip
STORES = {"quantize", "ladder"}
BUILT_IN = POLICIES | STORES


class Loudest(ScoreStage):
    """What a third party might write: the energy of the value."""

    stage: Literal["loudest"] = "loudest"
    gain: float = 1.0

    def score(self, tokens):
        return tokens.values.float().square().sum(-1) * self.gain


class TakenName(Loudest):
    stage: Literal["attention"] = "attention"


class Unnamed(ScoreStage):
    def score(self, tokens):
        raise NotImplementedError


class AnyName(Loudest):
    stage: str = "any_name"


class Roleless(Stage):
    stage: Literal["roleless"] = "roleless"


class Unfinished(ScoreStage):
    stage: Literal["unfinished"] = "unfinished"


NOT_A_STAGE = 3
SEVERAL = [Loudest, kvcompress.policies.Sinks]


@pytest.fixture
def install(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def pretend(*values):
        points = [EntryPoint("extra", value, ENTRY_POINT_GROUP) for value in values]
        monkeypatch.setattr(
            "kvcompress.stages.entry_points", lambda *, group: points if group == ENTRY_POINT_GROUP else []
        )
        registered_stages.cache_clear()

    yield pretend
    registered_stages.cache_clear()


def test_the_built_in_stages_are_registered_under_their_names():
    found = registered_stages()
    assert set(found) >= BUILT_IN
    for name in BUILT_IN:
        assert found[name].model_fields["stage"].default == name
    # One file per stage, named like it.
    folder = Path(kvcompress.policies.__file__).parent
    assert {path.stem for path in folder.glob("[a-z]*.py")} == POLICIES
    assert {path.stem for path in Path(kvcompress.quant.__file__).parent.glob("*.py")} >= STORES


def test_the_package_declares_its_own_entry_point():
    """Tools that look for stages by the group must find the built-in ones too, and only once."""
    ours = [point.load() for point in entry_points(group=ENTRY_POINT_GROUP) if point.name.startswith("builtin")]
    assert sorted(stage.model_fields["stage"].default for stages in ours for stage in stages) == sorted(BUILT_IN)


@pytest.mark.parametrize("value", [f"{__name__}:Loudest", f"{__name__}:SEVERAL"])
def test_a_third_party_stage_can_be_named_in_recipes(install, value):
    with pytest.raises(ConfigError, match="'loudest' is not a stage"):
        load_config({"budget": 8, "buffer": 2, "stages": ["loudest", "top_k"]})
    install(value)
    config = load_config({"budget": 8, "buffer": 2, "stages": [{"stage": "loudest", "gain": 2}, "top_k"]})
    assert config.stages[0] == Loudest(gain=2)
    assert config == CompressionConfig.model_validate(yaml.safe_load(config.to_yaml()))
    assert "Loudest" in json_schema()["$defs"]
    assert set(registered_stages()) == BUILT_IN | {"loudest"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (f"{__name__}:TakenName", "'attention' of .*TakenName is already taken by kvcompress.policies.attention"),
        (f"{__name__}:Missing", "extra = .*Missing of group kvcompress.stages cannot be loaded"),
        ("no_such_module_anywhere:STAGES", "cannot be loaded: No module named"),
        (f"{__name__}:NOT_A_STAGE", "gives 3, not a Stage class"),
        (f"{__name__}:Unnamed", "Unnamed of .* declares no name"),
        (f"{__name__}:AnyName", "AnyName of .* declares no name"),
        (f"{__name__}:Roleless", "'roleless' of .* has no role"),
        (f"{__name__}:Unfinished", "'unfinished' of .* does not implement score"),
    ],
)
def test_bad_entry_points_are_refused(install, value, message):
    install(value)
    with pytest.raises(ConfigError, match=message):
        registered_stages()
    # Also where a user meets it first.
    with pytest.raises(ConfigError, match=message):
        load_config("snapkv")


def test_a_stage_object_need_not_be_registered():
    """The researcher's way: subclass, pass an instance, never publish anything."""
    config = CompressionConfig(budget=0.5, buffer=2, stages=[Loudest(gain=2), {"stage": "top_k"}])
    assert load_config(config) is config
    changed = load_config(config, {"loudest.gain": -3}, seed=4)
    assert (changed.stages[0], changed.seed) == (Loudest(gain=-3), 4)
    with pytest.raises(ConfigError, match=r"stages.0 \(loudest\): gane: is not a field; did you mean 'gain'\?"):
        load_config(config, {"loudest.gane": 3})
    values = torch.tensor([5.0, 1, 4, 2, 3]).reshape(1, 1, 5, 1)
    keep = select_tokens(config.resolve(8), values, values, values[:, :, :1]).keep
    assert keep.tolist() == [[[0, 2]]]
    # Nobody said that its scores cannot be negative, so they are not taken for weights.
    with pytest.raises(ConfigError, match="loudest can be negative"):
        load_config(config, {"stages": [Loudest(), "sample"]})


def test_json_schema_describes_every_stage():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(CompressionConfig.model_fields)
    found = {}
    for entry in schema["properties"]["stages"]["items"]["oneOf"]:
        definition = schema["$defs"][entry["$ref"].removeprefix("#/$defs/")]
        assert definition["additionalProperties"] is False
        found[definition["properties"]["stage"]["const"]] = definition["properties"]
    assert set(found) == set(registered_stages())
    assert found["attention"]["smoothing"]["default"] == 5
    assert found["attention"]["edges"]["enum"] == ["zero", "shrink"]
    # Every field that a packaged recipe sets must be in the schema, under the right stage.
    for name in recipe_names():
        data = yaml.safe_load(load_config(name).to_yaml())
        assert set(data) <= set(schema["properties"])
        for stage in data["stages"]:
            assert set(stage) <= set(found[stage["stage"]])


def test_light_import():
    """Recipes and selection must work without Triton, and not load transformers: on a laptop, in a config checker."""
    code = """
import sys, torch
sys.modules["triton"] = None  # as where it isn't installed
before = set(sys.modules)
import kvcompress
kvcompress.json_schema()
x = torch.ones(1, 2, 20, 4)
for name in kvcompress.recipe_names():
    config = kvcompress.load_config(name)
    if config.evicts:
        kvcompress.select_tokens(config.with_fields({"budget": 26, "buffer": 2}), x, x, x)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new & {"transformers", "scipy", "typer", "rich", "matplotlib"}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
