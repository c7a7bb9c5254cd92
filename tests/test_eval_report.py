"""Reports of evaluations: the tables say what the summary says, the page stands alone, the maps are the cache's."""

from __future__ import annotations

import io
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from tiny import prompt, tiny
from typer.testing import CliRunner

import kvcompress
from kvcompress.cli import app
from kvcompress.errors import KVCompressError
from kvcompress.eval import EvalRequest, evaluate, read_samples, records, summarize
from kvcompress.eval.summary import ALL_TASKS
from kvcompress.eval_report import Recording, load_results, record, record_maps, write_report
from kvcompress.eval_report.accuracy import _telling, front_of
from kvcompress.eval_report.map_sections import ranges
from kvcompress.eval_report.pareto import pareto_front, staircase
from kvcompress.eval_report.pictures import EVICTED, TO_COME, limits, states, text_lines
from kvcompress.eval_report.recording import RECENT, SCORED
from kvcompress.eval_report.results import EVICTION, HYBRID, NONE, QUANTIZATION
from kvcompress.model import cache_keyword
from kvcompress.reasoner.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, build_tokenizer
from kvcompress.report import format_bytes

HOSTILE = "<script>alert('1 & 2')</script>"
TASKS = ("program:1", "a$b$ <i>")
RECIPES = ("full", "int4", "snapkv", "vase-attnv", "vase-attnv-int4")


def synthetic(
    folder: Path,
    recipes: tuple[str, ...] = RECIPES,
    budgets: tuple[str, ...] = ("48", "64"),
    tasks: tuple[str, ...] = TASKS,
    problems: int = 12,
    seed: int = 0,
    by_bytes: bool = False,
    **changes: Any,
) -> Path:
    """A run folder as ``kvcompress eval`` leaves it, of made-up samples."""
    folder.mkdir(parents=True)
    rng = Random(seed)
    cells, samples, settings = [], [], []
    for task in tasks:
        for recipe in recipes:
            own = kvcompress.load_config(recipe)
            for budget in budgets if own.evicts or (by_bytes and own.stages) else ("-",):
                fields = {"budget": 48 if by_bytes else int(budget), "buffer": 8} if own.evicts else {}
                config = kvcompress.load_config(recipe, **fields).model_dump(mode="json")
                settings.append({"recipe": recipe, "budget": budget, "target": 0.25 if by_bytes else None})
                cell = {"recipe": recipe, "budget": budget, "task": task, "config": config}
                cells.append({**cell, "context": 90, "max_new_tokens": 40})
                for problem in range(problems):
                    sample = {**cell, "problem": problem, "sample": 0, "correct": rng.random() < 0.6}
                    sample |= {"finished": rng.random() < 0.8, "loop": rng.random() < 0.3, "output": HOSTILE}
                    sample |= {
                        "output_tokens": rng.randint(5, 40),
                        "tokens_kept": 48,
                        "kv_bytes": rng.randint(900, 9000),
                    }
                    samples.append(sample)
    request = {
        "model": HOSTILE,
        "tasks": [{"name": task} for task in tasks],
        "problems": problems,
        "samples": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "chat": None,
        "settings": settings,
    }
    run: dict[str, Any] = {
        "request": request,
        "model": {"dtype": "float32", "fingerprint": "f00d"},
        "cells": cells,
        "notes": [f"left out: {HOSTILE}"],
        "command": f"kvcompress eval -m {HOSTILE}",
        "batch_size": 4,
        "device": "cpu",
        "versions": {"torch": "2.11", "flash-attn": None},
    }
    records.write_run(folder, {**run, **changes})
    with records.open_journal(folder) as journal:
        timing = {"recipe": "full", "budget": "-", "task": TASKS[0], "samples": [], "seconds": 1.0, "tokens": 9}
        journal.append(samples, timing)
    return folder


