"""The evaluation runner: answers that don't depend on the batch, runs that survive being killed, honest summaries."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_model import WORDS, save_text_model
from tiny import prompt, tiny
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.errors import KVCompressError
from kvcompress.eval import EvalRequest, JsonTask, evaluate, parse_task, read_samples, read_timings, records, summarize
from kvcompress.eval.generation import MAX_PERIOD, Sampling, answer_batch, choose, gumbel_noise, loop_of
from kvcompress.eval.runner import fingerprint, sequence_bytes
from kvcompress.eval.summary import ALL_TASKS, estimate, stratified_estimate
from kvcompress.footprint import cache_bytes
from kvcompress.plan import measure
from kvcompress.reasoner.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, build_tokenizer
from kvcompress.shapes import layer_shapes

SAMPLED = {"temperature": 1.0, "top_p": 0.95}
# Protecting, scoring and sampling stages, a deferred prompt, codes with and without eviction, nothing at all.
RECIPES = ("full", "snapkv", "vase-attnv", "vase-dkv", "random-prompt", "int4", "vase-attnv-int4")


@cache
def model_and_tokenizer(seed: int = 0, head_dim: int = 16) -> tuple[Any, Any]:
    """A random Qwen3 that reads and writes the reasoner's characters; it ends an answer now and then."""
    ids = {"eos_token_id": EOS_ID, "bos_token_id": BOS_ID, "pad_token_id": PAD_ID}
    model = tiny("qwen3", seed=seed, head_dim=head_dim, vocab_size=len(VOCABULARY), **ids)
    return model, build_tokenizer()


def request(**changes: Any) -> EvalRequest:
    settings: dict[str, Any] = {
        "recipes": ["full", "vase-attnv"],
        "budgets": ["24"],
        "buffer": 6,
        "tasks": ["program:1", "store:1:0"],
        "problems": 4,
        "max_new_tokens": 30,
        "batch_size": 4,
        **SAMPLED,
    }
    return EvalRequest.of(**{**settings, **changes})


def run(folder: Path, asked: EvalRequest, load: Any = model_and_tokenizer) -> bytes:
    """The samples of a run, byte for byte."""
    evaluate(asked, folder, load)
    return (folder / "samples.jsonl").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a whole run of ``request()``."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, request())
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def samples_of(folder: Path) -> bytes:
    return (folder / "samples.jsonl").read_bytes()


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"problems": 5, "temperature": 0.0, "top_p": 1.0}, {"problems": 3, "samples": 2, **SAMPLED}],
    ids=["greedy", "sampled"],
)
def test_the_batch_size_changes_nothing(tmp_path, changes):
    common = {"recipes": RECIPES, "tasks": ["program:1"], "budgets": ["36"], "max_new_tokens": 40, **changes}
    alone = run(tmp_path / "1", request(batch_size=1, **common))
    assert run(tmp_path / "5", request(batch_size=5, **common)) == alone
    samples = read_samples(tmp_path / "1")
    assert len(samples) == len(RECIPES) * (5 if changes["problems"] == 5 else 6)
    assert len({sample["prompt_tokens"] for sample in samples}) > 1
    assert sum(sample["events"] for sample in samples) > len(samples)
    assert len({sample["output"] for sample in samples}) > len(samples) / 2


@pytest.mark.parametrize("recipe", ["full", "snapkv", "int4"])
def test_greedy_answers_are_those_of_the_models_own_generate(recipe):
    model, tokenizer = model_and_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("p0:Aa=3;?a:A:", "s1:Ba=4;Cb=7;Da=5;#wait;?ab:BCD:", "l0:")]
    fields = {"budget": 16, "buffer": 4} if recipe == "snapkv" else {}
    with kvcompress.apply(model, recipe, **fields) as handle:
        answers = answer_batch(
            handle, prompts, [7, 8, 9], ends={EOS_ID}, max_new_tokens=40, sampling=Sampling(temperature=0)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            output = model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=40
            )[0, len(prompt) :].tolist()
            assert answer.tokens == [token for token in output if token != EOS_ID]
            assert answer.finished == (output[-1] == EOS_ID)
            assert answer.written == len(output)
            stats = handle.stats()
            assert (answer.seen, answer.kept) == (stats.tokens_seen[0], stats.tokens_kept[0])
            assert answer.events == stats.events[0]


def test_rows_that_have_finished_leave_the_batch():
    model, tokenizer = model_and_tokenizer()
    prompts = [tokenizer(f"p0:Aa={number};?a:A:")["input_ids"] for number in range(8)]
    keys = list(range(8))
    rows: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True)
    # Ten ends, so that answers are short and of different lengths.
    settings: dict[str, Any] = {"ends": range(10), "max_new_tokens": 60, "sampling": Sampling(temperature=1.0)}
    with kvcompress.apply(model, "vase-attnv", budget=16, buffer=4) as handle:
        together = answer_batch(handle, prompts, keys, **settings)
        widths = list(rows)
        alone = [answer_batch(handle, [p], [k], **settings)[0] for p, k in zip(prompts, keys, strict=True)]
    hook.remove()
    assert together == alone
    lengths = sorted(answer.written for answer in together)
    assert lengths[0] < lengths[-1]
    assert len(widths) == lengths[-1]
    for step, width in enumerate(widths):
        # A step comes after the prompt, or after a token that didn't end all answers.
        running = sum(length > step for length in lengths)
        assert running <= width
        assert width == 8 or 2 * running > width


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "gpt2", "opt"])
def test_other_architectures_answer_alike_in_any_batch(kind):
    model = tiny(kind, attention="eager" if kind == "gpt_oss" else "sdpa")
    prompts = [prompt(length, seed=length)[0].tolist() for length in (5, 24, 11, 2)]
    settings: dict[str, Any] = {"ends": range(12), "max_new_tokens": 30, "sampling": Sampling(temperature=0.9)}
    with kvcompress.apply(model, "vase-attnv", budget=16, buffer=4) as handle:
        together = answer_batch(handle, prompts, [1, 2, 3, 4], **settings)
        alone = [answer_batch(handle, [p], [k], **settings)[0] for p, k in zip(prompts, (1, 2, 3, 4), strict=True)]
    assert together == alone
    assert len({answer.written for answer in together}) > 1


