"""Runs what the claims need.

Every arm has a run folder of its own, so that claims share arms, more claims can be added later, and whatever stopped
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from kvcompress.compare import Estimate
from kvcompress.environment import versions
from kvcompress.errors import KVCompressError
from kvcompress.eval import EvalRequest, Task, evaluate, read_samples, read_timings
from kvcompress.eval.records import open_folder
from kvcompress.eval.runner import Progress
from kvcompress.eval.summary import estimate
from kvcompress.models import encode_prompt
from kvcompress.reasoner.tasks import BENCHMARK
from kvcompress.reproduce.claims import CLAIMS, FULL, WHOLE, Claim, Measurement, Statement
from kvcompress.reproduce.recipes import Arm, arms_for, write_recipes
from kvcompress.reproduce.values import Measured, by_chance, findings_of, measure_values
from kvcompress.reproduce.verdicts import Finding, Grades, Verdict, compare, conclude
from kvcompress.shapes import layer_shapes

PROBLEMS, QUICK = 80, 8
# Answers of each task whose values claim e measures.
_TEXTS = 12
RUNS, RECIPES = "runs", "recipes"


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        claims: to be tested. request: of :mod:`kvcompress.eval`, for one arm; each has its own setting in place of
            this one's.
    """

    claims: tuple[Claim, ...]
    request: EvalRequest

    @classmethod
    def of(
        cls,
        *,
        claims: Sequence[str] = (),
        problems: int = PROBLEMS,
        tasks: Sequence[str | Task] = (),
        seed: int = 0,
        batch_size: int = 200,
        model: str = "reasoner",
        max_new_tokens: int | None = None,
    ) -> Self:
        """Check what people write.

        Args:
            claims: keys, all of them by default. tasks: as for :class:`EvalRequest`, ``BENCHMARK`` by default.
            problems: of each task.

        Raises:
            KVCompressError: naming field, value and what is allowed.
        """
        known = {claim.key: claim for claim in CLAIMS}
        for key in claims:
            if key not in known:
                raise KVCompressError(f"claim: {key!r} is not one of {', '.join(known)}")
        if problems < 2:
            # Of one there is no spread, and an interval of no width would decide everything.
            raise KVCompressError(f"problems: {problems} must be at least 2, or there is no uncertainty to tell")
        request = EvalRequest.of(
            model=model,
            recipes=[FULL],
            tasks=tasks or BENCHMARK,
            problems=problems,
            seed=seed,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
        )
        chosen = [claim for claim in CLAIMS if not claims or claim.key in claims]
        return cls(tuple(chosen), request)

    @property
    def arms(self) -> list[Arm]:
        return arms_for(self.claims)


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        findings: of every statement of every claim, by (claim key, number of the statement).
        accuracy: over all problems, by arm. notes: what was left out. seconds: of all batches together.
        bytes_held: mean bytes of a sequence's cache at the end of its answer, by arm.
    """

    plan: Plan
    findings: dict[tuple[str, int], list[Finding]]
    accuracy: dict[Arm, Estimate]
    bytes_held: dict[Arm, float]
    measured: Measured
    notes: list[str]
    seconds: float
    versions: dict[str, Any]
    command: str | None

    def verdict(self, claim: Claim, number: int) -> Verdict:
        return conclude(self.findings[claim.key, number])


def reproduce(
    plan: Plan,
    folder: Path,
    load: Callable[[], tuple[Any, Any]],
    *,
    command: str | None = None,
    progress: Progress = lambda label, done, total: None,
) -> Outcome:
    """Evaluate what isn't evaluated yet, and judge.

    Args:
        folder: gets ``recipes/`` and ``runs/``; the same plan goes on where it stopped, another one is refused where
            the two differ in more than claims.
        load: gives model and tokenizer; called once, and only if there is something to do.

    Raises:
        KVCompressError: as for :func:`kvcompress.eval.evaluate`.
    """
    open_folder(folder)
    arms = plan.arms
    write_recipes(arms, folder / RECIPES, plan.request.sampling.seed)
    loaded = cache(load)
    each = len(plan.request.tasks) * plan.request.problems
    samples: dict[Arm, list[dict[str, Any]]] = {}
    notes: list[str] = []
    seconds = 0.0
    for number, arm in enumerate(arms):
        place = folder / RUNS / arm.slug
        request = replace(plan.request, settings=(arm.setting(plan.request.sampling.seed),))

        def onward(label: str, done: int, total: int, before: int = number * each) -> None:
            progress(label, before + done, each * len(arms))

        run = evaluate(request, place, loaded, command=command, progress=onward)
        samples[arm] = read_samples(place)
        notes += run["notes"]
        seconds += sum(timing["seconds"] for timing in read_timings(place))
    grades = {arm: _grades(entries) for arm, entries in samples.items()}
    measured: Measured = []
    if any(isinstance(c, Measurement) for claim in plan.claims for s in claim.statements for c in s.comparisons):
        model, tokenizer = loaded()
        notes.append(by_chance(layer_shapes(model.config)[0].value_dim))
        measured = measure_values(model, _texts(plan, samples[Arm(FULL, WHOLE)], tokenizer))
    return Outcome(
        plan=plan,
        findings={
            (claim.key, number): _findings(statement, grades, measured)
            for claim in plan.claims
            for number, statement in enumerate(claim.statements)
        },
        accuracy={arm: estimate(list(graded.values())) for arm, graded in grades.items() if graded},
        bytes_held={arm: sum(s["kv_bytes"] for s in found) / len(found) for arm, found in samples.items() if found},
        measured=measured,
        notes=list(dict.fromkeys(notes)),
        seconds=seconds,
        versions=versions(),
        command=command,
    )


def _grades(samples: Sequence[dict[str, Any]]) -> Grades:
    return {(sample["task"], sample["problem"]): float(sample["correct"]) for sample in samples}


def _findings(statement: Statement, grades: dict[Arm, Grades], measured: Measured) -> list[Finding]:
    found: list[Finding] = []
    for comparison in statement.comparisons:
        if isinstance(comparison, Measurement):
            found += findings_of(comparison, measured)
        else:
            found.append(compare(comparison, grades))
    return found


def _texts(plan: Plan, samples: Sequence[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    """Prompts with the answers of the full cache, as tokens, of the first problems of each task."""
    tasks = {task.name: task for task in plan.request.tasks}
    texts = []
    for sample in samples:
        if sample["problem"] < _TEXTS:
            prompt = encode_prompt(tokenizer, tasks[sample["task"]].item(sample["problem"]).prompt)["input_ids"][0]
            answer = tokenizer(sample["output"], add_special_tokens=False)["input_ids"]
            texts.append([*prompt.tolist(), *answer])
    return texts
