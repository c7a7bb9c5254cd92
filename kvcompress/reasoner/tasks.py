"""Problems with chains of thought, in four families of different memory profile, from seeds.

    problem = generate("program", seed=evaluation_seed(0), difficulty=4)
    problem.prompt   # p4:Ca=3;#wait;Bd=k*a;...?d:AE:
    problem.chain    # Aa=3=a3,4wait(3a3),...;>d8.
    grade(problem, text)

| family | what a step needs |
|---|---|
| ``program`` | its statement, anywhere in the prompt, and values written long ago: late use of early values |
| ``interleaved`` | the same, of one of two programs that use the same names; half of the prompt is never needed |
| ``sort`` | an item of the prompt, and the newest list: recent tokens, among many stale copies |
| ``store`` | entry after entry of the prompt, again and again; a stale value is a trap |

**Seeds.** Seeds from 0 to 2**40 - 1 are for training, negative seeds for evaluation (:func:`evaluation_seed`). The two
never give the same problem: a problem is drawn again until a hash of its statements and query falls on its side (one
eighth of all problems are for evaluation), whatever its difficulty or redundancy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvcompress.errors import KVCompressError
from kvcompress.reasoner.programs import interleaved, program
from kvcompress.reasoner.sorting import sort
from kvcompress.reasoner.store import store
from kvcompress.reasoner.text import MAX_REDUNDANCY, Draft, prompt_text

FAMILIES: dict[str, Callable[[Random, int, int], Draft]] = {
    "program": program,
    "interleaved": interleaved,
    "sort": sort,
    "store": store,
}
MAX_DIFFICULTY = 10
DEFAULT_REDUNDANCY = 4
# FAMILY:DIFFICULTY:REDUNDANCY at which recipes can be told apart at a quarter to a half of the cache (docs/pareto.md).
BENCHMARK = ("program:2:9", "interleaved:2:9", "sort:2:9", "store:3:9")
TRAINING_SEEDS = range(2**40)
_TAGS = {"program": "p", "interleaved": "i", "sort": "l", "store": "s"}
_EVALUATION_SHARE = 8  # one problem in eight
_ANSWER = re.compile(r">([a-z0-9]+)\.")


@dataclass(frozen=True)
class Problem:
    """A problem, and how to solve it.

    Attributes:
        prompt: what the model is given, one token per character.
        chain: what it should write: steps, then the answer between ``>`` and a full stop.
        answer: a variable and its value (``d8``), a sorted list (``ckt``), or keys and their values (``a7d0``).
        family, seed, difficulty, redundancy: the arguments of :func:`generate` that make it.
    """

    prompt: str
    chain: str
    answer: str
    family: str
    seed: int
    difficulty: int
    redundancy: int


def generate(family: str, seed: int, difficulty: int = 4, redundancy: int = DEFAULT_REDUNDANCY) -> Problem:
    """The problem of a seed; the same arguments always give the same problem.

    Args:
        family: one of ``FAMILIES``.
        seed: negative for evaluation, 0 to 2**40 - 1 for training.
        difficulty: 1 to 10; prompt and chain have about 150 characters per level at the default redundancy.
        redundancy: 0 to 9 restatements of every step; from 1 on, comments in the prompt.

    Raises:
        KVCompressError: naming the argument that is out of range.
    """
    if family not in FAMILIES:
        raise KVCompressError(f"family: {family!r} is not one of {', '.join(FAMILIES)}")
    if seed not in TRAINING_SEEDS and seed >= 0:
        raise KVCompressError(f"seed: {seed} is neither negative (evaluation) nor below 2**40 (training)")
    if not 1 <= difficulty <= MAX_DIFFICULTY:
        raise KVCompressError(f"difficulty: {difficulty} is not in 1 to {MAX_DIFFICULTY}")
    if not 0 <= redundancy <= MAX_REDUNDANCY:
        raise KVCompressError(f"redundancy: {redundancy} is not in 0 to {MAX_REDUNDANCY}")
    rng = Random(f"{family} {seed} {difficulty}")  # a string: hashed alike by every version of Python
    while True:
        draft = FAMILIES[family](rng, difficulty, redundancy)
        if _is_for_evaluation(draft) == (seed < 0):
            break
    return Problem(
        prompt=prompt_text(_TAGS[family], draft, redundancy, rng),
        chain=f"{draft.chain}>{draft.answer}.",
        answer=draft.answer,
        family=family,
        seed=seed,
        difficulty=difficulty,
        redundancy=redundancy,
    )


def evaluation_seed(index: int) -> int:
    """The seed of evaluation problem number ``index`` (0, 1, ...): no training seed has the same problem."""
    if index < 0:
        raise KVCompressError(f"index: {index} is negative")
    return -1 - index


def grade(problem: Problem, text: str) -> bool:
    """Whether ``text``, what a model wrote after the prompt, gives the right answer.

    The answer is the first text between ``>`` and a full stop; none, or one that is cut off, is wrong.
    """
    match = _ANSWER.search(text)
    return match is not None and match.group(1) == problem.answer


def _is_for_evaluation(draft: Draft) -> bool:
    content = ";".join(draft.statements) + "?" + draft.query
    digest = hashlib.sha256(content.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _EVALUATION_SHARE == 0
