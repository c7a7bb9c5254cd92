"""Reproduction of claims: verdicts by one rule, arms shared and resumed, outputs that say what was found."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib import image
from tiny import tiny
from typer.testing import CliRunner

from kvcompress.cli import app
from kvcompress.compare import Estimate
from kvcompress.config import load_config
from kvcompress.errors import KVCompressError
from kvcompress.eval import EvalRequest, evaluate, read_samples
from kvcompress.reasoner.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, build_tokenizer
from kvcompress.reproduce import CLAIMS, Comparison, Finding, Measurement, Plan, Verdict, compare, conclude, judge, run
from kvcompress.reproduce.claims import BUDGETS, SLOTS, slots
from kvcompress.reproduce.document import claims_document, to_markdown, write_document
from kvcompress.reproduce.recipes import BUFFER, Arm, arms_for, config_of, slug
from kvcompress.reproduce.run import PROBLEMS, Outcome, reproduce
from kvcompress.reproduce.values import findings_of, measure_values
from kvcompress.reproduce.verdicts import shown

HOLDS, FAILS, UNDECIDED, UNMEASURED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.UNMEASURED


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "error", "bar", "verdict"),
    [
        (0.10, 0.05, 0.0, HOLDS),  # 0.002 to 0.198
        (0.10, 0.052, 0.0, UNDECIDED),  # -0.002 to 0.202
        (-0.10, 0.05, 0.0, FAILS),
        (-0.10, 0.052, 0.0, UNDECIDED),
        (-0.02, 0.015, -0.05, HOLDS),  # -0.0494 to 0.0094: worse by less than the margin
        (-0.02, 0.016, -0.05, UNDECIDED),
        (-0.10, 0.025, -0.05, FAILS),  # up to -0.051
        (0.60, 0.05, 0.5, HOLDS),
        (0.60, 0.06, 0.5, UNDECIDED),
        (0.0, 0.0, 0.0, UNDECIDED),  # all problems came out alike
        (0.2, 0.0, 0.0, HOLDS),
    ],
)
def test_judge(mean, error, bar, verdict):
    assert judge(Estimate(mean, error), bar) is verdict


def test_what_was_not_measured_is_not_judged():
    assert judge(None) is UNMEASURED
    finding = compare(Comparison("vase-dkv", "cur-dkv", ("0.5",)), {})
    assert (finding.verdict, finding.value, finding.count, finding.interval) == (UNMEASURED, None, 0, None)
    assert shown(finding) == ("-", "-")


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([HOLDS, UNDECIDED, FAILS], FAILS),
        ([UNMEASURED, UNMEASURED], UNMEASURED),
        ([HOLDS, UNMEASURED], UNDECIDED),
        ([], UNMEASURED),
    ],
)
def test_a_statement_holds_if_all_of_it_does(verdicts, whole):
    findings = [Finding("x - y", "share", Estimate(0.0, 1.0), 9, 0.0, verdict) for verdict in verdicts]
    assert conclude(findings) is whole


def grades_of(rng: np.random.Generator, problems: int, share: float) -> dict[tuple[str, int], float]:
    return {
        (task, problem): float(rng.random() < share) for task in ("sort:1", "store:1") for problem in range(problems)
    }


def test_differences_are_paired_and_pooled_over_sizes_and_tasks():
    rng = np.random.default_rng(5)
    grades = {
        Arm(recipe, size): grades_of(rng, 60, share)
        for recipe, share in (("vase-dkv", 0.7), ("cur-dkv", 0.5))
        for size in ("0.25", "0.5")
    }
    finding = compare(Comparison("vase-dkv", "cur-dkv", ("0.25", "0.5")), grades)
    problems = list(grades[Arm("vase-dkv", "0.25")])
    ours, theirs = (
        np.array([[grades[Arm(recipe, size)][problem] for size in ("0.25", "0.5")] for problem in problems])
        for recipe in ("vase-dkv", "cur-dkv")
    )
    # One number per problem; the errors of the two sizes are not taken for independent.
    differences = (ours - theirs).mean(axis=1)
    assert (finding.count, len(differences)) == (120, 120)
    assert finding.value is not None
    assert finding.value.mean == pytest.approx(differences.mean())
    resampled = rng.choice(differences, size=(20_000, len(differences))).mean(axis=1)
    assert finding.value.standard_error == pytest.approx(resampled.std(), rel=0.03)
    low, high = np.quantile(resampled, [0.025, 0.975])
    assert finding.interval == pytest.approx((low, high), abs=0.01)
    assert finding.better is not None
    assert finding.worse is not None
    assert (finding.better.mean, finding.worse.mean) == pytest.approx((ours.mean(), theirs.mean()))
    assert {name: value.mean for name, value in finding.details.items()} == pytest.approx(
        {
            "size 0.25": (ours - theirs)[:, 0].mean(),
            "size 0.5": (ours - theirs)[:, 1].mean(),
            "task sort:1": differences[:60].mean(),
            "task store:1": differences[60:].mean(),
        }
    )


def test_what_keeps_everything_is_compared_at_every_size_with_its_only_result():
    grades = {
        Arm("full", "-"): {("t", 0): 1.0, ("t", 1): 1.0},
        Arm("snapkv", "0.25"): {("t", 0): 0.0, ("t", 1): 0.0},
        Arm("snapkv", "0.5"): {("t", 0): 1.0},  # problem 1 is missing here, so that its mean is over the other size
    }
    finding = compare(Comparison("full", "snapkv", ("0.25", "0.5")), grades)
    assert finding.value is not None
    assert (finding.value.mean, finding.count) == ((0.5 + 1.0) / 2, 2)


def test_shown_in_points_or_as_a_correlation():
    assert shown(Finding("x", "share", Estimate(0.1234, 0.01), 9, 0.0, HOLDS)) == ("+12.3 ± 1.0", "+10.4 to +14.3")
    assert shown(Finding("x", "correlation", Estimate(0.9, 0.01), 9, 0.5, HOLDS)) == ("0.900 ± 0.010", "0.880 to 0.920")


# -- claims and recipes ------------------------------------------------------------------------------------------------


def test_claims_are_whole():
    assert [claim.key for claim in CLAIMS] == list("abcdefgh")
    for claim in CLAIMS:
        for statement in claim.statements:
            assert statement.text
            assert statement.published
            assert statement.comparisons
    arms = arms_for(CLAIMS)
    assert len({arm.slug for arm in arms}) == len(arms)
    for arm in arms:
        config = arm.setting().config
        assert config.name == arm.recipe
        assert config.buffer == (BUFFER if config.stages else 64)
        assert not config.evicts or arm.size.startswith("bytes:") or config.budget == float(arm.size)


def test_selected_claims_need_only_their_recipes():
    assert arms_for([]) == [Arm("full", "-")]
    (claim,) = Plan.of(claims=["d"]).claims
    assert arms_for([claim]) == [
        Arm("full", "-"),
        *(Arm(recipe, size) for size in BUDGETS for recipe in ("vase-dkv", "cur-dkv")),
    ]
    both = Plan.of(claims=["d", "f"]).arms
    assert len(both) == len(set(both)) == 1 + 6 * len(BUDGETS)  # claim f has the two recipes as well


def test_recipes_differ_in_what_the_claims_say():
    def stages(name: str) -> dict[str, Any]:
        return {stage.stage: stage.model_dump() for stage in config_of(name).stages}

    fixed, drawn = stages("cur-dkv"), stages("vase-dkv")
    assert fixed["leverage"].pop("resample") is False
    assert drawn["leverage"].pop("resample") is True
    assert fixed == drawn
    for count in SLOTS:
        for base in ("vase-attnv", "attn-value-top"):
            changed, usual = stages(slots(base, count)), stages(base)
            assert changed.pop("value_range") == usual.pop("value_range") | {"tokens": count, "share": None}
            assert changed == usual
    for base, bare in (("vase-attnv", "attn-sample"), ("attn-value-top", "snapkv")):
        usual = stages(base)
        del usual["value_range"]
        assert usual == stages(slots(base, 0)) == stages(bare)
    assert stages("vase-attnv, l2")["value_range"]["statistic"] == "l2"
    assert config_of("snapkv", seed=7).seed == 7


@pytest.mark.parametrize("name", ["nonesuch", "nonesuch, 16 value slots", "vase-attnv, nonesuch", "snapkv, l2"])
def test_unknown_recipes_are_refused(name):
    with pytest.raises(KVCompressError, match=r"nonesuch|value_range"):
        config_of(name)


# -- runs --------------------------------------------------------------------------------------------------------------


@cache
def model_and_tokenizer() -> tuple[Any, Any]:
    """A random Qwen3 that writes the reasoner's characters; it is never right."""
    ids = {"eos_token_id": EOS_ID, "bos_token_id": BOS_ID, "pad_token_id": PAD_ID}
    return tiny("qwen3", vocab_size=len(VOCABULARY), **ids), build_tokenizer()


