"""What is asked: families of the bundled reasoner's problems, or prompts and answers out of a JSON file."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvcompress.errors import KVCompressError
from kvcompress.reasoner import FAMILIES, evaluation_seed, generate, grade
from kvcompress.reasoner.tasks import DEFAULT_REDUNDANCY

DEFAULT_DIFFICULTY = 4
# What may come after an answer that ends a text, and before it ("" is the start).
_CLOSING = string.whitespace + ".*\"'`)]}$"
_OPENING = ("", *string.whitespace, *"*\"'`([{$=:>")
_FIELDS = ("prompt", "answer", "pattern", "reference")


@dataclass(frozen=True)
class Item:
    """One problem of a task.

    Attributes:
        prompt: what the model is asked. seed: what makes the problem, or its number.
        is_correct: grades what the model wrote after the prompt.
        reference: an answer as it should be, if one is known; its length tells how long answers get.
    """

    prompt: str
    seed: int
    is_correct: Callable[[str], bool]
    reference: str | None = None


class Task(Protocol):
    """A numbered set of problems; anything with these members can be evaluated.

    Attributes:
        name: what results are listed under; unique among the tasks of a run.
        settings: everything that decides the problems, ready for JSON: a run is only resumed where it is the same.
        size: number of problems, or None if there is no end of them.
    """

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def size(self) -> int | None: ...

    def item(self, index: int) -> Item:
        """Problem number ``index``, always the same one."""
        ...


@dataclass(frozen=True)
class ReasonerTask:
    """Held-out problems of one family of :mod:`kvcompress.reasoner.tasks`; problem i is evaluation seed i.

    Raises:
        KVCompressError: naming family, difficulty or redundancy, if there is no such thing.
    """

    family: str
    difficulty: int = DEFAULT_DIFFICULTY
    redundancy: int = DEFAULT_REDUNDANCY

    def __post_init__(self) -> None:
        self.item(0)

    @property
    def name(self) -> str:
        name = f"{self.family}:{self.difficulty}"
        return name if self.redundancy == DEFAULT_REDUNDANCY else f"{name}:{self.redundancy}"

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "difficulty": self.difficulty,
            "redundancy": self.redundancy,
            # Problems change with the code that makes them.
            "first_problem": _digest(self.item(0).prompt.encode()),
        }

    @property
    def size(self) -> int | None:
        return None

    def item(self, index: int) -> Item:
        problem = generate(self.family, evaluation_seed(index), self.difficulty, self.redundancy)
        return Item(problem.prompt, problem.seed, lambda text: grade(problem, text), problem.chain)


class JsonTask:
    """Prompts and answers from a file: a JSON list of objects, or one object per line.

    Each object has ``prompt`` and ``answer``, and may have ``pattern`` and ``reference`` (a full answer, whose length
    is what to expect). With a pattern (a regular expression with one group) the group's last match must equal the
    answer; without, the output must end in the answer as a whole word: white space, quotes or brackets, a full stop and
    marks of emphasis aside.

    Raises:
        KVCompressError: naming file, problem and field at fault.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            content = self.path.read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise KVCompressError(f"task: file {path} cannot be read: {reason}") from error
        self._digest = _digest(content)
        self._problems = [self._checked(index, entry) for index, entry in enumerate(_entries(str(path), text))]
        if not self._problems:
            raise KVCompressError(f"task: file {path} holds no problems")

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "problems": len(self._problems), "sha256": self._digest}

    @property
    def size(self) -> int | None:
        return len(self._problems)

    def item(self, index: int) -> Item:
        problem = self._problems[index]
        answer, pattern = problem["answer"].strip(), problem.get("pattern")
        return Item(problem["prompt"], index, lambda text: _matches(text, answer, pattern), problem.get("reference"))

    def _checked(self, index: int, entry: Any) -> dict[str, str]:
        where = f"task: file {self.path}, problem {index}"
        if not isinstance(entry, dict):
            raise KVCompressError(f"{where}: {entry!r} is not an object with prompt and answer")
        for field, value in entry.items():
            if field in _FIELDS and not isinstance(value, str):
                raise KVCompressError(f"{where}: {field}: {value!r} is not text")
        for field in ("prompt", "answer"):
            if not entry.get(field, "").strip() or (field == "answer" and not entry[field].strip(_CLOSING)):
                raise KVCompressError(f"{where}: {field}: missing or empty")
        try:
            groups = re.compile(entry.get("pattern", "()")).groups
        except re.error as error:
            raise KVCompressError(
                f"{where}: pattern: {entry['pattern']!r} is no regular expression: {error}"
            ) from error
        if groups != 1:
            raise KVCompressError(f"{where}: pattern: {entry['pattern']!r} has {groups} groups; it must have one")
        return {field: entry[field] for field in _FIELDS if field in entry}


def parse_task(text: str, difficulty: int | None = None) -> Task:
    """A task as written on the command line: ``program``, ``program:6``, ``program:6:2`` or ``problems.json``.

    Args:
        text: family, difficulty and redundancy, or the path of a .json or .jsonl file.
        difficulty: for a family that comes without one.

    Raises:
        KVCompressError: if it is no such thing, naming what is at fault.
    """
    if text.endswith((".json", ".jsonl")):
        return JsonTask(text)
    family, *numbers = text.split(":")
    if family not in FAMILIES or len(numbers) > 2:
        raise KVCompressError(
            f"task: {text!r} is not FAMILY, FAMILY:DIFFICULTY or FAMILY:DIFFICULTY:REDUNDANCY with a family of "
            f"{', '.join(FAMILIES)}, nor a .json or .jsonl file"
        )
    settings = [DEFAULT_DIFFICULTY if difficulty is None else difficulty, DEFAULT_REDUNDANCY]
    for place, number in enumerate(numbers):
        if not re.fullmatch(r"\d{1,3}", number):
            what = ("difficulty", "redundancy")[place]
            raise KVCompressError(f"task: {text!r}: {what} {number!r} is not a whole number")
        settings[place] = int(number)
    try:
        return ReasonerTask(family, *settings)
    except KVCompressError as error:
        raise KVCompressError(f"task: {text!r}: {error}") from error


def _entries(path: str, text: str) -> list[Any]:
    try:
        if path.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        entries = json.loads(text)
    except ValueError as error:
        raise KVCompressError(f"task: file {path} is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise KVCompressError(f"task: file {path} holds {type(entries).__name__}, not a list of problems")
    return entries


def _matches(text: str, answer: str, pattern: str | None) -> bool:
    if pattern is not None:
        found = re.findall(pattern, text)
        return bool(found) and found[-1].strip() == answer
    end, wanted = text.rstrip(_CLOSING), answer.rstrip(_CLOSING)
    # Not just any punctuation before it: 1.4 and -4 are not 4.
    return bool(wanted) and end.endswith(wanted) and end[: len(end) - len(wanted)][-1:] in _OPENING


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