class Reader(HTMLParser):
    """Checks that tags are balanced; collects tables by caption, and everything that a page could load."""

    VOID = ("meta", "img", "br")

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.loaded: list[str] = []
        self.scopes: list[str | None] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert not any(name.startswith("on") for name in told)
        if tag == "img":
            assert told["alt"]
        if tag == "th":
            self.scopes.append(told.get("scope"))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            assert self._caption not in self.tables
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "caption" in self.open:
            self._caption += data
        elif "td" in self.open or "th" in self.open:
            self._rows[-1][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return synthetic(tmp_path_factory.mktemp("runs") / "run <b>")


@pytest.fixture(scope="module")
def written(run, tmp_path_factory) -> tuple[str, list[Path]]:
    """The page of a report with maps, and all files."""
    out = tmp_path_factory.mktemp("report")
    model, answer = tiny("qwen3"), prompt(60, seed=1)[0].tolist()
    watched = [
        record(model, kvcompress.load_config(recipe, budget=24, buffer=6), prompt(30)[0].tolist(), answer, budget="24")
        for recipe in ("snapkv", "vase-attnv")
    ]
    for recording in watched:
        recording.texts = ["<bos>", " ", "\n", "\U0001f600", "$"] * 18
    files = write_report(load_results([run], against="snapkv"), out, recordings=watched, command=f"report {HOSTILE}")
    return files[0].read_text(encoding="utf-8"), files


# -- the page ----------------------------------------------------------------------------------------------------------


def percent(estimate: Any, form: str = ".1f") -> str:
    return f"{100 * estimate.mean:{form}} ± {100 * estimate.standard_error:.1f}"


def test_the_tables_say_what_the_summary_says(run, written):
    tables = Reader(written[0]).tables
    rows = summarize(read_samples(run), against=["snapkv"])
    for task in (ALL_TASKS, *TASKS):
        of_task = [row for row in rows if row.task == task]
        head, *body = tables[f"Accuracy and bytes: {task}"]
        assert len(body) == len(of_task) == 8
        for row, cells in zip(of_task, body, strict=True):
            told = dict(zip(head, cells, strict=True))
            assert (told["recipe"], told["budget"], told["problems"]) == (row.recipe, row.budget, f"{row.problems}")
            assert told["pass@1, %"] == percent(row.pass_at_1)
            assert told["bytes per sequence"] == format_bytes(row.kv_bytes)
            expected = percent(row.versus["snapkv"], "+.1f") if "snapkv" in row.versus else "-"
            if row.recipe == "snapkv":
                expected = "reference"
            assert told["paired difference to snapkv"] == expected
        head, *body = tables[f"Loops and unfinished answers: {task}"]
        shown = [tuple(cells[-2:]) for cells in body]
        assert shown == [(percent(row.loops), percent(row.unfinished)) for row in of_task]
        head, *body = tables[f"Recipes at budget 48: {task}"]
        at = [row for row in of_task if row.budget in ("48", "-")]
        at.sort(key=lambda row: (-row.pass_at_1.mean, row.recipe))
        assert [cells[0] for cells in body] == [row.recipe for row in at]
        assert [cells[3] for cells in body] == [percent(row.pass_at_1) for row in at]


def test_the_page_stands_alone(written):
    page, files = written
    reader = Reader(page)
    assert reader.loaded
    assert all(source.startswith("data:image/png;base64,") for source in reader.loaded)
    assert len(reader.loaded) == len(files) - 1
    assert not re.search(r"https?:|url\(|@import|<link|<script|<iframe", page)
    assert "@media print" in page
    assert set(reader.scopes) == {"row", "col"}
    assert reader.tags.count("table") == page.count("<caption>")


def test_what_comes_from_files_is_escaped(written):
    page, _ = written
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;alert(&#x27;1 &amp; 2&#x27;)&lt;/script&gt;") >= 4
    assert {"script", "b", "i"}.isdisjoint(Reader(page).tags)


def test_every_figure_is_there_and_shows_something(written):
    _, files = written
    assert files[0].name == "report.html"
    names = [path.stem for path in files[1:]]
    assert sorted(names) == sorted(set(names))
    for start in ("ablation-0", "ablation-2", "loops-0", "loops-2", "map-0-snapkv", "map-1-vase", "value", "texts"):
        assert any(name.startswith(start) for name in names), start
    assert {"accuracy", "accuracy-tasks"} <= set(names)
    for path in files[1:]:
        pixels = image.imread(io.BytesIO(path.read_bytes()))
        assert min(pixels.shape[:2]) > 300
        inked = (pixels[..., :3].min(axis=2) < 0.9).mean()
        assert 0.005 < inked < 0.9, path


def test_the_command_line(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "out"), "--at", "64"])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    tables = Reader(page).tables
    assert f"Recipes at budget 64: {ALL_TASKS}" in tables
    assert "paired difference to full" in tables[f"Accuracy and bytes: {ALL_TASKS}"][0]
    # Its own command, as typed, and that of the run.
    assert "--at 64" in page
    assert "kvcompress eval -m" in page
    figures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert "accuracy.png" in figures
    assert result.stderr == f"wrote {tmp_path / 'out' / 'report.html'} and {len(figures)} figures beside it\n"


