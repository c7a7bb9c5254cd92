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

TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<end>"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: {metric}}}]
"""


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
        task = TASK.format(data=place / "data.jsonl", kind=kind, metric=metric)
        (place / kind / "words.yaml").write_text(task)
    return place


def evaluate(folder, kind="generate_until", **arguments):
    return simple_evaluate(
        model="kvcompress",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32", **arguments},
        tasks=["words"],
        batch_size=3,
        device="cpu",
        task_manager=TaskManager(include_path=str(folder / kind), include_defaults=False),
        bootstrap_iters=0,
    )


def test_full_answers_as_without_compression_and_a_small_budget_does_not(folder):
    full, small = (
        evaluate(folder, **fields) for fields in ({"recipe": "full"}, {"recipe": "snapkv", "budget": 10, "buffer": 4})
    )
    assert full["results"]["words"]["exact_match,none"] == 1.0
    assert small["results"]["words"]["exact_match,none"] < 1.0
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