def test_sampled_tokens_follow_the_distribution():
    scipy_stats = pytest.importorskip("scipy.stats")
    draws, vocabulary = 20_000, 6
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    keys = torch.arange(draws) * 7919 - 50_000
    drawn = choose(logits.expand(draws, -1), keys, 3, Sampling(temperature=0.7))
    expected = torch.softmax(logits.double() / 0.7, dim=0) * draws
    observed = torch.bincount(drawn, minlength=vocabulary)
    assert scipy_stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3
    # 0.8 of the mass takes the first two: 0.60 + 0.22 at temperature 1.
    kept = choose(logits.expand(draws, -1), keys, 3, Sampling(temperature=1.0, top_p=0.75))
    assert set(kept.tolist()) == {0, 1}


def test_noise_depends_on_seed_sequence_step_and_token_only():
    keys = torch.tensor([5, -(2**63), 2**62, 5])
    noise = gumbel_noise(1, keys, 9, 10)
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(gumbel_noise(1, keys[1:2], 9, 7)[0], noise[1, :7])
    rows = torch.cat([noise[:3], gumbel_noise(2, keys[:3], 9, 10), gumbel_noise(1, keys[:3], 10, 10)])
    assert len(set(rows.flatten().tolist())) == rows.numel()


def naive_loop(tokens: list[int]) -> tuple[int, int] | None:
    """The shortest period of which at least three copies, all spelled out, are the end of the text."""
    for period in range(1, MAX_PERIOD + 1):
        unit = tokens[len(tokens) - period :]
        if len(tokens) >= 3 * period and tokens[len(tokens) - 3 * period :] == unit * 3:
            length = 3 * period
            endless = unit * (len(tokens) + 1)
            while length < len(tokens) and tokens[len(tokens) - length - 1 :] == endless[-length - 1 :]:
                length += 1
            return period, length
    return None


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(0, 5))
def test_loops_are_found_exactly(start, unit, copies):
    tokens = start + unit * copies
    assert loop_of(tokens) == naive_loop(tokens)
    if copies >= 3:
        assert loop_of(tokens) is not None


