"""Recipes: what is refused and how, YAML, overrides and ratios."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvcompress import CompressionConfig, load_config, recipe_names
from kvcompress.errors import ConfigError
from kvcompress.policies import Attention, RandomTokens, Sinks, TopK, ValueRange


def recipe(*stages, **fields):
    return {"budget": 128, "buffer": 64, "stages": list(stages), **fields}


def set_(stage, **settings):
    return {"stage": stage, **settings}


# What is given, and the parts of the message that must come: field, value, what is allowed.
IMPOSSIBLE = [
    (recipe("attention", "top_k", budget=64), "buffer: 64 ... budget 64 ... at most 63 ... at least 65"),
    (recipe("attention", "top_k", buffer=200), "buffer: 200 ... budget 128 ... at most 127 ... at least 201"),
    (recipe("attention", "top_k", buffer=0), "buffer ... greater than or equal to 1 ... got 0"),
    (recipe("attention", "top_k", budget=0), "budget ... at least 2 ... got 0"),
    (recipe("attention", "top_k", budget=1), "budget ... at least 2 ... got 1"),
    (recipe("attention", "top_k", budget=-5), "budget ... at least 2 ... got -5"),
    (recipe("attention", "top_k", budget=True), "budget ... whole number ... got True"),
    (recipe("attention", "top_k", budget=1.5), "budget ... between 0 and 1 ... got 1.5"),
    (recipe("attention", "top_k", budget=float("nan")), "budget ... between 0 and 1 ... got nan"),
    (recipe("attention", "top_k", budget="128"), "budget ... whole number ... got '128'"),
    (recipe("attention", "top_k", budget=None), "budget: missing ... budget: 1024"),
    ({"budget": 128, "stages": []}, "budget: 128 has no effect ... add a select stage"),
    (recipe("attention", "top_k", seed=2**64), f"seed ... less than {2**64}"),
    (recipe("attention", "top_k", bufer=32), "bufer: is not a field ... did you mean 'buffer'? ... got 32"),
    ({"budget": 128, "stages": "attention"}, "stages: must be a list of stages"),
    (recipe(set_("sinks", tokens=65), "attention", "top_k"), "budget: 128 ... 64 slots ... sinks protect 65"),
    (
        recipe("sinks", set_("value_range", tokens=65), "attention", "sample"),
        "budget: 128 ... 64 slots ... sinks, value_range protect 65",
    ),
    (
        recipe(set_("value_range", tokens=40), set_("recent", tokens=89), "random", "top_k"),
        "64 slots ... value_range, recent protect 65",
    ),
    (
        recipe("atention", "top_k"),
        "stages.0.stage: 'atention' is not a stage ... did you mean 'attention'? ... key_diff",
    ),
    (recipe({"stage": ["attention"]}, "top_k"), "stages.0.stage: ['attention'] is not a stage"),
    (recipe({"tokens": 4}, "top_k"), "stages.0 ... names no stage ... - stage: NAME"),
    (
        recipe(set_("sinks", token=4), "attention", "top_k"),
        "stages.0 (sinks) ... token: is not a field ... did you mean 'tokens'?",
    ),
    (recipe("attention", "top_k", "sample"), "2 select stages (top_k, sample) ... at most one"),
    (recipe("attention"), "attention without a select stage ... top_k or sample"),
    (recipe("sinks"), "sinks without a select stage ... top_k or sample"),
    (recipe("sinks", "top_k"), "'top_k' has no score ... put a score stage before"),
    (
        recipe("attention", "sinks", "top_k"),
        "stages.1.stage: 'sinks' (protect) comes after 'attention' (score) ... protect -> score -> select",
    ),
    (recipe(set_("attention", smoothing=4), "top_k"), "stages.0 (attention): smoothing: must be odd ... got 4"),
    (recipe("attention", set_("sample", temperature=0)), "stages.1 (sample): temperature ... than 0 ... got 0"),
    (recipe(set_("attention", temperature=-1), "top_k"), "stages.0 (attention): temperature ... than 0 ... -1"),
    (recipe(set_("attention", weight=float("nan")), "top_k"), "stages.0 (attention): weight ... finite ... nan"),
    (recipe(set_("attention", weight=0), "top_k"), "stages.0 (attention): weight: must not be 0 ... got 0"),
    (
        recipe(set_("value_range", tokens=8, share=0.5), "attention", "top_k"),
        "stages.0 (value_range) ... exactly one of tokens and share ... tokens=8, share=0.5",
    ),
    (recipe("value_range", "attention", "top_k"), "exactly one of tokens and share ... tokens=None, share=None"),
    (
        recipe(set_("value_range", tokens=-1), "attention", "top_k"),
        "stages.0 (value_range): tokens ... greater than or equal to 1 ... got -1",
    ),
    (
        recipe(set_("value_range", share=0.001), "attention", "top_k"),
        "share: 0.001 ... budget 128 ... less than one token ... at least 1/128",
    ),
    (
        recipe("attention", "redundancy", "sample"),
        "'sample' reads scores as weights ... redundancy can be negative ... weights: softmax ... top_k",
    ),
    (recipe(set_("attention", weight=-1), "sample"), "'sample' reads ... attention can be negative"),
    (recipe(set_("attention", window=65), "top_k"), "attention.window: 65 ... buffer 64 ... at most 64"),
    # Where the budget is a ratio too, what is known at once is refused at once.
    (recipe(set_("attention", window=65), "top_k", budget=0.5), "attention.window: 65 ... buffer 64 ... most 64"),
]


@pytest.mark.parametrize(("data", "message"), IMPOSSIBLE)
def test_impossible_recipes_say_what_is_wrong(data, message):
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    for fragment in message.split(" ... "):
        assert fragment in str(caught.value)


def test_the_edge_of_the_possible_is_accepted():
    assert load_config(recipe("attention", "top_k", budget=65)).budget == 65
    assert load_config(recipe("sinks", set_("value_range", tokens=64), "attention", "sample")).evicts
    assert load_config(recipe(set_("attention", window=64), "top_k")).evicts
    assert load_config(recipe("attention", "redundancy", set_("sample", weights="softmax"))).evicts
    assert not load_config({"stages": []}).evicts
    # Protected twice is protected once: the bound counts sinks inside the value slots and inside the prompt.
    config = load_config(recipe("sinks", "prompt", set_("value_range", tokens=20), "random", "top_k"))
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


def test_a_recipe_without_a_name_keeps_having_none(tmp_path):
    """Files give their name to recipes, but not to one that was written from a config of the default name."""
    config = CompressionConfig(budget=64, buffer=8, stages=["random", "top_k"])
    path = tmp_path / "other.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


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
# Any text that UTF-8 can hold, control characters and line ends included.
names = st.just("custom") | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    name=names,
    description=names,
    budget=st.integers(100, 10**6) | st.floats(0.01, 0.99),
    buffer=st.integers(16, 60),
    seed=st.integers(0, 2**64 - 1),
    stages=st.tuples(st.lists(protects, max_size=2), st.lists(scores, min_size=1, max_size=3)),
    select=st.sampled_from(["top_k", {"stage": "sample", "weights": "softmax", "temperature": 1e-7}]),
)
def test_round_trip_of_generated_configs(tmp_path_factory, name, description, budget, buffer, seed, stages, select):
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


def read(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("description: !!python/object/apply:os.getcwd []\nstages: []", "not valid YAML ... python/object"),
        ("budget: 64\nbudget: 128\nbuffer: 8\nstages: [random, top_k]", "key 'budget' is given twice"),
        ("stages:\n  - {stage: sinks, tokens: 4, tokens: 5}", "key 'tokens' is given twice"),
        ("- attention\n- top_k", "holds list, not a mapping"),
        ("", "holds NoneType, not a mapping"),
        ("budget: [1", "not valid YAML"),
        ("1: 2", "1: Keys should be strings"),
        ("budget: 1e3\nstages: [random, top_k]", "budget: must be a whole number ... got '1e3'"),
        ("version: 2\nstages: []", "version ... 1 ... got 2"),
    ],
)
def test_bad_yaml_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert len(str(caught.value)) < 500
    for fragment in message.split(" ... "):
        assert fragment in str(caught.value)


def test_yaml_takes_its_name_from_the_file_and_stages_may_be_bare_names(tmp_path):
    config = read(tmp_path, "budget: 64\nbuffer: 8\nstages: [random, top_k]")
    assert config == CompressionConfig(name="recipe", budget=64, buffer=8, stages=[{"stage": "random"}, TopK()])


@pytest.mark.parametrize("source", ["nowhere.yaml", "no/where", 7])
def test_sources_that_do_not_exist(source):
    with pytest.raises(ConfigError, match=r"cannot be read|is not a recipe"):
        load_config(source)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'snapvk' is not a packaged recipe; did you mean 'snapkv'\?.*vase-dkv"):
        load_config("snapvk")


def test_overrides():
    config = load_config("vase-attnv", {"budget": 512, "value_range.tokens": 100, "sample.temperature": 2}, seed=9)
    assert (config.budget, config.seed, config.stages[3].temperature) == (512, 9, 2.0)
    # tokens replaces share, and back again; on a loaded config as on a recipe
    assert (config.stages[1].tokens, config.stages[1].share) == (100, None)
    again = config.with_fields({"value_range.share": 0.5})
    assert (again.stages[1].tokens, again.stages[1].share) == (None, 0.5)
    assert load_config(recipe("sinks", "random", "top_k"), {"sinks.tokens": 2}).stages[0].tokens == 2
    assert load_config("vase-attnv", stages=["random", "top_k"]).name == "vase-attnv"
    assert load_config("vase-attnv").budget == 1024


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"budgte": 3}, "override 'budgte': not a field ... did you mean 'budget'?"),
        ({"leverage.rank": 3}, "override 'leverage.rank': vase-attnv has no stage 'leverage' ... attention, sample"),
        ({"sinks.token": 3}, "stages.0 (sinks) ... token: is not a field ... 'tokens'"),
        ({"value_range.share": 0.5, "value_range.tokens": 3}, "exactly one ... tokens=3, share=0.5"),
        ({"budget": 64}, "buffer: 64 must be smaller than budget 64"),
        ({"stages": None, "sinks.tokens": 3}, "stages: must be a list of stages"),
    ],
)
@pytest.mark.parametrize("source", ["vase-attnv", load_config("vase-attnv")])
def test_bad_overrides(source, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    for fragment in message.split(" ... "):
        assert fragment in str(caught.value)


def test_ratio_budgets():
    config = load_config("vase-attnv", budget=0.25)
    assert config.budget == 0.25
    assert config.resolve(4096) == load_config("vase-attnv", budget=1024)
    assert load_config("snapkv", budget=0.29, buffer=8).resolve(100).budget == 29  # 0.29 * 100 = 28.999...
    assert load_config("snapkv", budget=512).resolve(4096).budget == 512
    with pytest.raises(ConfigError, match=r"budget: 0.25 of a context of 40 tokens is 10 tokens.*buffer: 64"):
        config.resolve(40)
    with pytest.raises(ConfigError, match=r"is 0 tokens.*at least 2"):
        config.resolve(3)