# -- what the figures show ---------------------------------------------------------------------------------------------

_POINTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=12)


@given(_POINTS)
def test_the_front_is_what_nothing_dominates(points):
    def beaten(one: tuple[int, int]) -> bool:
        return any(o[0] <= one[0] and o[1] >= one[1] and o != one for o in points)

    front = pareto_front(points)
    assert sorted(front) == [index for index, point in enumerate(points) if not beaten(point)]
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


@given(_POINTS.filter(bool))
def test_the_staircase_is_the_best_that_so_many_bytes_buy(points):
    x, y = staircase([points[index] for index in pareto_front(points)], 9)
    for size in range(min(x), 10):
        reached = max(accuracy for at, accuracy in zip(x, y, strict=True) if at <= size)
        assert reached == max(accuracy for at, accuracy in points if at <= size)
    assert x[-1] == 9


def test_the_mean_over_tasks(run):
    results = load_results([run])
    mean, *tasks = results.panels
    assert [panel.name for panel in results.panels] == [ALL_TASKS, *TASKS]
    for point in mean.points:
        parts = [p for panel in tasks for p in panel.points if (p.recipe, p.budget) == (point.recipe, point.budget)]
        assert point.accuracy.mean == pytest.approx(sum(p.accuracy.mean for p in parts) / 2)
        squares = sum(p.accuracy.standard_error**2 for p in parts)
        assert point.accuracy.standard_error == pytest.approx(squares**0.5 / 2, rel=0.05)
        assert point.kv_bytes == pytest.approx(sum(p.kv_bytes for p in parts) / 2)
        assert (point.versus is None) == (point.recipe == "full")
    families = {point.recipe: point.family for point in mean.points}
    expected = {"full": NONE, "int4": QUANTIZATION, "snapkv": EVICTION, "vase-attnv": EVICTION}
    assert families == expected | {"vase-attnv-int4": HYBRID}


def test_what_lacks_a_task_is_left_out_of_the_mean_and_named(tmp_path):
    synthetic(tmp_path / "a", recipes=("full", "snapkv"), tasks=TASKS)
    synthetic(tmp_path / "b", recipes=("r-kv",), tasks=TASKS[:1])
    results = load_results([tmp_path / "a", tmp_path / "b"])
    assert {point.recipe for point in results.panels[0].points} == {"full", "snapkv"}
    assert {point.recipe for point in results.panels[1].points} == {"full", "snapkv", "r-kv"}
    assert any("r-kv 48, r-kv 64" in note for note in results.notes)
    synthetic(tmp_path / "c", recipes=("h2o",), tasks=TASKS[1:], budgets=tuple(map(str, range(48, 62))))
    results = load_results([tmp_path / "a", tmp_path / "c"])
    (note,) = (note for note in results.notes if "lacks a task" in note)
    assert note.endswith("h2o 59, ...")


