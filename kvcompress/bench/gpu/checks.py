"""Every case of :mod:`kvcompress.kernels.checks` by its kernel, natively: the gate before anything is timed.

Most of the time goes to compiling, and to drawing the data of heavy cases on the CPU, so several processes share the
cases; one heavy case at a time uses the GPU. What ran out of memory beside others, or came after a fault of the device
in its process, runs again alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from kvcompress.bench.gpu.timing import Clock, Row, first_line, free
from kvcompress.kernels.checks import CASES, Case, check
from kvcompress.kernels.checks.cases import Arguments

_WORKERS = 8
# Cases of each operation in the interpreter, which the tests run through all of them.
_FEW = 3


def measure_all(device: torch.device, clock: Clock) -> Iterator[Row]:
    """One row per case: passed, failed or skipped, and why."""
    if device.type != "cuda":
        for index in few(CASES):
            yield run_case(index)
        return
    todo = sorted(range(len(CASES)), key=lambda index: not CASES[index].heavy)
    for workers in (min(_WORKERS, max(1, (os.cpu_count() or 2) // 2)), 1, 1):
        again = []
        for row in _run_all(todo, workers, clock):
            if row["status"] == "again":
                again.append(row)
            else:
                yield row
        todo = [row["index"] for row in again]
        if not todo:
            return
    for row in again:
        yield row | {"status": "skipped" if row["memory"] else "failed"}


def few(cases: Sequence[Case]) -> list[int]:
    """Indices of a handful of light cases per operation, from end to end of what there is."""
    chosen = []
    for operation in dict.fromkeys(case.operation for case in cases):
        light = [i for i, case in enumerate(cases) if case.operation == operation and not case.heavy]
        chosen += light[:: max(1, len(light) // _FEW)][:_FEW]
    return chosen


def _run_all(todo: Sequence[int], workers: int, clock: Clock) -> Iterator[Row]:
    context = get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start, (context.Lock(),))
    waiting: dict[Future[Row], int] = {pool.submit(run_case, index): index for index in todo}
    while waiting:
        done, _ = wait(waiting, timeout=clock.left, return_when=FIRST_COMPLETED)
        for future in done:
            index = waiting.pop(future)
            try:
                yield future.result()
            except BrokenProcessPool:
                yield _row(index, "failed", "its process died, or another one beside it")
        if not done and clock.is_over:
            for index in waiting.values():
                yield _row(index, "skipped", "no time left")
            break
    pool.shutdown(cancel_futures=True)


_heavy: Any = nullcontext()
_fault: str | None = None


def _start(lock: Any) -> None:
    global _heavy
    _heavy = lock


def run_case(index: int) -> Row:
    """Check a case in this process."""
    global _fault
    if _fault is not None:
        return _row(index, "again", f"after a fault in another case: {_fault}")
    case = CASES[index]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Drawn on the CPU, beside what the GPU does for others.
        given = [case.make(device)]
        with _heavy if case.heavy else nullcontext():
            row = _verdict(index, given, device)
            if case.heavy:
                free(device)
    except Exception as error:
        row = _error(index, error)
    if "CUDA error" in row["why"] or "HIP error" in row["why"]:
        # The device is lost to this process.
        _fault = str(case)
    return row


def _verdict(index: int, given: list[Arguments], device: torch.device) -> Row:
    """The arguments come in a list, which is emptied, so that nothing holds them longer than the check does."""
    try:
        outcomes = check(replace(CASES[index], make=lambda _: given.pop()), device)
    except Exception as error:
        return _error(index, error)
    passed = all(outcome.passed for outcome in outcomes)
    row = _row(index, "passed" if passed else "failed", "" if passed else str(outcomes))
    return row | {"outcomes": [outcome._asdict() for outcome in outcomes]}


def _error(index: int, error: Exception) -> Row:
    if isinstance(error, torch.OutOfMemoryError):
        return _row(index, "again", f"does not fit: {first_line(error)}") | {"memory": True}
    return _row(index, "failed", first_line(error))


def _row(index: int, status: str, why: str) -> Row:
    case = CASES[index]
    return {"index": index, "case": str(case), "status": status, "why": why, "heavy": case.heavy, "memory": False}