@pytest.mark.parametrize("period", [1, 2, 199, 200, 201])
def test_loops_around_the_longest_period(period):
    unit = list(range(period))
    assert loop_of([*unit, *unit, *unit]) == ((period, 3 * period) if period <= MAX_PERIOD else None)
    assert loop_of([1000, *unit, *unit, *unit[: period // 2]]) is None or period == 1
    assert loop_of([*unit, *unit, *unit, 1000]) is None
    # Cut off in the middle of a copy.
    late = [*unit, *unit, *unit, *unit[: period // 2]]
    assert loop_of(late) == ((period, len(late)) if period <= MAX_PERIOD else None)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_sample_says_what_it_is(tmp_path):
    asked = request(samples=2, seed=5, budgets=["0.3"])
    document = evaluate(asked, tmp_path, model_and_tokenizer)
    samples, timings = read_samples(tmp_path), read_timings(tmp_path)
    assert [records.key_of(sample) for sample in samples] == [
        (recipe, budget, task, problem, number)
        for task in ("program:1", "store:1:0")
        for recipe, budget in (("full", "-"), ("vase-attnv", "0.3"))
        for problem in range(4)
        for number in range(2)
    ]
    shapes = layer_shapes(model_and_tokenizer()[0].config)
    for sample in samples:
        family, *dials = ("program", 1) if sample["task"] == "program:1" else ("store", 1, 0)
        problem = kvcompress.reasoner.generate(family, sample["problem_seed"], *dials)
        assert sample["problem_seed"] == -1 - sample["problem"]
        assert sample["prompt_tokens"] == len(problem.prompt) + 1
        assert sample["correct"] == kvcompress.reasoner.grade(problem, sample["output"])
        assert sample["finished"] or sample["output_tokens"] == 30
        config = kvcompress.load_config(sample["config"])
        seen = sample["prompt_tokens"] + sample["output_tokens"] - 1
        assert sample["kv_bytes"] == cache_bytes(config, shapes, seen, dtype="float32")
        if sample["recipe"] == "full":
            assert sample["tokens_kept"] == seen
        else:
            assert config.budget == int(0.3 * sample["context"] + 1e-9)
            assert (config.buffer, config.seed, sample["seed"]) == (6, 5, 5)
            assert sample["tokens_kept"] <= config.max_slots
    assert document["cells"][0]["context"] == max(
        len(problem.prompt) + len(problem.chain) + 2
        for problem in (kvcompress.reasoner.generate("program", -1 - number, 1) for number in range(4))
    )
    assert sum(len(timing["samples"]) for timing in timings) == len(samples)
    assert sum(timing["tokens"] for timing in timings) == sum(sample["output_tokens"] for sample in samples)
    assert json.loads((tmp_path / "run.json").read_text()) == document


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("recipe", ["full", "snapkv", "int4", "vase-attnv-int4"])
def test_bytes_of_a_sequence_are_what_its_own_cache_holds(kind, recipe):
    model = tiny(kind)
    tokens = 50
    config = kvcompress.load_config(recipe, {"budget": 24, "buffer": 8} if recipe not in ("full", "int4") else None)
    with kvcompress.apply(model, config, context_length=tokens) as handle:
        model.generate(torch.randint(2, 127, (1, 30)), max_new_tokens=tokens - 30 + 1, do_sample=False)
        held = handle.stats()
    assert held.tokens_seen == [tokens]
    size = measure(model.config, kind, "float32")
    # Transformers' sliding layers hold a counter besides, once per cache.
    assert held.bytes_held - size.own_bytes(tokens)[1] == sequence_bytes(config, size, tokens)


def test_equal_seeds_equal_samples(tmp_path, finished):
    assert run(tmp_path / "second", request()) == samples_of(finished)
    assert run(tmp_path / "other", request(seed=1)) != samples_of(finished)


def test_a_finished_run_needs_no_model(folder, finished):
    assert run(folder, request(), load=lambda: pytest.fail("a model was loaded")) == samples_of(finished)


class _Deadly:
    """The module ``os``, whose write number ``at`` writes a part and kills the process."""

    def __init__(self, at: int, part: float) -> None:
        self.at, self.part = at, part

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, handle: int, content: bytes) -> int:
        self.at -= 1
        if self.at < 0:
            os.write(handle, content[: math.ceil(self.part * len(content))])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(handle, content)

    def replace(self, *paths: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _run_to_death(folder: Path, at: int | None, part: float) -> None:
    torch.set_num_threads(1)
    if at is not None and at < 0:
        kvcompress.report.os = _Deadly(0, 0)
    elif at is not None:
        records.os = _Deadly(at, part)
    evaluate(request(), folder, model_and_tokenizer)


def test_killed_at_any_moment_a_run_loses_nothing_and_counts_nothing_twice(tmp_path, finished):
    expected = samples_of(finished)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvcompress.cli", "kvcompress.eval.runner", "transformers.models.qwen3"])
    # Writes of timings and samples take turns. At the write of run.json; in the middle of a timing; before, in, and
    # after the samples of a batch; in the first batch and in later ones.
    moments = [(-1, 0.0), (0, 0.5), (0, 1.0), (1, 0.0), (1, 0.4), (1, 1.0), (3, 0.6), (2, 0.0)]
    folder = tmp_path / "killed"
    for number, (at, part) in enumerate(moments):
        process = context.Process(target=_run_to_death, args=(folder, at, part))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        samples = read_samples(folder) if number else []
        assert expected.startswith("".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples).encode())
    assert 0 < len(samples) < 16
    assert run(folder, request()) == expected
    assert len(read_timings(folder)) == len(read_timings(finished))


@pytest.mark.parametrize("size", [1, 5000, 15000])
def test_killed_from_outside(tmp_path, finished, size):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run_to_death, args=(tmp_path / "killed", None, 0.0))
    process.start()
    samples = tmp_path / "killed" / "samples.jsonl"
    while process.is_alive() and not (samples.exists() and samples.stat().st_size >= size):
        time.sleep(0.001)
    process.kill()
    process.join(60)
    assert run(tmp_path / "killed", request()) == samples_of(finished)


@given(st.floats(0, 1))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_torn_lines_are_dropped(folder, finished, share):
    expected = samples_of(finished)
    cut = int(share * len(expected))
    (folder / "samples.jsonl").write_bytes(expected[:cut])
    whole = expected[:cut].count(b"\n")
    assert len(read_samples(folder)) == whole
    with records.open_journal(folder):
        assert samples_of(folder) == b"".join(expected.splitlines(keepends=True)[:whole])


@pytest.mark.parametrize("lines", [0.5, 1.0, 5.3, 15.9])
def test_a_run_goes_on_after_a_torn_line(folder, finished, lines):
    kept = samples_of(finished).splitlines(keepends=True)
    torn = kept[int(lines)][: int(len(kept[int(lines)]) * (lines % 1))]
    (folder / "samples.jsonl").write_bytes(b"".join([*kept[: int(lines)], torn]))
    assert run(folder, request()) == samples_of(finished)
    assert len(read_timings(folder)) == 4


def test_other_batches_take_up_a_run(folder, finished):
    kept = b"".join(samples_of(finished).splitlines(keepends=True)[:6])
    (folder / "samples.jsonl").write_bytes(kept)
    assert run(folder, request(batch_size=3)).startswith(kept)
    assert [*map(records.key_of, read_samples(folder))] == [*map(records.key_of, read_samples(finished))]


@pytest.mark.parametrize(
    ("changes", "place", "old", "new"),
    [
        ({"budgets": ["25"]}, "settings.1.budget", '"24"', '"25"'),
        ({"seed": 1}, "seed", "0", "1"),
        ({"tasks": ["program:1", "store:2:0"]}, "tasks.1.name", '"store:1:0"', '"store:2:0"'),
        ({"problems": 5}, "problems", "4", "5"),
        ({"samples": 2}, "samples", "1", "2"),
        ({"temperature": 0.5}, "temperature", "1.0", "0.5"),
        ({"max_new_tokens": 31}, "max_new_tokens", "30", "31"),
        ({"buffer": 5}, "settings.1.config.buffer", "6", "5"),
        ({"model": "smollm2"}, "model", '"reasoner"', '"smollm2"'),
    ],
)
def test_another_request_is_refused(tmp_path, changes, place, old, new):
    asked = request()
    records.write_run(tmp_path, {"request": asked.document(), "cells": []})
    with pytest.raises(KVCompressError) as caught:
        evaluate(request(**changes), tmp_path, lambda: pytest.fail("a model was loaded"))
    assert str(caught.value).startswith(
        f"{place}: the run in {tmp_path} was made with {old}, this command asks for {new}"
    )


def test_other_weights_are_refused(folder):
    (folder / "samples.jsonl").write_bytes(samples_of(folder)[:3000])
    with pytest.raises(KVCompressError, match=r"^model\.fingerprint: "):
        run(folder, request(), load=lambda: model_and_tokenizer(1))
    assert fingerprint(model_and_tokenizer()[0]) == fingerprint(copy.deepcopy(model_and_tokenizer()[0]))


def test_a_folder_in_use_is_refused(folder):
    (folder / "samples.jsonl").write_bytes(b"")
    with records.open_journal(folder), pytest.raises(KVCompressError, match="is in use by another evaluation"):
        run(folder, request())
    # Nor may a process that comes in second write what was asked for.
    (folder / "run.json").unlink()
    with records.open_journal(folder), pytest.raises(KVCompressError, match="is in use by another evaluation"):
        run(folder, request(seed=1))
    assert not (folder / "run.json").exists()


def test_folders_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(KVCompressError, match=r"has samples\.jsonl but no run\.json"):
        run(tmp_path, request())
    (tmp_path / "run.json").write_text('{"name": "Bolt"}')
    with pytest.raises(KVCompressError, match=r"is not the run\.json of an evaluation"):
        run(tmp_path, request())
    (tmp_path / "file").touch()
    with pytest.raises(KVCompressError, match="cannot be made"):
        run(tmp_path / "file", request())


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", b"\n"])
def test_lines_that_are_no_samples_are_named(folder, line):
    first = samples_of(folder).splitlines(keepends=True)[0]
    (folder / "samples.jsonl").write_bytes(first + line)
    with pytest.raises(KVCompressError, match=r"line 2 is "):
        run(folder, request())
    (folder / "samples.jsonl").write_bytes(first * 2)
    with pytest.raises(KVCompressError, match="line 2 repeats a sample"):
        run(folder, request())


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [None, "model"])
def test_equal_bytes(tmp_path, storage):
    recipes = ["full", "snapkv", "int4", "vase-attnv-int4", "kivi"]
    sizes = {"buffer": 32, "budgets": (), "equal_bytes": ["0.6", "0.7", "1KiB"], "problems": 2, "storage": storage}
    asked = request(recipes=recipes, tasks=["program:1"], context=400, **sizes)
    document = evaluate(asked, tmp_path, lambda: model_and_tokenizer(head_dim=32))
    shapes = layer_shapes(model_and_tokenizer(head_dim=32)[0].config)
    cells = {(cell["recipe"], cell["budget"]): kvcompress.load_config(cell["config"]) for cell in document["cells"]}
    # 16 bits unless told otherwise.
    full = cache_bytes(kvcompress.load_config("full"), shapes, 400, dtype="float32" if storage else "float16")
    assert {config.storage for config in cells.values()} == {storage or "float16"}
    # kivi has nothing to choose, so it is evaluated once.
    assert set(cells) == {("full", "-"), ("kivi", "-")} | {
        (recipe, budget) for recipe in ("snapkv", "int4", "vase-attnv-int4") for budget in ("0.6", "0.7")
    }
    for (recipe, budget), config in cells.items():
        if budget != "-":
            taken = cache_bytes(config, shapes, 400, dtype="float32")
            assert 0.9 * float(budget) * full < taken <= float(budget) * full, (recipe, budget)
    expected = [f"left out: {recipe} at 1KiB on program:1: {recipe}: takes at least" for recipe in recipes[1:]]
    left_out = [note for note in document["notes"] if "evicts nothing" not in note]
    for note, start in zip(left_out, expected, strict=True):
        assert note.startswith(start)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": ["snapk"]}, "recipe: 'snapk' is not a packaged recipe; did you mean 'snapkv'?"),
        ({"recipes": []}, "recipes: none given"),
        ({"recipes": ["full", "full"]}, "recipe: 'full' is given twice"),
        ({"budgets": ["many"]}, "budget: 'many' is not a number of tokens, nor a ratio between 0 and 1"),
        ({"budgets": ["1.5"]}, "budget: '1.5' is not a number of tokens, nor a ratio between 0 and 1"),
        ({"budgets": ["24", "24"]}, "budget: '24' is given twice"),
        ({"budgets": ["5"]}, "vase-attnv: buffer: 6 must be smaller than budget 5"),
        ({"recipes": ["full"]}, "override 'budget': fits none of the recipes full"),
        ({"equal_bytes": ["0.5"]}, "budgets: given together with equal bytes"),
        ({"budgets": [], "equal_bytes": ["half"]}, "equal bytes: 'half' is not a quantity"),
        ({"budgets": [], "equal_bytes": ["0.5"], "recipes": ["full"], "buffer": None}, "equal bytes: none of the"),
        ({"tasks": []}, "tasks: none given"),
        ({"tasks": ["puzzle"]}, "task: 'puzzle' is not FAMILY"),
        ({"tasks": ["sort:1:2:3"]}, "task: 'sort:1:2:3' is not FAMILY"),
        ({"tasks": ["sort:x"]}, "task: 'sort:x': difficulty 'x' is not a whole number"),
        ({"tasks": ["sort:99"]}, "task: 'sort:99': difficulty: 99 is not in 1 to "),
        ({"tasks": ["sort:1:99"]}, "task: 'sort:1:99': redundancy: 99 is not in 0 to "),
        ({"tasks": ["sort"], "difficulty": 0}, "task: 'sort': difficulty: 0 is not in 1 to "),
        ({"tasks": ["sort:4", "sort"]}, "tasks: 'sort:4' is given twice"),
        ({"tasks": ["absent.json"]}, "task: file absent.json cannot be read: No such file or directory"),
        ({"problems": 0}, "problems: 0 must be at least 1"),
        ({"samples": 0}, "samples: 0 must be at least 1"),
        ({"batch_size": 0}, "batch_size: 0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 must be at least 1"),
        ({"temperature": -1.0}, "temperature: -1.0 must be 0 (greedy) or a positive number"),
        ({"temperature": float("nan")}, "temperature: nan must be 0 (greedy) or a positive number"),
        ({"temperature": 0.0}, "top_p: 0.95 has no effect at temperature 0"),
        ({"top_p": 0.0}, "top_p: 0.0 must be above 0 and at most 1"),
        ({"seed": -1}, "seed: -1 must be at least 0 and below 2**64"),
        ({"backend": "fast"}, "backend: 'fast' is not one of auto, triton, flash_attn, torch"),
    ],
)
def test_bad_requests_are_refused(changes, message):
    with pytest.raises(KVCompressError) as caught:
        request(**changes)
    assert str(caught.value).startswith(message)


