"""Recipes: what is refused and how, YAML, overrides, ratios, schema and third-party stages."""

import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcompress import CompressionConfig, json_schema, load_config, recipe_names, select_tokens
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.policies import STAGES, Attention, RandomTokens, Sinks, TopK, ValueRange
from kvcompress.stages import ENTRY_POINT_GROUP, ScoreStage, Stage, registered_stages


class Loudest(ScoreStage):
    """What a third party might write."""

    stage: Literal["loudest"] = "loudest"
    nonnegative: ClassVar[bool] = True
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
SEVERAL = [Loudest, Sinks]


def recipe(*stages, **fields):
    return {"budget": 128, "buffer": 64, "stages": list(stages), **fields}


IMPOSSIBLE = {
    "buffer fills budget": (
        recipe("attention", "top_k", budget=64),
        ["buffer: 64", "budget 64", "at most 63", "at least 65"],
    ),
    "buffer above budget": (recipe("attention", "top_k", buffer=200), ["buffer: 200", "budget 128", "201"]),
    "buffer zero": (
        recipe("attention", "top_k", buffer=0),
        ["buffer", "greater than or equal to 1", "got 0"],
    ),
    "sinks do not fit": (
        recipe({"stage": "sinks", "tokens": 65}, "attention", "top_k"),
        ["budget: 128", "64 slots", "sinks protect 65"],
    ),
    "value_range does not fit": (
        recipe("sinks", {"stage": "value_range", "tokens": 65}, "attention", "sample"),
        ["budget: 128", "64 slots", "sinks, value_range protect 65"],
    ),
    "recent adds up": (
        recipe({"stage": "value_range", "tokens": 40}, {"stage": "recent", "tokens": 89}, "random", "top_k"),
        ["64 slots", "value_range, recent protect 65"],
    ),
    "budget zero": (recipe("attention", "top_k", budget=0), ["budget", "at least 2", "got 0"]),
    "budget one": (recipe("attention", "top_k", budget=1), ["budget", "at least 2", "got 1"]),
    "budget negative": (recipe("attention", "top_k", budget=-5), ["budget", "at least 2", "got -5"]),
    "budget bool": (recipe("attention", "top_k", budget=True), ["budget", "whole number", "got True"]),
    "budget above one": (recipe("attention", "top_k", budget=1.5), ["budget", "between 0 and 1", "got 1.5"]),
    "budget NaN": (recipe("attention", "top_k", budget=float("nan")), ["budget", "between 0 and 1", "nan"]),
    "budget text": (recipe("attention", "top_k", budget="128"), ["budget", "whole number", "got '128'"]),
    "budget missing": (recipe("attention", "top_k", budget=None), ["budget: missing", "budget: 1024"]),
    "budget without eviction": ({"budget": 128, "stages": []}, ["budget: 128 has no effect", "select"]),
    "unknown stage": (
        recipe("atention", "top_k"),
        ["stages.0.stage: 'atention' is not a stage", "did you mean 'attention'?", "key_diff"],
    ),
    "stage name not text": (recipe({"stage": ["attention"]}, "top_k"), ["stages.0.stage", "is not a stage"]),
    "stage without name": (recipe({"tokens": 4}, "top_k"), ["stages.0", "names no stage", "- stage: NAME"]),
    "unknown stage field": (
        recipe({"stage": "sinks", "token": 4}, "attention", "top_k"),
        ["stages.0 (sinks)", "token: is not a field", "did you mean 'tokens'?"],
    ),
    "unknown field": (
        recipe("attention", "top_k", bufer=32),
        ["bufer: is not a field", "did you mean 'buffer'?", "got 32"],
    ),
    "two selects": (
        recipe("attention", "top_k", "sample"),
        ["2 select stages (top_k, sample)", "at most one"],
    ),
    "score without select": (recipe("attention"), ["attention without a select stage", "top_k or sample"]),
    "protect without select": (recipe("sinks"), ["sinks without a select stage", "top_k or sample"]),
    "select without score": (recipe("sinks", "top_k"), ["'top_k' has no score", "put a score stage before"]),
    "wrong order": (
        recipe("attention", "sinks", "top_k"),
        ["stages.1.stage: 'sinks' (protect) comes after 'attention' (score)", "protect -> score -> select"],
    ),
    "even smoothing": (
        recipe({"stage": "attention", "smoothing": 4}, "top_k"),
        ["stages.0 (attention)", "smoothing: must be odd", "got 4"],
    ),
    "zero temperature": (
        recipe("attention", {"stage": "sample", "temperature": 0}),
        ["stages.1 (sample)", "temperature", "greater than 0", "got 0"],
    ),
    "negative temperature": (
        recipe({"stage": "attention", "temperature": -1}, "top_k"),
        ["stages.0 (attention)", "temperature", "greater than 0", "got -1"],
    ),
    "NaN weight": (
        recipe({"stage": "attention", "weight": float("nan")}, "top_k"),
        ["stages.0 (attention)", "weight", "finite", "nan"],
    ),
    "zero weight": (
        recipe({"stage": "attention", "weight": 0}, "top_k"),
        ["stages.0 (attention)", "weight: must not be 0", "got 0"],
    ),
    "tokens and share": (
        recipe({"stage": "value_range", "tokens": 8, "share": 0.5}, "attention", "top_k"),
        ["stages.0 (value_range)", "exactly one of tokens and share", "tokens=8", "share=0.5"],
    ),
    "neither tokens nor share": (
        recipe("value_range", "attention", "top_k"),
        ["stages.0 (value_range)", "exactly one of tokens and share", "tokens=None"],
    ),
    "negative quota": (
        recipe({"stage": "value_range", "tokens": -1}, "attention", "top_k"),
        ["stages.0 (value_range)", "tokens", "greater than or equal to 1", "got -1"],
    ),
    "share of less than a token": (
        recipe({"stage": "value_range", "share": 0.001}, "attention", "top_k"),
        ["share: 0.001", "budget 128", "less than one token", "at least 1/128"],
    ),
    "signed scores sampled": (
        recipe("attention", "redundancy", "sample"),
        ["'sample' reads scores as weights", "redundancy can be negative", "weights: softmax", "top_k"],
    ),
    "negative weight sampled": (
        recipe({"stage": "attention", "weight": -1}, "sample"),
        ["'sample' reads scores as weights", "attention can be negative"],
    ),
    "window beyond buffer": (
        recipe({"stage": "attention", "window": 65}, "top_k"),
        ["attention.window: 65", "buffer 64", "at most 64"],
    ),
    "window beyond buffer under a ratio": (
        recipe({"stage": "attention", "window": 65}, "top_k", budget=0.5),
        ["attention.window: 65", "buffer 64", "at most 64"],
    ),
    "stages not a list": ({"budget": 128, "stages": "attention"}, ["stages: must be a list of stages"]),
    "seed too large": (recipe("attention", "top_k", seed=2**64), ["seed", "less than", str(2**64)]),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_recipes_say_what_is_wrong(name):
    data, fragments = IMPOSSIBLE[name]
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert isinstance(caught.value, KVCompressError)


def test_the_edge_of_the_possible_is_accepted():
    assert load_config(recipe("attention", "top_k", budget=65)).budget == 65
    assert load_config(recipe("sinks", {"stage": "value_range", "tokens": 64}, "attention", "sample")).evicts
    assert load_config(recipe({"stage": "attention", "window": 64}, "top_k")).evicts
    softmax = {"stage": "sample", "weights": "softmax"}
    assert load_config(recipe("attention", "redundancy", softmax)).evicts
    assert not load_config({"stages": []}).evicts
    # Protected twice is protected once: the bound counts sinks inside the value slots and inside the prompt.
    config = load_config(recipe("sinks", "prompt", {"stage": "value_range", "tokens": 20}, "random", "top_k"))
    assert [config.protected_bound(length) for length in (0, 4, 10, 30)] == [20, 20, 20, 30]


def test_several_faults_are_reported_together():
    with pytest.raises(ConfigError, match=r"buffer.*got -1.*seed.*got -2"):
        load_config(recipe("attention", "top_k", buffer=-1, seed=-2))


def test_configs_and_stages_are_frozen_and_closed():
    config = load_config("vase-attnv")
    with pytest.raises(ValidationError, match="frozen"):
        config.budget = 5
    with pytest.raises(ValidationError, match="frozen"):
        config.stages[0].tokens = 5
    with pytest.raises(ValidationError, match=r"[Ee]xtra"):
        CompressionConfig(stages=(), colour="red")
    with pytest.raises(ValidationError, match=r"[Ee]xtra"):
        Attention(colour="red")


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_load_and_round_trip(name, tmp_path):
    config = load_config(name)
    assert config.name == name
    assert config.description
    # A file of another name: the recipe's own name must win.
    path = tmp_path / "other.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(str(path)) == config
    assert load_config(config) is config
    assert load_config(config.model_dump()) == config


def test_published_settings_of_the_vase_recipes():
    attnv = load_config("vase-attnv")
    assert [stage.stage for stage in attnv.stages] == ["sinks", "value_range", "attention", "sample"]
    assert (attnv.stages[0].tokens, attnv.stages[1].reserved(4096), attnv.stages[2].smoothing) == (4, 1024, 5)
    assert attnv.buffer == 64
    assert load_config("vase-dkv").stages[1].resample is True
    assert load_config("cur-dkv").stages[1].resample is False
    assert load_config("vase-dkv").stages[1].rank == load_config("cur-dkv").stages[1].rank == 20


weights = st.floats(-10, 10).filter(bool)
quotas = st.one_of(
    st.fixed_dictionaries({"tokens": st.integers(1, 20)}),
    st.fixed_dictionaries({"share": st.floats(0.02, 0.1)}),
)
protects = st.one_of(
    st.builds(lambda tokens: Sinks(tokens=tokens), st.integers(1, 8)),
    st.builds(
        lambda quota, statistic: ValueRange(statistic=statistic, **quota),
        quotas,
        st.sampled_from(["range", "absmax", "l2", "var"]),
    ),
    st.builds(lambda quota: RandomTokens(**quota), quotas),
)
scores = st.one_of(
    st.builds(
        Attention,
        weight=weights,
        window=st.none() | st.integers(1, 16),
        smoothing=st.integers(0, 4).map(lambda half: 2 * half + 1),
        edges=st.sampled_from(["zero", "shrink"]),
        temperature=st.floats(1e-6, 1e6),
        combine=st.sampled_from(["add", "multiply"]),
    ),
    st.sampled_from(["redundancy", "key_norm", "random", "recency"]),
)
# YAML files hold any text that is not a lone surrogate, a byte-order mark or NUL.
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff\0"), max_size=20)


@given(
    name=names,
    description=names,
    budget=st.integers(100, 10**6) | st.floats(0.01, 0.99),
    buffer=st.integers(16, 60),
    seed=st.integers(0, 2**64 - 1),
    stages=st.tuples(st.lists(protects, max_size=2), st.lists(scores, min_size=1, max_size=3)),
    select=st.sampled_from(["top_k", {"stage": "sample", "weights": "softmax", "temperature": 1e-7}]),
)
def test_round_trip_of_generated_configs(
    tmp_path_factory, name, description, budget, buffer, seed, stages, select
):
    protect, score = stages
    assume(buffer + 40 <= budget or isinstance(budget, float))
    config = CompressionConfig(
        name=name,
        description=description,
        budget=budget,
        buffer=buffer,
        seed=seed,
        stages=[*protect, *score, select],
    )
    path = tmp_path_factory.mktemp("recipe") / "file.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    again = load_config(path)
    assert again == config
    assert type(again.budget) is type(config.budget)
    assert [type(stage) for stage in again.stages] == [type(stage) for stage in config.stages]
