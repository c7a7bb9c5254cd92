"""lm-eval over compressed models, offline: a local JSON task."""

import json
import subprocess
import sys

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from text_model import PROMPT, WORDS, save_text_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.harness import CompressedLM, main
from kvcompress.models import load_model
from kvcompress.reasoner import evaluation_seed, generate

TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["{until}"], max_gen_toks: {tokens}, do_sample: false}}
filter_list: [{{name: answer, filter: [{{function: regex, regex_pattern: "{answer}"}}, {{function: take_first}}]}}]
metric_list: [{{metric: {metric}}}]
"""
WHOLE = "([^\\0]*)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and questions with the answers that it gives with its own cache."""
    place = tmp_path_factory.mktemp("harness")
    save_text_model(place / "model", chat=False)
    model, tokenizer = (kind.from_pretrained(place / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = []
    for index in range(6):
        question = " ".join([*WORDS[index : index + 9 * index], *PROMPT.split()[: 20 + 5 * index]])
        ids = tokenizer(question, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
        rows.append({"question": question, "answer": tokenizer.decode(out[0, ids["input_ids"].shape[1] :]).strip()})
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for kind, metric in (("generate_until", "exact_match"), ("loglikelihood", "acc")):
        (place / kind).mkdir()
        write_task(place / kind, place / "data.jsonl", kind=kind, metric=metric, until="<end>", tokens=12)
    return place


def write_task(folder, data, *, until, tokens, kind="generate_until", metric="exact_match", answer=WHOLE):
    task = TASK.format(data=data, kind=kind, metric=metric, until=until, tokens=tokens, answer=answer)
    (folder / "words.yaml").write_text(task)


def run(folder, model="kvcompress", **arguments):
    """lm-eval on the task of a folder."""
    return simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["words"],
        batch_size=3,
        device="cpu",
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )


def evaluate(folder, kind="generate_until", **arguments):
    return run(folder / kind, pretrained=str(folder / "model"), dtype="float32", **arguments)


def accuracy(results):
    return results["results"]["words"]["exact_match,answer"]


def test_full_answers_as_without_compression_and_a_small_budget_does_not(folder):
    full, small = (
        evaluate(folder, **fields) for fields in ({"recipe": "full"}, {"recipe": "snapkv", "budget": 10, "buffer": 4})
    )
    assert accuracy(full) == 1.0
    assert accuracy(small) < 1.0
    assert full["results"]["words"]["sample_len"] == small["results"]["words"]["sample_len"] == 6
    recipe = small["config"]["kvcompress"]
    assert (recipe["name"], recipe["budget"], recipe["buffer"]) == ("snapkv", 10, 4)


def test_cache_is_bounded(folder):
    model = CompressedLM(str(folder / "model"), "vase-attnv", budget=16, buffer=4, device="cpu", dtype="float32")
    ids = torch.randint(6, 100, (2, 50), generator=torch.Generator().manual_seed(0))
    model.model.generate(input_ids=ids, max_new_tokens=30, min_new_tokens=30, do_sample=False)
    assert model.stats().tokens_seen == [79, 79]
    assert max(model.stats().tokens_kept) < 20


def test_tasks_that_do_not_generate_are_refused(folder):
    with pytest.raises(KVCompressError, match=r"tasks: one of them asks for loglikelihood, .* full cache"):
        evaluate(folder, "loglikelihood", recipe="full")


def test_bad_settings_are_refused_before_the_model_is_loaded(folder):
    with pytest.raises(ConfigError, match="did you mean 'snapkv'"):
        CompressedLM("no/such/model", "snapvk")
    with pytest.raises(ConfigError, match="budget"):
        CompressedLM("no/such/model", "snapkv", budget=-3)
    with pytest.raises(KVCompressError, match="--model: is kvcompress here"):
        main(["--model", "hf"])


def test_command(folder):
    command = [
        *(sys.executable, "-c", "from kvcompress.cli import main; main()", "lm-eval"),
        *("--model_args", f"pretrained={folder / 'model'},recipe=snapkv,budget=10,buffer=4,dtype=float32"),
        *("--tasks", str(folder / "generate_until" / "words.yaml"), "--device", "cpu", "--batch_size", "2"),
        *("--output_path", str(folder / "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exact_match" in done.stdout
    (written,) = folder.glob("out/**/results*.json")
    document = json.loads(written.read_text())
    assert document["config"]["model"] == "kvcompress"
    assert document["config"]["kvcompress"]["budget"] == 10


def test_the_bundled_reasoner(tmp_path):
    problems = [generate("store", evaluation_seed(index), difficulty=2, redundancy=2) for index in range(6)]
    rows = [{"question": problem.prompt, "answer": problem.answer} for problem in problems]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_task(tmp_path, tmp_path / "data.jsonl", until=".", tokens=300, answer=">([a-z0-9]+)")
    full = run(tmp_path, pretrained="reasoner", recipe="full")
    assert accuracy(full) == 1.0
    assert full["config"]["model_num_parameters"] > 900_000
    assert accuracy(run(tmp_path, pretrained="reasoner", recipe="evict-random", budget=24, buffer=8)) < 0.5


@pytest.mark.slow
def test_smollm2(tmp_path):
    """Under ``full`` SmolLM2 answers as lm-eval's own model does, and within a budget it still gives answers."""
    model, tokenizer = load_model("smollm2", dtype="float32", device="cpu")
    countries = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid", "Egypt": "Cairo"}
    shots = "".join(f"The capital of {country} is {city}.\n" for country, city in list(countries.items())[:2]) * 8
    rows = [{"question": f"{shots}The capital of {country} is", "answer": city} for country, city in countries.items()]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_task(tmp_path, tmp_path / "data.jsonl", until="\\n", tokens=6, answer="([A-Z][a-z]+)")
    own = run(tmp_path, "hf", pretrained=model, tokenizer=tokenizer)
    full = run(tmp_path, pretrained="smollm2", dtype="float32", recipe="full")
    small = run(tmp_path, pretrained="smollm2", dtype="float32", recipe="vase-attnv", budget=64, buffer=16)
    written, own_written = ([s["resps"] for s in results["samples"]["words"]] for results in (full, own))
    assert written == own_written
    assert accuracy(full) == accuracy(own) >= 0.8
    assert accuracy(small) >= 0.6