def test_recipes_without_room_are_left_out_and_named(tmp_path):
    # random-prompt protects prompts, which are about as long as the budget.
    asked = request(recipes=["full", "snapkv", "random-prompt"], budgets=["24"])
    document = evaluate(asked, tmp_path / "tokens", model_and_tokenizer)
    assert len(document["cells"]) == 4
    for note, task in zip(document["notes"], ("program:1", "store:1:0"), strict=True):
        assert note.startswith(f"left out: random-prompt at 24 on {task}: budget: 24 leaves 18 slots")
    document = evaluate(
        request(recipes=["int4", "kivi"], budgets=(), buffer=32), tmp_path / "codes", model_and_tokenizer
    )
    assert {cell["recipe"] for cell in document["cells"]} == {"int4"}
    assert "kivi at - on program:1: quantize.values.group: 32 does not divide head size 16" in document["notes"][0]
    document = evaluate(request(budgets=["0.02", "0.28"]), tmp_path / "ratios", model_and_tokenizer)
    assert [cell["budget"] for cell in document["cells"]] == ["-", "0.28", "-", "0.28"]
    assert all("at 0.02 on" in note and "budget: 0.02 of a context of" in note for note in document["notes"])
    with pytest.raises(KVCompressError, match=r"^budgets: none leaves a recipe that compresses; left out: vase-attnv"):
        run(tmp_path / "none", request(budgets=["0.02"]))
    assert list((tmp_path / "none").iterdir()) == []


