"""The reasoner's problems, solved a second time from their prompts alone; its tokenizer; what its weights can do."""

from __future__ import annotations

import re
from statistics import mean

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvcompress.errors import KVCompressError
from kvcompress.reasoner import FAMILIES, WEIGHTS, evaluation_seed, generate, grade, load
from kvcompress.reasoner.tasks import MAX_DIFFICULTY, TRAINING_SEEDS
from kvcompress.reasoner.text import ALPHABET, FILLERS, MAX_REDUNDANCY
from kvcompress.reasoner.tokenizer import BOS_ID, VOCABULARY, build_tokenizer, encode

problems = st.builds(
    generate,
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(-(2**50), 2**40 - 1),
    difficulty=st.integers(1, MAX_DIFFICULTY),
    redundancy=st.integers(0, MAX_REDUNDANCY),
)


def parse(prompt):
    """Statements by label, and the two halves of the query, without comments."""
    head, *statements, query = re.sub(r"#[a-z]*;", "", prompt).replace(":", ";", 1).split(";")
    asked, _, labels = query.removeprefix("?").removesuffix(":").rpartition(":")
    return head, {text[0]: text[1:] for text in statements}, asked, labels


def answer_from_prompt(problem):
    """Solve a problem from its prompt, without looking at the chain or at the generator."""
    _, statements, asked, labels = parse(problem.prompt)
    chosen = [statements[chr(code)] for code in range(ord(labels[0]), ord(labels[-1]) + 1) if chr(code) in statements]
    if problem.family == "sort":
        assert asked == ""
        return "".join(sorted(chosen))
    if problem.family == "store":
        newest = {}
        for label in sorted(statements):
            newest[statements[label][0]] = statements[label][1]
        assert labels == max(statements)
        return "".join(key + newest[key] for key in asked)
    values = {}
    for statement in chosen:
        name, expression = statement.split("=")
        values[name] = eval(expression, {"__builtins__": {}}, values) % 10
    return f"{asked}{values[asked]}"


@given(problems)
def test_answer_is_that_of_an_independent_solver(problem):
    assert problem.answer == answer_from_prompt(problem)
    assert problem.chain.endswith(f">{problem.answer}.")
    assert problem.chain.count(">") == 1
    assert grade(problem, problem.chain)


@given(problems)
def test_every_step_of_a_program_is_right_and_copies_its_statement(problem):
    if problem.family not in ("program", "interleaved"):
        return
    _, statements, _, labels = parse(problem.prompt)
    steps = problem.chain.split(";")[:-1]
    values = {}
    for code, step in zip(range(ord(labels[0]), ord(labels[1]) + 1), steps, strict=True):
        core = step.split(",")[0]
        label, name, worked, result = re.fullmatch(r"([A-Z])([a-z])=(.*)=([a-z]\d)", core).groups()
        assert label == chr(code)
        # Without the values next to them, operands are those of the statement; with them, they are right.
        assert name + "=" + re.sub(r"([a-z])\d", r"\1", worked) == statements[label]
        for operand, value in re.findall(r"([a-z])(\d)", worked):
            assert values[operand] == int(value)
        values[name] = eval(re.sub(r"[a-z]", "", worked)) % 10
        assert result == f"{name}{values[name]}"


@given(problems)
def test_scans_of_a_store_stop_at_the_newest_entry(problem):
    if problem.family != "store":
        return
    _, statements, asked, newest = parse(problem.prompt)
    scans = re.findall(r"\?([a-z])([^?]*)", problem.chain)
    assert "".join(key for key, _ in scans) == asked
    for key, scan in scans:
        label = newest
        for step in scan.split(";")[:-1]:
            core = step.split(",")[0]
            assert core[:4] == label + statements[label] + key
            assert core[4:] == (f"!={statements[label]}" if statements[label][0] == key else "/")
            label = chr(ord(label) - 1)
        assert core[4] == "!"


@given(problems)
def test_redundancy_restates_and_nothing_more(problem):
    plain = generate(problem.family, problem.seed, problem.difficulty, redundancy=0)
    restatement = r",\d(?:" + "|".join(FILLERS[1:]) + r")\([^)]*\)"
    assert re.sub(restatement, "", problem.chain) == plain.chain
    assert len(re.findall(restatement, problem.chain)) == problem.redundancy * plain.chain.count(";")
    # The first character of the prompt names the family, the second the redundancy.
    without_comments = re.sub(r"#[a-z]*;", "", problem.prompt)
    assert without_comments[0] + without_comments[2:] == plain.prompt[0] + plain.prompt[2:]
    assert without_comments[1] == str(problem.redundancy)


@given(problems)
def test_same_seed_same_problem_and_all_of_it_in_the_alphabet(problem):
    again = generate(problem.family, problem.seed, problem.difficulty, problem.redundancy)
    assert again == problem
    assert set(problem.prompt + problem.chain) <= set(ALPHABET)