def test_without_a_recipe_on_all_tasks_there_is_no_mean(tmp_path):
    synthetic(tmp_path / "a", recipes=("snapkv",), tasks=TASKS[:1])
    synthetic(tmp_path / "b", recipes=("r-kv",), tasks=TASKS[1:])
    assert [panel.name for panel in load_results([tmp_path / "a", tmp_path / "b"]).panels] == list(TASKS)


def test_one_task_needs_no_mean_and_a_run_that_goes_on_says_so(tmp_path):
    folder = synthetic(tmp_path / "a", tasks=TASKS[:1], recipes=("int4",))
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:9])
    results = load_results([folder])
    assert [panel.name for panel in results.panels] == [TASKS[0]]
    assert (results.reference, results.at) == (None, "-")
    assert results.notes[0] == f"{folder} goes on: 5 of 12 samples so far; int4 - on {TASKS[0]} has 5 of 12 samples"
    files = write_report(results, tmp_path / "out")
    assert "paired difference to" not in files[0].read_text(encoding="utf-8")


def test_runs_are_joined_and_a_sample_counts_once(tmp_path):
    """The full cache is in both; 48 bytes are not a budget of 48 tokens."""
    synthetic(tmp_path / "a", recipes=("full", "snapkv"))
    synthetic(tmp_path / "b", recipes=("full", "snapkv", "int4"), budgets=("48",), by_bytes=True)
    panel = load_results([tmp_path / "a", tmp_path / "b"]).panels[1]
    found = {(point.recipe, point.budget): (point.problems, point.samples) for point in panel.points}
    names = [("full", "-"), ("snapkv", "48"), ("snapkv", "64"), ("snapkv", "bytes:48"), ("int4", "bytes:48")]
    assert found == dict.fromkeys(names, (12, 12))
    assert load_results([tmp_path / "b", tmp_path / "a"], at="bytes:48").at == "bytes:48"
    assert load_results([tmp_path / "b"]).at == "48"
    asked = ((["b"], None, "equal bytes 48"), (["a"], "64", "budget 64"), (["a", "b"], "bytes:48", "equal bytes 48"))
    for folders, at, expected in asked:
        assert load_results([tmp_path / name for name in folders], at=at).at_budget == expected


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused(tmp_path, run):
    cases: list[tuple[str, str]] = [
        ("missing", "no folder"),
        ("empty", "no run.json"),
        ("foreign", "is not the run.json"),
    ]
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text('{"scripts": []}')
    synthetic(tmp_path / "begun")
    (tmp_path / "begun" / "samples.jsonl").unlink()
    cases.append(("begun", "no finished samples"))
    for name, reason in cases:
        with pytest.raises(KVCompressError, match=reason) as caught:
            load_results([run, tmp_path / name])
        assert str(tmp_path / name) in str(caught.value)


