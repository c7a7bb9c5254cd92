"""Evaluation: recipes x budgets x tasks x samples, with answers that are checked, in a run that survives being killed.

    request = EvalRequest.of(model="reasoner", recipes=["full", "r-kv"], budgets=["0.25"], tasks=["program:6"])
    evaluate(request, Path("run"), loader)
    rows = summarize(read_samples(Path("run")))

``kvcompress eval`` does the same from the command line; docs/evaluation.md says what the figures are.
"""

from __future__ import annotations

from kvcompress.eval.records import read_samples, read_timings
from kvcompress.eval.request import EvalRequest
from kvcompress.eval.runner import evaluate
from kvcompress.eval.summary import Row, summarize
from kvcompress.eval.tasks import Item, JsonTask, ReasonerTask, Task, parse_task

__all__ = [
    "EvalRequest",
    "Item",
    "JsonTask",
    "ReasonerTask",
    "Row",
    "Task",
    "evaluate",
    "parse_task",
    "read_samples",
    "read_timings",
    "summarize",
]
