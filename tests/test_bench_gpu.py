"""The GPU bench without a GPU: what it counts, how it puts times together, what it writes, and when it stops."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompress.bench.gpu import attention, checks, decoding, kernels, needed, report, timing
from kvcompress.bench.gpu.__main__ import main
from kvcompress.bench.gpu.decoding import Session, Step, Timed, integrate
from kvcompress.bench.gpu.timing import Clock

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch):
    """One small point of two formats."""
    grid = replace(attention.TOY, batches=(1,), contexts=(16,), bits=(None, 4))
    monkeypatch.setattr(attention, "TOY", grid)
    return grid


def read(folder: Path) -> dict:
    return json.loads((folder / "gpu.json").read_text(), parse_constant=pytest.fail)


# -- what is counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [None, 8, 4, 2])
def test_pool_bytes_are_those_of_the_tensors(bits):
    pool = attention.random_pool(3, 2, 5, 32, bits, CPU)
    held = [pool.keys, pool.values] if bits is None else [*pool.keys.parts.values(), *pool.values.parts.values()]
    assert len(held) == (2 if bits is None else 6)
    assert attention.pool_bytes(3, 2, 5, 32, bits) == sum(part.numel() * part.element_size() for part in held)


def test_bytes_of_arguments_are_those_of_views():
    whole = torch.zeros(4, 10, dtype=torch.bfloat16)
    assert kernels.tensor_bytes(
        {"a": whole[:, 3:5], "b": [torch.zeros(3), (torch.zeros(2, dtype=torch.int64), 7)]}
    ) == (4 * 2 * 2 + 3 * 4 + 2 * 8)


def test_replaced_bytes_are_the_plan_and_the_arrivals_twice():
    size = kernels.TOY
    arguments = kernels._replace_slots(size, CPU)
    entries = size.rows * size.kv_heads * size.window
    assert arguments["replacement"].live.all()
    assert kernels._replaced_bytes(arguments) == entries * (8 + 8 + 1 + 2 * 2 * size.dim)


def test_streamed_bytes_leave_out_a_table_that_is_only_looked_up():
    fields = decoding.TOY.models["toy"]
    tied, untied = (decoding.make_model(fields | {"tie_word_embeddings": tie}, CPU) for tie in (True, False))
    assert decoding.streamed_bytes(tied) == decoding.streamed_bytes(untied)
    assert decoding.streamed_bytes(tied) == sum(p.nbytes for p in tied.parameters())


def test_a_call_that_cannot_be_captured_is_timed_eagerly_and_says_so(monkeypatch):
    def refuse(call):
        raise RuntimeError("not while capturing\nmore")

    calls = {"eager": 20.0, "replay": 5.0}
    monkeypatch.setattr(timing, "_median_us", lambda call: calls[call])
    monkeypatch.setattr(timing, "_captured", lambda call: "replay")
    cuda = torch.device("cuda")
    assert timing.measure("eager", cuda) == {"us": 5.0, "eager_us": 20.0, "timed": "graph"}
    assert timing.measure("eager", cuda, capture=False) == {"us": 20.0, "eager_us": 20.0, "timed": "eager"}
    monkeypatch.setattr(timing, "_captured", refuse)
    found = timing.measure("eager", cuda)
    assert found.pop("timed").endswith("not captured: RuntimeError: not while capturing")
    assert found == {"us": 20.0, "eager_us": 20.0}


# -- how times are put together ----------------------------------------------------------------------------------


def test_integral_of_a_line_is_exact():
    points = [(x, 3.0 + 0.5 * x) for x in (2.0, 5.0, 11.0)]
    assert integrate(points, 2, 11) == pytest.approx(3 * 9 + 0.25 * (11**2 - 2**2))
    assert integrate(points, 3, 7) == pytest.approx(3 * 4 + 0.25 * (7**2 - 3**2))


def test_integral_of_a_parabola_is_the_trapezoid_rule():
    points = [(float(x), float(x * x)) for x in range(0, 9, 2)]
    # Of x**2 the rule gives (b - a) h**2 / 6 too much.
    assert integrate(points, 0, 8) == pytest.approx(8**3 / 3 + 8 * 2**2 / 6)


def test_integral_is_constant_beyond_the_points():
    assert integrate([(4.0, 2.0), (6.0, 4.0)], 0, 10) == pytest.approx(4 * 2 + 6 + 4 * 4)
    assert integrate([(4.0, 2.0)], 0, 10) == pytest.approx(20)


def test_an_event_is_spread_over_its_period():
    steps = [Step(2.0, 1.0, False)] * 3 + [Step(10.0, 1.0, True)] + [Step(2.0, 1.0, False)] * 3
    timed = Timed(100, steps, buffer=4)
    assert (timed.plain_ms, timed.event_ms, timed.ms) == (2.0, 8.0, 4.0)
    quiet = Timed(100, steps[:3], buffer=4)
    assert (quiet.event_ms, quiet.ms) == (None, 2.0)


@pytest.mark.parametrize("recipe", ["full", "int4", "vase-attnv", "vase-attnv-int4"])
@pytest.mark.parametrize("tokens", [7, 21])
def test_a_filled_cache_is_as_after_a_prompt(recipe, tokens):
    model = decoding.make_model(decoding.TOY.models["toy"] | {"num_hidden_layers": 1}, CPU)
    with decoding._compressed(model, recipe, decoding.TOY) as handle:
        filled, read = (Session(model, handle.new_cache(), 2) for _ in range(2))
        filled.fill(tokens)
        read.call(torch.arange(2 * tokens).reshape(2, tokens) % 100)
        states = [[replace(row) for row in session.cache.rows] for session in (filled, read)]
        assert states[0] == states[1]
        assert filled.cache.stats().bytes_held == read.cache.stats().bytes_held
        assert filled.until_event == read.until_event


# -- the report --------------------------------------------------------------------------------------------------


def results(**rows) -> dict:
    """Synthetic results, complete where rows are given."""
    made = report.new_results({"device": "none"}, "a command", "a date", interpreter=False)
    for name, found in rows.items():
        made["parts"][name] |= {"status": "complete", "rows": found}
    return made


def point(of_copy: float, **others) -> dict:
    row = {"models": "Qwen3-4B", "batch": 16, "context": 4096, "format": "vectors", "by": "kvcompress"}
    measured = {"bytes": 1, "us": 1.0, "eager_us": 2.0, "bytes_per_s": 1.0, "error": 0.001, "timed": "graph"}
    return {**row, **measured, "of_copy": of_copy, **others}


def test_report_names_what_is_missing():
    made = results(attention=[point(0.9)])
    made["parts"]["kernels"]["status"] = "unfinished"
    text = report.to_markdown(made)
    assert "Missing or incomplete: checks, copy, kernels, decoding." in text
    assert text.startswith("# ")


def test_report_of_the_interpreter_says_so_first_and_judges_nothing():
    made = results(attention=[point(0.9)])
    made["interpreter"] = True
    text = report.to_markdown(made)
    first = text.splitlines()[0]
    assert first == first.upper()
    assert "MEAN NOTHING" in first
    assert text.count("not judged") == 3


def test_targets():
    rows = [
        point(0.85),
        point(0.79, batch=64),
        point(0.1, batch=1),
        point(0.1, context=2048),
        point(0.1, by="SDPA"),
        point(0.66, format="int4"),
        {**point(0.0, format="int4"), "skipped": "does not fit"},
    ]
    del rows[-1]["of_copy"], rows[-1]["us"]
    found = [verdict for _, verdict in report.targets(results(attention=rows))]
    assert found[0].startswith("not met (1 of 2); worst 79.0%: Qwen3-4B, 64 x 4096")
    assert found[1].startswith("met; worst 66.0%")
    assert found[2] == "not measured"
    events = [{"model": "Qwen3-4B", "cache": "vase-attnv", "event_share": share} for share in (0.01, 0.03)]
    events.append({"model": "Qwen3-4B", "cache": "r-kv", "event_share": 0.5})
    assert report.targets(results(decoding=events[:1]))[2][1].startswith("met; worst 1.0%")
    assert report.targets(results(decoding=events))[2][1].startswith("not met (1 of 2); worst 3.0%")


def test_report_lists_failures_and_what_was_skipped(tmp_path):
    lost = {"models": "m", "batch": 16, "context": 4096, "format": "vectors", "by": "FlexAttention"}
    made = results(
        checks=[
            {"case": "an operation: a case", "status": "failed", "why": "nan", "heavy": True, "error": math.nan},
            {"case": "an operation: large", "status": "skipped", "why": "does not fit: 1 TB", "heavy": True},
        ],
        attention=[point(0.9), {**lost, "failed": "RuntimeError: no such kernel"}],
    )
    assert report.failures(made) == ["checks: an operation: a case: nan"]
    report.write(made, tmp_path)
    assert read(tmp_path)["parts"]["checks"]["rows"][0]["error"] == "nan"
    text = (tmp_path / "gpu.md").read_text()
    assert "- skipped: an operation: large: does not fit: 1 TB" in text
    assert "- failed: m, 16 x 4096, vectors, FlexAttention: RuntimeError: no such kernel" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


# -- runs --------------------------------------------------------------------------------------------------------


def test_a_run_writes_what_it_has_measured(tiny, tmp_path):
    assert main(["--parts", "attention", "--output-dir", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert found["interpreter"]
    assert f"--output-dir {tmp_path}" in found["command"]
    assert found["machine"]["torch"] == torch.__version__
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert statuses["attention"] == statuses["copy"] == "complete"
    assert statuses["checks"] == statuses["kernels"] == statuses["decoding"] == "not asked for"
    rows = [row for row in found["parts"]["attention"]["rows"] if "by" in row]
    assert [(row["format"], row["by"]) for row in rows] == [
        ("vectors", "kvcompress"),
        ("vectors", "SDPA"),
        ("int4", "kvcompress"),
    ]
    for row in rows:
        assert 0 <= row["error"] <= attention.TOLERANCE
        bits = None if row["format"] == "vectors" else 4
        assert row["bytes"] == attention.pool_bytes(1, row["kv_heads"], 16, row["dim"], bits)
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["us"] * 1e6)
        assert row["of_copy"] == pytest.approx(
            row["bytes_per_s"] / found["parts"]["copy"]["rows"][0]["copy_bytes_per_s"]
        )
    text = (tmp_path / "gpu.md").read_text()
    assert text.splitlines()[0] == report.WARNING
    assert "Missing or incomplete: checks, kernels, decoding" in text


def test_what_differs_is_not_timed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "by_sdpa", lambda queries, pool, scaling: torch.full_like(queries, math.nan))
    assert main(["--parts", "attention", "--output-dir", str(tmp_path)]) == 0
    (row,) = [row for row in read(tmp_path)["parts"]["attention"]["rows"] if row.get("by") == "SDPA"]
    assert "us" not in row
    assert "differs by nan" in row["failed"]


def test_a_kernel_that_differs_is_a_failure(tiny, tmp_path, monkeypatch):
    right = attention.by_kernel
    monkeypatch.setattr(attention, "by_kernel", lambda *given: 1.02 * right(*given))
    assert main(["--parts", "attention", "--output-dir", str(tmp_path)]) == 1
    assert not any("us" in row for row in read(tmp_path)["parts"]["attention"]["rows"])
    assert "## Failures" in (tmp_path / "gpu.md").read_text()


def test_a_failed_check_stops_everything(tiny, tmp_path, monkeypatch, capsys):
    def refuse(*given):
        raise AssertionError("a made-up difference")

    monkeypatch.setattr(checks, "check", refuse)
    monkeypatch.setattr(checks, "few", lambda cases: [0])
    assert main(["--parts", "checks", "attention", "--output-dir", str(tmp_path)]) == 1
    found = read(tmp_path)["parts"]
    assert found["checks"]["rows"][0]["why"] == "AssertionError: a made-up difference"
    assert not found["attention"]["rows"]
    assert found["attention"]["status"] == "not run"
    assert f"{checks.CASES[0]}: AssertionError: a made-up difference" in capsys.readouterr().out


def test_checks_run_light_cases_of_every_operation():
    chosen = [checks.CASES[index] for index in checks.few(checks.CASES)]
    assert {case.operation for case in chosen} == {case.operation for case in checks.CASES}
    assert not any(case.heavy for case in chosen)
    row = checks.run_case(next(i for i, case in enumerate(checks.CASES) if case.operation == "hadamard"))
    assert row["status"] == "passed"
    assert row["outcomes"] == [{"kernel": 0.0, "torch": 0.0, "allowed": 0.0}]


def test_cases_that_others_disturbed_run_again_alone(monkeypatch):
    rounds = []

    def run_all(todo, workers, clock):
        rounds.append((len(todo), workers))
        for index in todo:
            # The first never fits, the second comes after a fault at first, the third always does.
            again = index in (0, 2) or (index == 1 and len(rounds) == 1)
            yield checks._row(index, "again" if again else "passed", "") | {"memory": index == 0}

    monkeypatch.setattr(checks, "_run_all", run_all)
    rows = list(checks.measure_all(torch.device("cuda"), Clock(60)))
    assert len(rows) == len(checks.CASES)
    assert [count for count, _ in rounds] == [len(checks.CASES), 3, 2]
    assert [workers for _, workers in rounds[1:]] == [1, 1]
    statuses = {row["index"]: row["status"] for row in rows}
    assert [statuses.pop(index) for index in range(3)] == ["skipped", "passed", "failed"]
    assert set(statuses.values()) == {"passed"}


def test_memory_that_runs_out_is_a_result(monkeypatch):
    def run_out(*given):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(checks, "check", run_out)
    row = checks.run_case(0)
    assert (row["status"], row["memory"]) == ("again", True)
    monkeypatch.setattr(attention, "random_pool", run_out)
    rows = list(attention.measure_all(CPU, Clock(60), 1.0, replace(attention.TOY, bits=(4,))))
    assert [row["skipped"] for row in rows if "by" in row] == [
        "does not fit: OutOfMemoryError: tried to allocate 1 TiB"
    ] * 2
    monkeypatch.setattr(Session, "fill", run_out)
    model = decoding.make_model(decoding.TOY.models["toy"], CPU)
    row = decoding._row(model, "own", Clock(60), None, decoding.TOY)
    assert row["skipped"].startswith("does not fit")
    assert row["points"] == []


def test_points_without_time_are_listed(tiny, tmp_path):
    assert main(["--parts", "attention", "kernels", "decoding", "--minutes", "0", "--output-dir", str(tmp_path)]) == 0
    found = read(tmp_path)["parts"]
    for name, count in (("attention", 3), ("kernels", len(kernels.OPERATIONS)), ("decoding", 8)):
        rows = [row for row in found[name]["rows"] if "note" not in row]
        assert [row["skipped"] for row in rows] == ["no time left"] * count
        assert "skipped" in found[name]["status"]


@pytest.mark.parametrize("name", ["redundancy", "quantize_tokens", "dequantize_tokens", "replace_slots"])
def test_kernels_are_held_against_torch(name):
    (operation,) = [operation for operation in kernels.OPERATIONS if operation.name == name]
    size = replace(kernels.TOY, layers=1, candidates=40)
    assert kernels.compare(operation, size, CPU) <= kernels.TOLERANCE


# -- what it needs -----------------------------------------------------------------------------------------------


def test_oldest_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["triton"]]
    for package, oldest in needed.NEEDED.items():
        assert any(requirement.split(";")[0] == f"{package}>={oldest}" for requirement in stated), package


def test_a_missing_package_is_named_with_its_remedy():
    assert needed.complaint() is None
    said = needed.complaint({"torch": "2.11", "no-such-package": "1.2"})
    assert said is not None
    assert "no-such-package>=1.2 (missing)" in said
    assert said.endswith("-m pip install 'no-such-package>=1.2'")
    assert "torch" not in said
    assert "torch>=99.0 (found" in str(needed.complaint({"torch": "99.0"}))