def test_budgets_that_evict_nothing_are_named(tmp_path):
    document = evaluate(request(tasks=["store:1:0"], budgets=["30", "90"]), tmp_path, model_and_tokenizer)
    longest = max(sample["prompt_tokens"] for sample in read_samples(tmp_path)) + 30
    assert document["notes"] == [
        "vase-attnv at 90 on store:1:0 evicts nothing: K + B is 96 tokens, prompt and answer have at most "
        f"{longest}; lower the budget or the buffer"
    ]
    assert {sample["events"] for sample in read_samples(tmp_path) if sample["budget"] == "90"} == {0}
    assert any(sample["events"] for sample in read_samples(tmp_path) if sample["budget"] == "30")


def test_errors_while_running_name_where_they_come_from(tmp_path):
    broken = copy.deepcopy(model_and_tokenizer()[0])
    torch.nn.init.constant_(broken.model.layers[1].self_attn.v_proj.weight, math.nan)
    with pytest.raises(kvcompress.NonFiniteError, match=r"^vase-attnv 24 program:1: "):
        run(tmp_path, request(recipes=["vase-attnv"], batch_size=2), lambda: (broken, build_tokenizer()))


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_of_the_reasoner():
    task = parse_task("sort", 3)
    assert (task.name, task.size) == ("sort:3", None)
    problem = kvcompress.reasoner.generate("sort", kvcompress.reasoner.evaluation_seed(7), 3)
    item = task.item(7)
    assert (item.prompt, item.seed, item.reference) == (problem.prompt, problem.seed, problem.chain)
    assert item.is_correct(problem.chain)
    assert not item.is_correct(problem.chain[:-1])
    assert parse_task("sort:2", 3).name == "sort:2"
    assert parse_task("sort:2:1").name == "sort:2:1"


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_tasks_in_a_file(tmp_path, suffix):
    problems = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "x?", "answer": "7", "pattern": r"x=(\d+)", "id": 3}]
    path = tmp_path / f"sums{suffix}"
    content = json.dumps(problems) if suffix == ".json" else "\n".join(map(json.dumps, problems)) + "\n\n"
    path.write_text(content, encoding="utf-8")
    task = parse_task(str(path))
    assert (task.name, task.size, task.item(1).seed, task.item(0).prompt) == ("sums", 2, 1, "2 + 2?")
    right = ("4", "It is 4.", "**4**", "4 .\n", "x=4", "(4)", '"4."', "$4$")
    wrong = ("14", "4 apples", "", "1.4", "-4", "1,4", "1/4", "b4", "44", "4!", " .")
    assert [task.item(0).is_correct(text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)
    graded = [task.item(1).is_correct(text) for text in ("x=7", "x=3, no, x=7, that is", "x=7, no, x=3", "7")]
    assert graded == [True, True, False, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not valid JSON"),
        ("{}", "holds dict, not a list of problems"),
        ("[]", "holds no problems"),
        ("[3]", "problem 0: 3 is not an object with prompt and answer"),
        ('[{"prompt": "a"}]', "problem 0: answer: missing or empty"),
        ('[{"prompt": " ", "answer": "b"}]', "problem 0: prompt: missing or empty"),
        ('[{"prompt": "a", "answer": "."}]', "problem 0: answer: missing or empty"),
        ('[{"prompt": "a", "answer": 4}]', "problem 0: answer: 4 is not text"),
        ('[{"prompt": "a", "answer": "b", "pattern": "("}]', "problem 0: pattern: '(' is no regular expression"),
        ('[{"prompt": "a", "answer": "b", "pattern": "b"}]', "problem 0: pattern: 'b' has 0 groups; it must have one"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    path = tmp_path / "task.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(KVCompressError) as caught:
        JsonTask(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_more_problems_than_a_file_has(tmp_path):
    (tmp_path / "one.json").write_text('[{"prompt": "a", "answer": "b"}]', encoding="utf-8")
    with pytest.raises(KVCompressError, match=r"^problems: 4 asked for, but task 'one' has only 1$"):
        request(tasks=[str(tmp_path / "one.json")])


# -- summary -----------------------------------------------------------------------------------------------------------


def made_up(rng: random.Random, problems: int = 30, samples: int = 3) -> list[dict[str, Any]]:
    """Samples of three recipes, two of them at two budgets, on two tasks; some are missing."""
    return [
        {
            "recipe": recipe,
            "budget": budget,
            "task": task,
            "problem": problem,
            "sample": sample,
            "correct": rng.random() < (problem % 7) / 7,
            "loop": rng.random() < 0.2,
            "finished": rng.random() < 0.7,
            "output_tokens": rng.randrange(1, 500),
            "kv_bytes": rng.randrange(1, 10**6),
            "tokens_kept": rng.randrange(1, 100),
        }
        for task in ("t", "u")
        for recipe, budget in (("full", "-"), ("a", "1"), ("a", "2"), ("b", "1"), ("b", "2"))
        for problem in range(problems)
        for sample in range(samples)
        if recipe != "b" or rng.random() < 0.8
    ]


def test_summary_against_plain_loops():
    samples = made_up(random.Random(3))
    timings = [
        {"recipe": "a", "budget": "1", "task": "t", "tokens": 30, "seconds": 2.0},
        {"recipe": "a", "budget": "1", "task": "t", "tokens": 10, "seconds": 3.0},
    ]
    rows = [row for row in summarize(samples, timings, against=["b"]) if row.task != ALL_TASKS]
    assert len(rows) == 10

    def rates(recipe, budget, task):
        grades: dict[int, list[int]] = {}
        for s in samples:
            if (s["recipe"], s["budget"], s["task"]) == (recipe, budget, task):
                grades.setdefault(s["problem"], []).append(int(s["correct"]))
        return {problem: sum(values) / len(values) for problem, values in grades.items()}

    for row in rows:
        cell = (row.recipe, row.budget, row.task)
        own = [s for s in samples if (s["recipe"], s["budget"], s["task"]) == cell]
        assert row.samples == len(own)
        assert row.problems == len(rates(*cell))
        assert row.pass_at_1.mean == pytest.approx(statistics.mean(rates(*cell).values()))
        for share, of in ((row.loops, lambda s: s["loop"]), (row.unfinished, lambda s: not s["finished"])):
            by_problem = [[of(s) for s in own if s["problem"] == p] for p in {s["problem"] for s in own}]
            means = [statistics.mean(map(int, answers)) for answers in by_problem]
            assert share.mean == pytest.approx(statistics.mean(means))
            spread = statistics.pstdev(means) / math.sqrt(len(means))
            assert share.standard_error == pytest.approx(spread, rel=0.05)
        for field in ("output_tokens", "kv_bytes", "tokens_kept"):
            assert getattr(row, field) == pytest.approx(statistics.mean(s[field] for s in own))
        assert row.tokens_per_second == (8.0 if cell == ("a", "1", "t") else None)
        rivals = {"full": ("full", "-", row.task), "b": ("b", row.budget, row.task)}
        expected = {name for name in rivals if name != row.recipe and (name != "b" or row.budget != "-")}
        assert set(row.versus) == expected
        for name in expected:
            mine, theirs = rates(*cell), rates(*rivals[name])
            differences = [mine[p] - theirs[p] for p in mine if p in theirs]
            assert row.versus[name].mean == pytest.approx(statistics.mean(differences))
            spread = statistics.pstdev(differences) / math.sqrt(len(differences))
            assert row.versus[name].standard_error == pytest.approx(spread, rel=0.05)


def test_the_bootstrap_is_what_a_plain_one_gives():
    values = [random.Random(1).random() ** 3 for _ in range(25)]
    rng = np.random.default_rng(9)
    means = [statistics.mean(values[i] for i in rng.integers(25, size=25)) for _ in range(4000)]
    assert estimate(values, 9).standard_error == pytest.approx(statistics.pstdev(means), rel=1e-5)


def test_standard_errors_match_theory():
    # Of n yes-or-no answers with share p: sqrt(p (1 - p) / n).
    for right, n in ((60, 200), (5, 40), (180, 200)):
        result = estimate([1.0] * right + [0.0] * (n - right))
        p = right / n
        assert result.mean == pytest.approx(p)
        assert result.standard_error == pytest.approx(math.sqrt(p * (1 - p) / n), rel=0.05)
    assert estimate([1.0] * 9).standard_error == 0.0
    assert estimate([0.3] * 60, 1) == estimate([0.3] * 60, 1)
    assert estimate([0.0, 1.0, 1.0], 1) != estimate([0.0, 1.0, 1.0], 2)


def test_samples_of_one_problem_do_not_count_as_problems():
    samples = [
        {**made_up(random.Random(0), 1, 1)[0], "problem": p, "sample": s, "correct": p % 2 == 0}
        for p in range(10)
        for s in range(50)
    ]
    (row,) = summarize(samples)
    assert row.pass_at_1.standard_error == pytest.approx(0.5 / math.sqrt(10), rel=0.05)


def test_a_paired_difference_is_sharper_than_two_errors():
    # 50 problems that all recipes solve, 50 that none does, and one more for a.
    base = made_up(random.Random(0), 1, 1)[0]
    samples = [
        {**base, "recipe": recipe, "budget": "-", "problem": p, "correct": p < solved}
        for recipe, solved in (("full", 50), ("a", 51))
        for p in range(100)
    ]
    full, row = summarize(samples)
    assert row.versus["full"].mean == pytest.approx(0.01)
    assert row.versus["full"].standard_error == pytest.approx(math.sqrt(0.01 * 0.99 / 100), rel=0.05)
    assert row.pass_at_1.standard_error == pytest.approx(0.05, rel=0.05)
    assert full.versus == {}


def test_the_mean_over_tasks_against_plain_loops():
    samples = made_up(random.Random(3))
    rows = summarize(samples, against=["b"])
    means = [row for row in rows if row.task == ALL_TASKS]
    assert rows[-5:] == means
    assert [(row.recipe, row.budget) for row in means] == [
        ("full", "-"),
        ("a", "1"),
        ("a", "2"),
        ("b", "1"),
        ("b", "2"),
    ]
    for mean in means:
        parts = [row for row in rows[:-5] if (row.recipe, row.budget) == (mean.recipe, mean.budget)]
        assert [part.task for part in parts] == ["t", "u"]
        assert (mean.problems, mean.samples) == (sum(p.problems for p in parts), sum(p.samples for p in parts))
        for field in ("output_tokens", "kv_bytes", "tokens_kept"):
            assert getattr(mean, field) == pytest.approx(statistics.mean(getattr(p, field) for p in parts))
        estimates = [(mean.versus[name], [p.versus[name] for p in parts]) for name in mean.versus]
        estimates += [
            (getattr(mean, field), [getattr(p, field) for p in parts]) for field in ("pass_at_1", "loops", "unfinished")
        ]
        for whole, of_tasks in estimates:
            assert whole.mean == pytest.approx(statistics.mean(e.mean for e in of_tasks))
            # Tasks are independent of each other.
            independent = math.hypot(*(e.standard_error for e in of_tasks)) / 2
            assert whole.standard_error == pytest.approx(independent, rel=0.05)
        assert set(mean.versus) == set(parts[0].versus)


def test_the_stratified_bootstrap_is_what_a_plain_one_gives():
    rng = random.Random(5)
    strata = [[rng.random() ** power for _ in range(count)] for power, count in ((1, 40), (5, 12))]
    draws = np.random.default_rng(0)
    means = [
        statistics.mean(statistics.mean(values[i] for i in draws.integers(len(values), size=len(values)))
                        for values in strata)
        for _ in range(4000)
    ]  # fmt: skip
    result = stratified_estimate(strata, 9)
    assert result.mean == pytest.approx(statistics.mean(map(statistics.mean, strata)))
    assert result.standard_error == pytest.approx(statistics.pstdev(means), rel=0.05)
    # The same values in both tasks: drawn together, they would be as uncertain as one task alone.
    alike = [[0.0, 1.0] * 50] * 2
    single = estimate(alike[0], 9).standard_error
    assert stratified_estimate(alike, 9).standard_error == pytest.approx(single / math.sqrt(2), rel=0.05)


def test_what_lacks_a_task_has_no_mean_and_one_task_needs_none():
    samples = [s for s in made_up(random.Random(3)) if s["recipe"] != "a" or s["task"] == "t"]
    means = [row.recipe for row in summarize(samples) if row.task == ALL_TASKS]
    assert means == ["full", "b", "b"]
    assert all(row.task == "t" for row in summarize(s for s in samples if s["task"] == "t"))
    # A file of that name is a task like any other.
    named = [{**s, "task": ALL_TASKS} if s["task"] == "u" else s for s in samples]
    assert sum(row.task == ALL_TASKS for row in summarize(named)) == 3
    assert sum(row.task == ALL_TASKS and row.problems > 30 for row in summarize(named)) == 0


def test_summaries_of_nothing_and_against_nobody():
    assert summarize([]) == []
    with pytest.raises(KVCompressError, match=r"^against: 'c' is none of the recipes full, a, b$"):
        summarize(made_up(random.Random(0)), against=["c"])


# -- command line ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> Path:
    folder = save_text_model(tmp_path_factory.mktemp("model"))
    problems = [
        {"prompt": " ".join(WORDS[(7 * i + j) % 100] for i in range(10 + 3 * j)), "answer": WORDS[j]} for j in range(4)
    ]
    (folder / "words.json").write_text(json.dumps(problems), encoding="utf-8")
    return folder


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.mark.parametrize("columns", ["40", "80", "160"])
def test_tables_are_not_cut_off(folder, monkeypatch, columns):
    from kvcompress.cli_eval import summary_tables

    monkeypatch.setenv("COLUMNS", columns)
    rows = summarize(read_samples(folder), read_timings(folder), against=["vase-attnv"])
    result = invoke(
        "-r", "full,vase-attnv", "-b", 24, "--buffer", 6, "-t", "program:1,store:1:0", "-p", 4, "-n", 30,
        "--temperature", 1.0, "--top-p", 0.95, "--batch-size", 4, "-o", folder,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert len(list(summary_tables(rows))) == 3
    assert "…" not in result.stdout
    assert result.stdout.count(" vase-attnv ") == 3
    assert result.stdout.count("pass@1, loops and cut in %") == 1


def test_command_line_end_to_end(text_model, tmp_path):
    command = (
        "--model", text_model, "-r", "full,snapkv", "-r", "vase-attnv", "-b", "16", "--buffer", 4, "-p", 4, "-s", 2,
        "-t", text_model / "words.json", "-n", 12, "--temperature", 1, "--against", "snapkv", "-o", tmp_path / "out",
    )  # fmt: skip
    result = invoke(*command, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    rows = {row["recipe"]: row for row in document["rows"]}
    assert set(rows) == {"full", "snapkv", "vase-attnv"}
    assert [rows[name]["samples"] for name in rows] == [8, 8, 8]
    assert set(rows["vase-attnv"]["versus"]) == {"full", "snapkv"}
    assert rows["full"]["unfinished"] == {"mean": 1.0, "standard_error": 0.0}
    assert rows["snapkv"]["kv_bytes"] < rows["full"]["kv_bytes"]
    assert rows["full"]["tokens_per_second"] > 0
    assert set(document["definitions"]) == {
        *(name for name in rows["full"] if name not in ("recipe", "budget", "task", "problems", "samples")),
        "standard_error",
        "all_tasks",
    }  # fmt: skip
    assert json.loads((tmp_path / "out/summary.json").read_text()) == document
    again = invoke(*command)
    assert again.exit_code == 0
    assert "pass@1" in again.stdout
    assert all(name in again.stdout for name in rows)
    assert invoke(*command, "--json").stdout == result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-r", "snapk"), "recipe: 'snapk' is not a packaged recipe"),
        (("-t", "puzzle"), "task: 'puzzle' is not FAMILY"),
        (("-b", "none"), "budget: 'none' is not a number of tokens"),
        (("--against", "tova"), "--against: 'tova' is none of the recipes full, snapkv, r-kv, vase-attnv"),
        (("-o", "/dev/null/run"), "folder: /dev/null/run cannot be made"),
        (("-m", "/no/such/model"), "model: no folder '/no/such/model'"),
    ],
)
def test_command_line_errors(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"kvcompress: error: {message}")
    assert result.stderr.count("\n") == 1


def test_the_bar_is_quiet_without_a_terminal(monkeypatch, capsys):
    from kvcompress.cli_eval import progress_bar

    with progress_bar() as progress:
        progress("full - program:4", 3, 10)
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_the_time_left(monkeypatch):
    from io import StringIO

    from rich.console import Console

    from kvcompress import cli_eval, console

    told = StringIO()
    screen = Console(file=told, force_terminal=True, width=150)
    monkeypatch.setattr(console, "screen", lambda stderr: screen)
    with cli_eval.progress_bar() as progress:
        progress("", 3, 10)
        progress("full - program:4", 10, 10)
    assert "full - program:4" in told.getvalue()
    assert "10/10" in told.getvalue()
    assert "left" in told.getvalue()


# -- documentation -----------------------------------------------------------------------------------------------------


def test_the_documentation_works(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parent.parent / "docs/evaluation.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "task.json").write_text(listed, encoding="utf-8")
    task = JsonTask(tmp_path / "task.json")
    assert task.item(0).is_correct("It is **42**.")
    assert not task.item(0).is_correct("-42")
    assert task.item(1).is_correct(r"It is \boxed{Paris}, of course")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvcompress.reasoner.load", model_and_tokenizer)
    exec(code.replace("problems=200", "problems=1").replace('"sort:6"', '"sort:1"'), {})
    assert capsys.readouterr().out.count("sort:1") == 2
    sample = read_samples("runs/sort")[0]
    table = text.split("A line of `samples.jsonl`:")[1].split("The definition of a loop")[0]
    assert [field for field in sample if f"`{field}`" not in table] == []