def test_problems_are_the_same_in_every_version_of_python():
    problem = generate("program", 1, difficulty=2, redundancy=1)
    assert problem.prompt == "p1:Ub=k+4;Tk=r+v;Rr=0;Sv=1;#so;?b:RU:"
    assert problem.chain == ("Rr=0=r0,1so(0r0);Sv=1=v1,1so(1v1);Tk=r0+v1=k1,1so(r0+v1k1);Ub=k1+4=b5,1so(k1+4b5);>b5.")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_evaluation_problem_is_a_training_problem(family):
    """At the lowest difficulty, where problems are few and chance would repeat them, whatever the redundancy."""

    def drawn(seeds):
        prompts = [generate(family, seed, 1, redundancy=index % 3).prompt for index, seed in enumerate(seeds)]
        return {str(parse(prompt)[1:]) for prompt in prompts}

    training = drawn(range(3000))
    evaluation = drawn(evaluation_seed(index) for index in range(1000))
    assert training.isdisjoint(evaluation)
    assert len(evaluation) > 500


def test_seeds_are_on_one_side():
    assert evaluation_seed(0) == -1
    assert all(evaluation_seed(index) not in TRAINING_SEEDS for index in (0, 1, 10**9))
    with pytest.raises(KVCompressError, match="index: -1"):
        evaluation_seed(-1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_length_grows_with_difficulty_and_redundancy(family):
    def length(difficulty, redundancy=4):
        drawn = [generate(family, seed, difficulty, redundancy) for seed in range(40)]
        return mean(len(problem.prompt + problem.chain) for problem in drawn)

    by_difficulty = [length(difficulty) for difficulty in range(1, MAX_DIFFICULTY + 1)]
    assert by_difficulty == sorted(by_difficulty)
    assert 100 < by_difficulty[0] < 200
    assert 1000 < by_difficulty[-1] < 1500
    by_redundancy = [length(5, redundancy) for redundancy in range(MAX_REDUNDANCY + 1)]
    assert by_redundancy == sorted(by_redundancy)


@given(problems, st.data())
def test_grade_refuses_what_is_wrong(problem, data):
    cut = data.draw(st.integers(0, len(problem.chain) - 1))
    assert not grade(problem, problem.chain[:cut])  # the full stop is the last character
    body, answer = problem.chain.split(">")
    position = data.draw(st.integers(0, len(problem.answer) - 1))
    other = data.draw(st.sampled_from([c for c in ALPHABET if c != problem.answer[position]]))
    assert not grade(problem, f"{body}>{answer[:position]}{other}{answer[position + 1 :]}")
    assert not grade(problem, f"{body}>.{answer}")
    # The first answer counts, whatever follows.
    assert grade(problem, problem.chain + ">z0.")
    assert not grade(problem, ">zz0." + problem.chain)


@given(problems, st.text())
@example(generate("program", 0), ">" * 10_000)
@example(generate("sort", 0), "\0>.\n")
@example(generate("store", 0), "")
def test_grade_never_fails_on_garbage(problem, text):
    assert grade(problem, text) is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "poetry"}, "family: 'poetry'"),
        ({"seed": 2**40}, "seed: 1099511627776"),
        ({"difficulty": 0}, "difficulty: 0"),
        ({"difficulty": 11}, "difficulty: 11"),
        ({"redundancy": -1}, "redundancy: -1"),
        ({"redundancy": 10}, "redundancy: 10"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(KVCompressError, match=message):
        generate(**{"family": "sort", "seed": 0, **arguments})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer as it comes back from disk."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(problem=problems)
def test_tokenizer_round_trip(tokenizer, problem):
    text = problem.prompt + problem.chain
    ids = tokenizer(text).input_ids
    assert ids == [BOS_ID, *encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_pads_on_the_left_and_keeps_every_character(tokenizer):
    batch = tokenizer([ALPHABET, "a"], padding=True, return_tensors="pt")
    assert tokenizer.padding_side == "left"
    assert batch.attention_mask[1].tolist() == [0] * (len(ALPHABET) - 1) + [1, 1]
    assert len(tokenizer) == len(VOCABULARY) == len(ALPHABET) + 4
    assert tokenizer.batch_decode(batch.input_ids, skip_special_tokens=True) == [ALPHABET, "a"]
    assert tokenizer("é \n").input_ids == [BOS_ID] + [tokenizer.unk_token_id] * 3


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(KVCompressError, match=r"config.json, model.safetensors, tokenizer.json missing"):
        load(folder=tmp_path)


def test_bundled_weights_solve_held_out_problems():
    model, tokenizer = load()
    assert model.dtype == torch.float32
    assert not model.training
    assert (WEIGHTS / "model.safetensors").stat().st_size < 8e6
    held_out = [
        generate(family, evaluation_seed(index), difficulty=2, redundancy=1)
        for family in FAMILIES
        for index in range(5)
    ]
    inputs = tokenizer([problem.prompt for problem in held_out], padding=True, return_tensors="pt")
    longest = max(len(problem.chain) for problem in held_out)
    output = model.generate(**inputs, max_new_tokens=longest + 1, do_sample=False)
    written = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = [grade(problem, text) for problem, text in zip(held_out, written, strict=True)]
    assert sum(right) >= 19, [text for text, good in zip(written, right, strict=True) if not good]