def test_an_unknown_recipe_or_budget_is_refused_and_what_is_there_named(run):
    with pytest.raises(KVCompressError, match="against: 'r-kv' is none of the recipes full, int4, snapkv, vase-attnv"):
        load_results([run], against="r-kv")
    with pytest.raises(KVCompressError, match=r"at: '0\.5' is none of the budgets -, 48, 64"):
        load_results([run], at="0.5")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"dtype": "float32", "fingerprint": "beef"}}, "model fingerprint"),
        ({"model": {"dtype": "bfloat16", "fingerprint": "f00d"}}, "model dtype"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(run, tmp_path, changes, named):
    other = synthetic(tmp_path / "other", **changes)
    with pytest.raises(KVCompressError, match=named):
        load_results([run, other])


def test_one_name_for_two_recipes_is_refused(run, tmp_path):
    other = synthetic(tmp_path / "other", recipes=("snapkv",))
    text = (other / "samples.jsonl").read_text(encoding="utf-8")
    (other / "samples.jsonl").write_text(text.replace('"buffer": 8', '"buffer": 9'), encoding="utf-8")
    with pytest.raises(KVCompressError, match="recipe snapkv: has other fields"):
        load_results([run, other])


def test_the_command_line_refuses_in_one_line(run, tmp_path):
    (tmp_path / "file").touch()
    for arguments, reason in (
        ([str(tmp_path / "none")], "no folder"),
        ([str(run), "--against", "h2o"], "against: 'h2o'"),
        ([str(run), "--map-recipe", "snapkv"], "add --maps"),
        ([str(run), "-o", str(tmp_path / "file")], "cannot be made"),
    ):
        result = CliRunner().invoke(app, ["report", "-o", str(tmp_path / "out"), *arguments])
        assert result.exit_code == 2
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1


# -- maps --------------------------------------------------------------------------------------------------------------

_MAPPED = ("snapkv", "vase-attnv", "h2o", "r-kv", "vase-attnv-int4", "random-prompt", "int4", "full")


@pytest.mark.parametrize("recipe", _MAPPED)
@pytest.mark.parametrize("length", [10, 40])
def test_a_recording_is_what_the_cache_holds_token_by_token(recipe, length):
    config = kvcompress.load_config(recipe, **({} if recipe in ("int4", "full") else {"budget": 24, "buffer": 6}))
    if recipe == "random-prompt":
        length = 10  # it protects the prompt
    model, ids = tiny("qwen3"), prompt(length + 37)
    recording = record(model, config, ids[0, :length].tolist(), ids[0, length:].tolist(), sequence_id=5)
    assert (recording.prompt_tokens, recording.tokens) == (length, length + 37)
    held: dict[int, list[torch.Tensor]] = {}
    events = []
    with kvcompress.apply(model, config) as handle, torch.no_grad():
        cache = handle.new_cache([5])
        for start, stop in [(0, length), *((i, i + 1) for i in range(length, ids.shape[1]))]:
            model(input_ids=ids[:, start:stop], **{cache_keyword(model): cache})
            held[stop] = [cache.kept_positions(layer) for layer in (0, 1)]
            if len(events) < cache.rows[0].events:
                events += [stop] * (cache.rows[0].events - len(events))
    assert recording.seen == sorted({length, *events, ids.shape[1]})
    for seen, kept in zip(recording.seen, recording.kept, strict=True):
        assert all(torch.equal(kept[layer], held[seen][layer]) for layer in (0, 1))


def test_the_states_of_a_map(written):
    config = kvcompress.load_config("vase-attnv", budget=24, buffer=6)
    recording = record(tiny("qwen3"), config, prompt(30)[0].tolist(), prompt(40, seed=1)[0].tolist(), layers=[1])
    found = states(recording, 1)
    assert list(recording.kept[0]) == [1]
    assert found.shape == (2, 41, 70)
    for head in range(2):
        for read in range(30, 71):
            moment = max(m for m, seen in enumerate(recording.seen) if seen <= read)
            kept = recording.kept[moment][1][head].tolist()
            why = dict(zip(kept, recording.reasons[moment][1][head].tolist(), strict=True))
            # What has come since the last event is held, as recent.
            why |= dict.fromkeys(range(recording.seen[moment], read), 0)
            expected = [TO_COME if p >= read else why.get(p, EVICTED) for p in range(70)]
            assert found[head, read - 30].tolist() == expected
    assert torch.equal(states(recording, 1, every=3), found[:, ::3, ::3])
    tables = Reader(written[0]).tables
    assert any(name.startswith("Positions held: vase-attnv 24") for name in tables)


def test_the_reasons_of_a_map_are_what_the_stages_protect():
    """Against plain rules: sinks are the first positions, recent ones the last B of the event, wide ones by spread."""
    config = kvcompress.load_config("vase-attnv", budget=24, buffer=6)
    recording = record(tiny("qwen3"), config, prompt(30)[0].tolist(), prompt(40, seed=1)[0].tolist())
    assert recording.names == [RECENT, "sinks", "value_range", SCORED]
    stages = {stage.stage: stage for stage in config.stages}
    sinks = stages["sinks"].tokens
    events = [m for m, seen in enumerate(recording.seen) if len(recording.kept[m][0][0]) == 24]
    assert len(events) > 3
    for moment in events:
        for layer, kept in recording.kept[moment].items():
            for head, positions in enumerate(kept.tolist()):
                why = recording.reasons[moment][layer][head].tolist()
                names = {name: {p for p, w in zip(positions, why, strict=True) if recording.names[w] == name}
                         for name in recording.names}  # fmt: skip
                assert names["sinks"] == set(range(sinks))
                assert names[RECENT] >= set(range(recording.seen[moment] - 6, recording.seen[moment]))
                wide, rest = names["value_range"], names[SCORED]
                spread = recording.spreads[layer][head]
                assert len(wide) == stages["value_range"].reserved(24) - sinks
                assert min(spread[p] for p in wide) >= max(spread[p] for p in rest)


def test_recipes_that_protect_nothing_hold_by_score():
    recipe = {"name": "bare", "budget": 24, "buffer": 6, "stages": [{"stage": "recency"}, {"stage": "top_k"}]}
    recording = record(tiny("qwen3"), kvcompress.load_config(recipe), [5] * 30, [6] * 20)
    assert recording.names == [RECENT, SCORED]
    assert set(recording.reasons[-1][0].flatten().tolist()) == {0, 1}


def test_the_shares_count_all_heads():
    config = kvcompress.load_config("snapkv", budget=24, buffer=6)
    recording = record(tiny("qwen3"), config, prompt(30)[0].tolist(), prompt(40, seed=1)[0].tolist(), layers=[1])
    whole = record(tiny("qwen3"), config, prompt(30)[0].tolist(), prompt(40, seed=1)[0].tolist())
    held = [set(head) for kept in whole.kept[-1].values() for head in kept.tolist()]
    assert recording.shares.tolist() == pytest.approx([sum(p in head for head in held) / 4 for p in range(70)])


def test_texts_are_broken_into_lines_and_made_visible():
    lines = text_lines(["ab", " ", "\n", "", "\U0001f600", "x" * 108, "y"])
    assert [[index for index, _ in line] for line in lines] == [[0, 1, 2, 3, 4], [5, 6]]
    assert "".join(shown for _, shown in lines[0]) == "ab\u2423\u21b5\u00b7\u25a1"
    assert all(sum(len(shown) for _, shown in line) <= 110 for line in lines)


def test_names_on_the_front_are_of_points_that_hardly_more_bytes_do_not_improve(run):
    panel = load_results([run]).panels[1]
    front = front_of(panel)
    named = [point for points in _telling(front).values() for point in points]
    for point in front:
        better = [p for p in front if p.accuracy.mean > point.accuracy.mean and p.kv_bytes <= 1.03 * point.kv_bytes]
        assert (point in named) == (not better)


@given(st.sets(st.integers(0, 30)))
def test_ranges_name_every_position(positions):
    found: set[int] = set()
    for part in filter(None, ranges(sorted(positions)).split(", ")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == positions


def watched_vase(statistic: str) -> tuple[Any, Recording]:
    overrides = {"value_range.statistic": statistic, "budget": 24, "buffer": 6}
    config = kvcompress.load_config("vase-attnv", overrides)
    return config, record(tiny("qwen3"), config, prompt(30)[0].tolist(), prompt(40, seed=1)[0].tolist())


@pytest.mark.parametrize("statistic", ["range", "l2"])
def test_the_threshold_is_the_least_spread_that_was_protected(statistic):
    """Against a plain loop over the candidates of every event, out of the recording's own positions and spreads."""
    config, recording = watched_vase(statistic)
    stages = {stage.stage: stage for stage in config.stages}
    reserved, sinks = stages["value_range"].reserved(24), stages["sinks"].tokens
    assert recording.statistic == statistic
    for layer, spreads in recording.spreads.items():
        assert spreads.shape == (2, 70)
        expected = []
        before: list[set[int]] = [set(), set()]
        seen_before = 0
        for seen, kept in zip(recording.seen, recording.kept, strict=True):
            least = []
            for head in range(2):
                candidates = [p for p in sorted(before[head] | set(range(seen_before, seen))) if p < seen - 6]
                rest = sorted((float(spreads[head, p]) for p in candidates if p >= sinks), reverse=True)
                least.append(rest[reserved - sinks - 1])
                before[head] = set(kept[layer][head].tolist())
            expected.append(least)
            seen_before = seen
        found = recording.thresholds[layer]
        # The last moment is the end of the text, which need not be an event.
        torch.testing.assert_close(found, torch.tensor(expected[: len(found)]))
        assert len(found) >= len(expected) - 1 > 3
        low, median, high = limits(recording, layer) or (0.0, 0.0, 0.0)
        assert (low, high) == (float(found.min()), float(found.max()))
        assert low <= median <= high


def test_watching_leaves_the_model_alone():
    model = tiny("qwen3")
    before = model(input_ids=prompt(20)).logits
    record(model, kvcompress.load_config("vase-attnv", budget=24, buffer=6), prompt(30)[0].tolist(), [5, 6, 7])
    assert torch.equal(model(input_ids=prompt(20)).logits, before)


@cache
def model_and_tokenizer(seed: int = 0) -> tuple[Any, Any]:
    ids = {"eos_token_id": EOS_ID, "bos_token_id": BOS_ID, "pad_token_id": PAD_ID}
    return tiny("qwen3", seed=seed, vocab_size=len(VOCABULARY), **ids), build_tokenizer()


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A run of a tiny model."""
    folder = tmp_path_factory.mktemp("real") / "run"
    common: dict[str, Any] = {"tasks": ["program:1"], "problems": 2, "max_new_tokens": 50}
    recipes = ["full", "snapkv", "r-kv", "h2o", "tova", "vase-attnv", "int4"]
    evaluate(EvalRequest.of(recipes=recipes, budgets=["24"], buffer=6, **common), folder, model_and_tokenizer)
    return folder


def test_maps_from_the_command_line(real, tmp_path, monkeypatch):
    monkeypatch.setattr("kvcompress.cli_models.load_for_command", lambda *_: model_and_tokenizer())
    arguments = ["--maps", "--map-recipe", "vase-attnv", "--map-layer", "1", "--map-problem", "1"]
    result = CliRunner().invoke(app, ["report", str(real), "-o", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.stderr
    tables = Reader((tmp_path / "report.html").read_text(encoding="utf-8")).tables
    _, *body = tables["Positions held: vase-attnv 24"]
    assert {row[0] for row in body} == {"1"}
    _, *layers = tables["Value range per layer: vase-attnv 24"]
    assert [row[0] for row in layers] == ["0", "1"]
    assert all(float(row[8]) > 0 for row in layers)


def test_maps_show_a_few_recipes_and_one_that_protects(real):
    recordings = record_maps(load_results([real]), model_and_tokenizer)
    assert [recording.recipe for recording in recordings] == ["snapkv", "r-kv", "h2o", "vase-attnv"]
    assert len({recording.tokens for recording in recordings}) == 1
    assert [bool(recording.thresholds) for recording in recordings] == [False, False, False, True]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"recipes": ["vase-dkv"]}, "map recipe: 'vase-dkv' is none of those at budget 24 on program:1: full, snapkv"),
        ({"task": "store:1"}, "is none of program:1"),
        ({"problem": 2}, "map problem: 2 is none of the 2"),
        ({"layers": [7]}, "map layer: 7 is none of the compressed layers 0, 1"),
        ({"load": lambda: model_and_tokenizer(1)}, "are not those of the runs"),
    ],
)
def test_maps_of_what_is_not_there_are_refused(real, asked, reason):
    load = asked.pop("load", model_and_tokenizer)
    with pytest.raises(KVCompressError, match=reason):
        record_maps(load_results([real]), load, **asked)


def test_maps_need_a_task_that_can_be_made_again(run):
    with pytest.raises(KVCompressError, match="come from files"):
        record_maps(load_results([run]), model_and_tokenizer)
