"""The command line: what goes to which stream, exit statuses, messages, files."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from text_model import PROMPT, save_text_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.compare import DEFAULT_RECIPES
from kvcompress.reasoner import evaluation_seed, generate, grade

SMALL = ("--budget", "24", "--set", "buffer=8")
KVCOMPRESS = (sys.executable, "-c", "from kvcompress.cli import main; main()")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("plain"), chat=False)


def run(*arguments, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def succeeds(*arguments, stdin=None):
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def refuses(*arguments, stdin=None) -> str:
    """Runs into bad input and returns the message: one line on standard error, nothing on standard output."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("kvcompress: error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("kvcompress: error: ").rstrip("\n")


@pytest.fixture
def no_model(monkeypatch):
    """Makes loading a model a failure of the test."""
    monkeypatch.setattr("kvcompress.models.load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))


# -- generate ----------------------------------------------------------------------------------------------------------


def expected_text(folder: Path, new_tokens: int, chat: bool = True) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = f"<user> {PROMPT} <assistant>" if chat else PROMPT
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(inputs["input_ids"], max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_answer_and_nothing_else(folder):
    result = succeeds("generate", PROMPT, "--model", folder, "--recipe", "full", "-n", 20)
    assert result.stdout == expected_text(folder, 20) + "\n"
    assert "20 new tokens" in result.stderr
    assert "81 of 81 tokens kept, 0 compressions" in result.stderr


def test_generate_without_chat_template(folder, plain_folder):
    expected = expected_text(folder, 12, chat=False)
    for arguments in ((folder, "--no-chat"), (plain_folder,)):
        result = succeeds("generate", PROMPT, "-r", "full", "-n", 12, "--model", *arguments)
        assert result.stdout == expected + "\n"


def test_generate_json_says_what_ran(folder):
    result = succeeds("generate", PROMPT, "-m", folder, *SMALL, "--seed", 7, "-n", 50, "--json")
    document = json.loads(result.stdout)
    assert document["prompt_tokens"] == 62
    assert len(document["tokens"]) == 50
    assert len(document["text"].split()) > 30
    assert document["config"]["budget"] == 24
    assert document["config"]["seed"] == 7
    cache = document["cache"]
    assert cache["tokens_seen"] == [111]
    assert 24 <= cache["tokens_kept"][0] <= 32
    assert cache["ratio"] == cache["bytes_full"] / cache["bytes_held"]
    assert cache["events"][0] >= 5
    assert document["settings"]["versions"]["torch"] == torch.__version__
    assert document["settings"]["command"].startswith("kvcompress generate 'w0 w7")
    assert f"{cache['ratio']:.2f}x smaller" in result.stderr


def test_prompts_come_from_argument_file_or_standard_input(folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = ("-m", folder, "-r", "full", "-n", 8)
    expected = succeeds("generate", PROMPT, *options).stdout
    for arguments, stdin in (
        (("--file", file), None),
        ((), PROMPT),
        (("-",), PROMPT),
        (("--file", "-"), PROMPT),
        ((PROMPT,), "ignored"),
    ):
        assert succeeds("generate", *arguments, *options, stdin=stdin).stdout == expected


def test_system_message_reaches_the_template(folder):
    options = ("-m", folder, "-r", "full", "-n", 4, "--json")
    without = json.loads(succeeds("generate", PROMPT, *options).stdout)
    given = json.loads(succeeds("generate", PROMPT, "--system", "w5 w6", *options).stdout)
    assert given["prompt_tokens"] == without["prompt_tokens"] + 3


def test_sampling_repeats_with_the_seed(folder):
    options = ("-m", folder, "-r", "full", "-n", 30, "--temperature", 1.5, "--top-p", 0.95)
    texts = [succeeds("generate", PROMPT, *options, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = succeeds("generate", PROMPT, "-m", folder, "-r", "full", "-n", 30, "--temperature", 0).stdout
    assert greedy == expected_text(folder, 30) + "\n"


def test_ratio_budget_counts_prompt_and_answer(folder):
    result = succeeds("generate", PROMPT, "-m", folder, "--budget", 0.5, "--set", "buffer=8", "-n", 38, "--json")
    assert json.loads(result.stdout)["config"]["budget"] == 50


def test_recipe_files_work_like_names(folder, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("budget: 24\nbuffer: 8\nstages: [{stage: recency}, top_k]\n")
    document = json.loads(succeeds("generate", PROMPT, "-m", folder, "-r", recipe, "-n", 9, "--json").stdout)
    assert document["config"]["name"] == "mine"


def test_long_answers_warn(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    result = succeeds("generate", PROMPT, "-m", tmp_path, "-r", "full", "-n", 3)
    assert "warning: prompt and answer of 65 tokens go past the 64 of the model" in result.stderr
    assert succeeds("generate", PROMPT, "-m", tmp_path, "-r", "full", "-n", 2).stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "prompt: the argument is empty"),
        (("  \n ",), "prompt: the argument is empty"),
        ((), "prompt: standard input is empty"),
        (("-",), "prompt: standard input is empty"),
        (("hello", "--file", "x.txt"), "prompt: given both as an argument and as --file"),
        (("--file", "/nonexistent/x.txt"), "prompt: file /nonexistent/x.txt cannot be read: No such file"),
        (("--file", "/"), "prompt: file / cannot be read: Is a directory"),
        (("w1", "--recipe", "vase-atnv"), "did you mean 'vase-attnv'"),
        (("w1", "--recipe", "nosuch.yaml"), "recipe file nosuch.yaml: cannot be read"),
        (("w1", "--recipe", "full", "--budget", "64"), "budget: 64 has no effect"),
        (("w1", "--budget", "many"), "--budget: 'many' is not a number of tokens"),
        (("w1", "--budget", "1.5"), "must be a whole number of tokens"),
        (("w1", "--budget", "10"), "buffer: 64 must be smaller than budget 10"),
        (("w1", "--budget", "300", "--set", "budget=200"), "budget: given both as --budget and as --set"),
        (("w1", "--seed", "-1"), "seed: "),
        (("w1", "--set", "budget"), "--set 'budget': is not KEY=VALUE"),
        (("w1", "--set", "=3"), "--set '=3': is not KEY=VALUE"),
        (("w1", "--set", "budget=200", "--set", "budget=300"), "budget is set twice"),
        (("w1", "--set", "budget=[1"), "--set budget: '[1' is not a single value"),
        (("w1", "--set", "value_range.shar=1"), "value_range"),
        (("w1", "--set", "leverage.rank=1"), "vase-attnv has no stage 'leverage'"),
        (("w1", "--max-new-tokens", "0"), "--max-new-tokens: 0 must be at least 1"),
        (("w1", "--temperature", "-1"), "--temperature: -1.0 must be 0 (greedy) or a positive number"),
        (("w1", "--temperature", "nan"), "--temperature: nan must be"),
        (("w1", "--top-p", "0"), "--top-p: 0.0 must be above 0"),
        (("w1", "--bogus"), "--bogus"),
        (("w1", "w2"), "w2"),
        (("w1", "-n", "few"), "few"),
    ],
)
def test_generate_refuses_bad_input_before_a_model_is_loaded(no_model, arguments, message):
    assert message in refuses("generate", *arguments) or message in ("few", "w2")


def test_generate_refuses_a_prompt_that_is_not_text(no_model, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refuses("generate", "--file", tmp_path / "binary")
    assert "standard input is not UTF-8 text" in refuses("generate", stdin=b"\xff\xfe\x00")


def test_generate_refuses_what_the_model_cannot_do(folder, plain_folder, tmp_path):
    assert "model: no folder '/nonexistent/model'" in refuses("generate", "w1", "-m", "/nonexistent/model")
    assert "dtype: 'int3'" in refuses("generate", "w1", "-m", folder, "--dtype", "int3")
    assert "device: 'cuda:99'" in refuses("generate", "w1", "-m", folder, "--device", "cuda:99")
    assert "no chat template" in refuses("generate", "w1", "-m", plain_folder, "--system", "w2")
    assert "chat formatting is off" in refuses("generate", "w1", "-m", folder, "--no-chat", "--system", "w2")
    long_prompt = refuses("generate", PROMPT, "-m", folder, "-r", "random-prompt", *SMALL, "-n", 2)
    assert "random-prompt" in long_prompt or "prompt" in long_prompt


# -- compare -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "new" / "folder"
    command = ("compare", PROMPT, "-m", folder, "--budget", 24, "--buffer", 8, "-n", 40, "--seed", 3, "-o", output)
    return succeeds(*command), output


def test_compare_writes_a_document_that_says_it_all(comparison, folder):
    _, output = comparison
    document = json.loads((output / "compare.json").read_text(encoding="utf-8"))
    settings = document["settings"]
    assert settings["model"] == str(folder)
    assert settings["dtype"] == "float32"
    assert settings["prompt_tokens"] == 62
    assert (settings["generated_tokens"], settings["compared_tokens"]) == (40, 39)
    assert settings["seed"] == 3
    assert settings["command"].startswith("kvcompress compare 'w0 w7")
    assert settings["command"].endswith(f"--budget 24 --buffer 8 -n 40 --seed 3 -o {output}")
    assert settings["versions"]["kvcompress"] == kvcompress.__version__
    assert {"torch", "transformers", "python"} <= settings["versions"].keys()
    assert [entry["recipe"] for entry in document["recipes"]] == list(DEFAULT_RECIPES)
    assert "block bootstrap" in document["definitions"]["standard_error"]
    for entry in document["recipes"]:
        assert len(entry["kl"]["per_token"]) == len(entry["kv_bytes"]) == len(entry["top1"]["per_token"]) == 39
        assert entry["kl"]["mean"] == pytest.approx(sum(entry["kl"]["per_token"]) / 39)
        assert entry["top1"]["mean"] == pytest.approx(sum(entry["top1"]["per_token"]) / 39)
        assert entry["ratio"] == entry["kv_bytes_full"] / entry["kv_bytes_held"]
        assert kvcompress.load_config(entry["config"]).seed == 3
        assert entry["config"]["budget"] == (None if entry["recipe"] == "full" else 24)
        assert entry["decode_tokens_per_second"] > 0
    full, *others = document["recipes"]
    assert full["kl"]["mean"] < 1e-5
    assert full["top1"] == {"mean": 1.0, "standard_error": 0.0, "per_token": [True] * 39}
    for entry in others:
        assert entry["kl"]["mean"] > 10 * full["kl"]["mean"]
        assert entry["kl"]["standard_error"] > 0
        assert entry["events"] >= 5
        assert entry["kv_bytes_held"] < document["reference"]["kv_bytes"][-1]


def test_compare_prints_a_table_and_where_the_files_are(comparison):
    result, output = comparison
    for name in DEFAULT_RECIPES:
        assert name in result.stdout
    assert "block bootstrap" in " ".join(result.stdout.split())
    assert f"wrote {output / 'compare.json'}" in result.stderr
    assert f"wrote {output / 'compare.png'}" in result.stderr


def test_compare_draws_a_picture(comparison):
    from matplotlib.image import imread

    _, output = comparison
    assert (output / "compare.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = imread(output / "compare.png").shape
    assert width > 1500
    assert height > 500
    assert sorted(path.name for path in output.iterdir()) == ["compare.json", "compare.png"]


def test_compare_json_goes_to_standard_output(folder):
    arguments = ("compare", PROMPT, "-m", folder, "-r", "snapkv", "-r", "full", "--budget", 24, "--buffer", 8)
    result = succeeds(*arguments, "-n", 10, "--json")
    assert [entry["recipe"] for entry in json.loads(result.stdout)["recipes"]] == ["snapkv", "full"]
    assert result.stderr == ""


def test_compare_takes_recipe_files(folder, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text("budget: 24\nbuffer: 8\nstages: [recency, top_k]\n")
    arguments = ("-r", tmp_path / "one.yaml", "-r", tmp_path / "two.yaml", "-n", 20, "--json")
    one, two = json.loads(succeeds("compare", PROMPT, "-m", folder, *arguments).stdout)["recipes"]
    assert one["kl"] == two["kl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-r", "full", "-r", "full"), "recipe: 'full' is given twice"),
        (("-r", "fulll"), "did you mean 'full'"),
        (("--set", "bogus=1"), "override 'bogus': not a field"),
        (("--set", "window"), "--set 'window': is not KEY=VALUE"),
        (("--set", "prompt.tokens=1"), "override 'prompt.tokens': fits none of the recipes full, streaming-llm"),
        (("--budget", "20"), "buffer: 64 must be smaller than budget 20"),
        (("--budget", "20", "--buffer", "18"), "leaves 2 slots"),
        (("--budget", "200", "--set", "budget=100"), "budget: is set twice"),
        (("-r", "full", "--budget", "200"), "override 'budget': fits none of the recipes full"),
        (("-n", "1"), "--max-new-tokens: 1 must be at least 2"),
        (("--output-dir", "/dev/null/x"), "--output-dir: /dev/null/x cannot be made"),
    ],
)
def test_compare_refuses_bad_input_before_a_model_is_loaded(no_model, arguments, message):
    assert message in refuses("compare", "w1", *arguments)


# -- recipes, env ------------------------------------------------------------------------------------------------------


def test_recipes_list_and_show():
    table = succeeds("recipes", "list").stdout
    entries = json.loads(succeeds("recipes", "list", "--json").stdout)
    assert [entry["name"] for entry in entries] == kvcompress.recipe_names()
    for entry in entries:
        assert entry["name"] in table
        assert entry["description"]
        config = yaml.safe_load(succeeds("recipes", "show", entry["name"]).stdout)
        assert kvcompress.load_config({"name": entry["name"], **config}) == kvcompress.load_config(entry["name"])
    assert "did you mean 'snapkv'" in refuses("recipes", "show", "snapvk")


def test_recipes_validate_says_which_file_is_bad(tmp_path):
    good, bad, unreadable = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "none.yaml"
    good.write_text(succeeds("recipes", "show", "vase-attnv").stdout)
    bad.write_text("budget: 5\nstages: [recency, top_k]\n")
    assert succeeds("recipes", "validate", good).stdout.startswith(f"ok   {good}: budget 1024, buffer 64")
    result = run("recipes", "validate", bad, good, unreadable)
    assert result.exit_code == 2
    assert result.stdout.count("\n") == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"bad  {bad}: ")
    assert "must be smaller than budget 5" in first
    assert second.startswith(f"bad  {unreadable}: ")
    assert "argument" in refuses("recipes", "validate")


def test_recipes_schema_is_the_schema():
    assert json.loads(succeeds("recipes", "schema").stdout) == kvcompress.json_schema()


def test_env_tells_versions_and_devices():
    text = succeeds("env").stdout
    for part in (kvcompress.__version__, torch.__version__, "transformers:", "platform:", "cpu ("):
        assert part in text


def test_help_and_version():
    assert succeeds("--version").stdout == f"kvcompress {kvcompress.__version__}\n"
    for arguments in ((), ("--help",), ("generate", "--help"), ("compare", "--help"), ("recipes", "--help")):
        assert "Usage: " in succeeds(*arguments).stdout
    assert "bogus" in refuses("bogus")


# -- demo --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(monkeypatch):
    """The demo at its smallest: one easy task, and few recipes."""
    monkeypatch.setattr("kvcompress.cli_demo.RECIPES", "full,snapkv,vase-attnv,int4,vase-attnv-int4")
    monkeypatch.setattr("kvcompress.cli_demo.DEFAULT_TASKS", "program:1:3,sort:1:3")
    monkeypatch.setattr("kvcompress.cli_demo.EQUAL_BYTES", "0.6")


def test_the_demo_shows_a_table_and_says_where_the_results_are(small_demo, tmp_path):
    out = tmp_path / "out"
    result = succeeds("demo", "--output-dir", out, "--problems", 2)
    assert "$ kvcompress eval --recipe full,snapkv,vase-attnv,int4,vase-attnv-int4 --equal-bytes 0.6" in result.stdout
    assert f"$ kvcompress report {out / 'run'} --maps" in result.stdout
    table = result.stdout.split("\nall tasks")[1]
    assert all(f" {recipe} " in table for recipe in ("full", "snapkv", "vase-attnv", "int4", "vase-attnv-int4"))
    told = result.stdout.split("Done. Look at")[1]
    named = [Path(word) for word in told.split() if word.startswith(str(out))]
    assert len(named) == 4
    assert all(path.is_file() for path in named)
    # What it recommends is there: the options, and the recipes.
    for line in told.splitlines():
        if " eval " in line:
            assert refuses(*shlex.split(line)[1:], "--problems", 0) == "problems: 0 must be at least 1"

    again = succeeds("demo", "--output-dir", out, "--problems", 2)
    assert again.stdout == result.stdout
    assert "problems: the run in" in refuses_late("demo", "--output-dir", out, "--problems", 3)


def test_the_demo_ends_with_the_error_of_its_step(small_demo):
    assert "folder: /dev/null/x/run cannot be made" in refuses_late("demo", "--output-dir", "/dev/null/x")


def test_without_matplotlib_the_demo_does_not_begin(no_model, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name))
    assert refuses("demo", "-o", tmp_path / "out") == "the report needs matplotlib: pip install matplotlib"
    assert not (tmp_path / "out").exists()


def refuses_late(*arguments) -> str:
    """As ``refuses``, of a command that has told something already."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "Done" not in result.stdout
    return result.stderr


def test_generate_knows_the_bundled_reasoner():
    problem = generate("sort", evaluation_seed(0), 1, 0)
    arguments = ("generate", problem.prompt, "-m", "reasoner", "-r", "full", "-n", 200, "--temperature", 0)
    assert grade(problem, succeeds(*arguments).stdout)


# -- as a process ------------------------------------------------------------------------------------------------------


def test_interrupting_ends_with_130_and_no_traceback(folder):
    process = subprocess.Popen(
        [*KVCOMPRESS, "generate", PROMPT, "-m", str(folder), "-r", "streaming-llm", *SMALL, "-n", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            # Python drops an interrupt that arrives within a callback from C; whoever waits presses again.
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_closed_pipe_is_no_error():
    command = f"{' '.join(map(repr, KVCOMPRESS))} recipes schema | head -c 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout, result.stderr) == ("{", "")


def test_terminal_without_a_prompt_is_asked_for_one(folder):
    controller, terminal = pty.openpty()
    try:
        result = subprocess.run(
            [*KVCOMPRESS, "generate", "-m", str(folder)],
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert result.returncode == 2
    assert result.stderr == (
        "kvcompress: error: prompt: none given; pass it as an argument, with --file PATH, or on standard input\n"
    )