def small(*claims: str, **changes: Any) -> Plan:
    settings: dict[str, Any] = {"problems": 3, "tasks": ["program:2", "sort:2"], "batch_size": 3, "max_new_tokens": 60}
    return Plan.of(claims=claims, **{**settings, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("finished")
    return folder, reproduce(small("d"), folder, model_and_tokenizer, command="kvcompress reproduce --claim d")


def all_samples(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("runs/*/samples.jsonl"))}


def test_only_what_is_asked_for_is_evaluated(finished):
    folder, outcome = finished
    assert set(all_samples(folder)) == {arm.slug for arm in small("d").arms} == {arm.slug for arm in outcome.accuracy}
    assert {path.name for path in (folder / "recipes").iterdir()} == {"full.yaml", "vase-dkv.yaml", "cur-dkv.yaml"}
    assert list(outcome.findings) == [("d", 0)]
    assert outcome.findings["d", 0][0].count == 6
    assert outcome.seconds > 0


def test_a_recipe_file_gives_the_same_samples_alone(finished, tmp_path):
    folder, _ = finished
    request = EvalRequest.of(
        recipes=[str(folder / "recipes" / "cur-dkv.yaml")],
        budgets=["0.25"],
        tasks=["program:2", "sort:2"],
        problems=3,
        batch_size=3,
        max_new_tokens=60,
    )
    evaluate(request, tmp_path, model_and_tokenizer)
    assert (tmp_path / "samples.jsonl").read_bytes() == all_samples(folder)["cur-dkv-at-0.25"]
    assert sum(sample["events"] for sample in read_samples(tmp_path)) > 0


def test_the_same_command_goes_on_where_it_stopped(finished, tmp_path):
    folder, outcome = finished

    class Killed(BaseException):
        pass

    stops = [3, 4, 11, 20]
    for stop in stops:

        def kill(label: str, done: int, total: int, stop: int = stop) -> None:
            assert 0 <= done <= total == 7 * 2 * 3
            if done >= stop:
                raise Killed

        with pytest.raises(Killed):
            reproduce(small("d"), tmp_path, model_and_tokenizer, progress=kill)
        assert sum(samples.count(b"\n") for samples in all_samples(tmp_path).values()) >= stop
    again = reproduce(small("d"), tmp_path, model_and_tokenizer)
    assert all_samples(tmp_path) == all_samples(folder)
    assert again.findings == outcome.findings


def test_what_is_done_is_neither_loaded_nor_done_again(finished):
    folder, outcome = finished
    before = all_samples(folder)

    def load() -> Any:
        raise AssertionError("loaded")

    assert reproduce(small("d"), folder, load).findings == outcome.findings
    assert all_samples(folder) == before


def test_another_claim_shares_what_is_there(tmp_path):
    loads = []

    def load() -> Any:
        loads.append(1)
        return model_and_tokenizer()

    few: dict[str, Any] = {"problems": 2, "tasks": ["program:2"]}
    reproduce(small("c", **few), tmp_path, load)
    first = all_samples(tmp_path)
    assert loads == [1]
    reproduce(small("c", "h", **few), tmp_path, load)
    second = all_samples(tmp_path)
    assert {name: second[name] for name in first} == first
    new = set(second) - set(first)
    assert new == {slug(f"vase-attnv, {name}") + f"-at-{at}" for name in ("l2", "absmax", "var") for at in BUDGETS[1:]}


def test_another_number_of_problems_is_refused(finished):
    folder, _ = finished
    with pytest.raises(KVCompressError, match=r"problems: the run in .* was made with 3, this command asks for 2"):
        reproduce(small("d", problems=2), folder, model_and_tokenizer)


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_are_measured_per_text_and_layer():
    scipy_stats = pytest.importorskip("scipy.stats")
    from kvcompress.bench.precision import snapshots, squared_error
    from kvcompress.quant.uniform import Uniform

    model, tokenizer = model_and_tokenizer()
    rng = np.random.default_rng(0)
    texts = [
        tokenizer("".join(rng.choice(list("abcdefgh=+;0123456789"), size=length)))["input_ids"] for length in (130, 160)
    ]
    measured = measure_values(model, [*texts[:1], texts[0][:100], *texts[1:]])  # of which one is too short
    assert [len(text) for text in measured] == [2, 2]
    import torch

    values = snapshots(model, torch.tensor([texts[1]]))[1].values[:, :, 4:]
    spread = (values.amax(dim=-1) - values.amin(dim=-1)).flatten()
    error = squared_error(values, Uniform(bits=4)).flatten()
    expected = scipy_stats.spearmanr(spread, error).statistic
    assert measured[1][1][4]["spearman"] == pytest.approx(expected, abs=2e-3)
    assert -1 < measured[0][0][2]["share"] < 1


def test_findings_of_values_are_means_over_texts():
    measured = [
        [{4: {"spearman": a, "share": 0.1}, 2: {"spearman": b, "share": -0.1}}] for a, b in ((0.9, 0.1), (0.8, 0.3))
    ]
    (strong,) = findings_of(Measurement("spearman", 4, 0.5), measured)
    assert strong.value is not None
    assert (strong.value.mean, strong.count, strong.verdict) == (pytest.approx(0.85), 2, HOLDS)
    # Of the mean of two values, drawn twice each: the two, or their mean half of the time.
    assert strong.value.standard_error == pytest.approx(0.05 / np.sqrt(2), rel=0.03)
    (weak,) = findings_of(Measurement("spearman", 2, 0.5), measured)
    assert weak.verdict is FAILS
    assert findings_of(Measurement("share", 2, 0.0), measured)[0].verdict is FAILS
    assert findings_of(Measurement("share", 2, 0.0), []) == []


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_document_says_what_was_found(finished, tmp_path):
    _, outcome = finished
    files, document = write_document(outcome, tmp_path)
    assert [path.name for path in files] == ["claims.json", "reproduction.md", "reproduction-d.png"]
    assert json.loads(files[0].read_text()) == document == claims_document(outcome)
    (claim,) = document["claims"]
    (statement,) = claim["statements"]
    (finding,) = statement["findings"]
    assert statement["verdict"] == finding["verdict"] == "undecided"  # a random model is never right
    assert finding["difference"] == {"mean": 0.0, "standard_error": 0.0}
    assert finding["interval"] == [0.0, 0.0]
    assert finding["count"] == 6
    assert [entry["size"] for entry in document["accuracy"] if entry["recipe"] == "cur-dkv"] == list(BUDGETS)
    assert list(document["recipes"]) == ["full", "vase-dkv", "cur-dkv"]
    assert load_config(yaml.safe_load(document["recipes"]["cur-dkv"])) == config_of("cur-dkv")
    assert image.imread(files[2]).shape[1] > 1000
    text = files[1].read_text()
    for expected in (
        "kvcompress reproduce --claim d",
        "| d | VASE-DKV (G resampled) beats CurDKV (G fixed) |",
        "**undecided**",
        "+0.0 ± 0.0 | +0.0 to +0.0",
        "intervals are wide",
        "-r recipes/vase-dkv.yaml --budget 0.25",
    ):
        assert expected in text, expected


def test_every_claim_is_drawn_and_written(tmp_path):
    rng = np.random.default_rng(3)
    plan = Plan.of()
    grades = {arm: grades_of(rng, 30, rng.random()) for arm in plan.arms}
    measured = [
        [
            {bits: {"spearman": 0.9 + 0.1 * rng.random(), "pearson": 0.8, "share": 0.2} for bits in (4, 2)}
            for _ in range(4)
        ]
        for _ in range(5)
    ]
    findings = {
        (claim.key, number): [
            finding
            for comparison in statement.comparisons
            for finding in (
                findings_of(comparison, measured)
                if isinstance(comparison, Measurement)
                else [compare(comparison, grades)]
            )
        ]
        for claim in CLAIMS
        for number, statement in enumerate(claim.statements)
    }
    accuracy = {arm: Estimate(float(np.mean(list(graded.values()))), 0.03) for arm, graded in grades.items()}
    outcome = Outcome(
        plan=plan,
        findings=findings,
        accuracy=accuracy,
        bytes_held=dict.fromkeys(accuracy, 1e5),
        measured=measured,
        notes=["left out: nothing"],
        seconds=60.0,
        versions={},
        command=None,
    )
    files, document = write_document(outcome, tmp_path)
    assert len(files) == 3 + len(CLAIMS)
    assert "intervals are wide" not in to_markdown(outcome)
    said = {f["verdict"] for c in document["claims"] for s in c["statements"] for f in s["findings"]}
    assert said == {"holds", "does not hold", "undecided"}
    assert all(value.label in to_markdown(outcome) for found in findings.values() for value in found)


# -- command -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--claim", "z"], "claim: 'z' is not one of a, b, c, d, e, f, g, h"),
        (["--claim", "a,"], "claim: '' is not one of a, b, c, d, e, f, g, h"),
        (["--problems", "1"], "problems: 1 must be at least 2"),
        (["--problems", "9", "--quick"], "--problems: 9 given together with --quick"),
        (["--batch-size", "0"], "batch_size: 0 must be at least 1"),
        (["--seed", "-1"], "seed: -1 must be at least 0"),
        (["-o", "/proc/nonesuch"], "folder: /proc/nonesuch cannot be made"),
    ],
)
def test_bad_input_gets_one_line(arguments, message):
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_matplotlib_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["reproduce", "--claim", "d", "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert not (tmp_path / "out").exists()


def test_command_on_the_bundled_reasoner(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BENCHMARK", ("sort:2:2", "store:2:6"))
    arguments = ["reproduce", "--claim", "e", "--problems", "3", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "HOLDS" in result.stdout
    assert "layer 3, 2 bits" in result.stdout
    assert "intervals are wide" in " ".join(result.stdout.split())
    document = json.loads((tmp_path / "claims.json").read_text())
    assert document["command"].startswith("kvcompress reproduce --claim e")
    assert [entry["recipe"] for entry in document["accuracy"]] == ["full"]
    assert document["accuracy"][0]["mean"] == 1.0
    assert any("Gaussian" in note for note in document["notes"])
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["claims"] == document["claims"]
    assert load_config(tmp_path / "recipes" / "full.yaml").stages == ()
    assert len(json.loads((tmp_path / "values.json").read_text())["by text, layer and bits"]) == 6


def test_defaults():
    assert Plan.of().request.problems == PROBLEMS
    assert [task.name for task in Plan.of().request.tasks] == [
        "program:2:9",
        "interleaved:2:9",
        "sort:2:9",
        "store:3:9",
    ]
