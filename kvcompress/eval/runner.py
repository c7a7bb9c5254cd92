"""Runs an evaluation: what is still to be done, in a fixed order, batch after batch.

The samples of one recipe at one budget on one task (a cell) are numbered problem by problem, and cut into batches by
that number. So a run that is taken up makes the same batches as one that never stopped; of a batch that is there in
part, because the process was killed while it was being written, all is computed again and only what is missing written.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvcompress.config import CompressionConfig, Storage, load_config
from kvcompress.environment import describe_device, versions
from kvcompress.equal_bytes import solve_for_bytes
from kvcompress.errors import ConfigError, KVCompressError
from kvcompress.eval.generation import Answer, answer_batch, end_tokens, loop_of
from kvcompress.eval.records import (
    Key,
    check_same,
    key_of,
    open_folder,
    open_journal,
    read_run,
    read_samples,
    write_run,
)
from kvcompress.eval.request import DEFAULT_NEW_TOKENS, NO_BUDGET, EvalRequest, Setting
from kvcompress.eval.tasks import Item, Task
from kvcompress.footprint import cache_bytes
from kvcompress.kernels.backend import check_backend
from kvcompress.model import Handle, apply
from kvcompress.models import encode_prompt
from kvcompress.pipeline import check_protected
from kvcompress.plan import ModelSize, measure
from kvcompress.shapes import check_codecs

Progress = Callable[[str, int, int], None]
# What solve_for_bytes says of a recipe that has no setting for it.
NOTHING_TO_CHOOSE = "nothing to choose"
_PROBED = 64


@dataclass(frozen=True)
class Cell:
    """One recipe at one budget on one task, for one model.

    Attributes:
        config: with everything filled in. context: tokens that ratios were ratios of.
        max_new_tokens: where answers are cut off.
    """

    recipe: str
    budget: str
    task: str
    config: CompressionConfig
    context: int
    max_new_tokens: int

    def document(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.model_dump(mode="json")}


def evaluate(
    request: EvalRequest,
    folder: Path,
    load: Callable[[], tuple[Any, Any]],
    *,
    command: str | None = None,
    progress: Progress = lambda label, done, total: None,
) -> dict[str, Any]:
    """Do what of a request isn't done yet in a folder.

    Args:
        load: gives model and tokenizer; called only if there is something to do.
        command: for the record. progress: called with what is being done, samples done and samples in all.

    Returns:
        What ``run.json`` says: the request, the cells, notes about what was left out.

    Raises:
        KVCompressError: if the folder holds the run of another request or model, naming the first difference; if the
            folder cannot be written; or if a recipe cannot be run on the model. What is done stays.
    """
    open_folder(folder)
    run = read_run(folder)
    if run is not None:
        check_same(folder, run["request"], request.document())
        total = len(run["cells"]) * request.problems * request.samples
        if len(read_samples(folder)) == total:
            progress("", total, total)
            return run
    model, tokenizer = load()
    check_backend(request.backend, model.device)
    size = measure(model.config, request.model, str(model.dtype).removeprefix("torch."))
    prepared = [_Prepared.of(task, request, tokenizer) for task in request.tasks]
    cells, notes = plan_cells(request, prepared, size, model.config)
    follows = {
        "model": {"dtype": size.dtype, "fingerprint": fingerprint(model)},
        "cells": [cell.document() for cell in cells],
        "notes": notes,
    }
    with open_journal(folder) as journal:
        run = _begun(folder, request, follows, command, describe_device(model.device))
        done = {key_of(sample) for sample in read_samples(folder)}
        total = len(cells) * request.problems * request.samples
        work = _Work(request, model, size, end_tokens(model, tokenizer), tokenizer)
        tasks = {task.name: task for task in prepared}
        progress("", len(done), total)
        for cell in cells:
            batches = [(batch, missing) for batch in work.batches() if (missing := _missing(cell, batch, done))]
            if not batches:
                continue
            label = f"{cell.recipe} {cell.budget} {cell.task}"
            progress(label, len(done), total)
            with _blamed(label), apply(model, cell.config, backend=request.backend) as handle:
                for batch, missing in batches:
                    samples, timing = work.do(handle, cell, tasks[cell.task], batch)
                    journal.append([sample for sample in samples if key_of(sample) in missing], timing)
                    done |= missing
                    progress(label, len(done), total)
    return run


def _begun(
    folder: Path, request: EvalRequest, follows: dict[str, Any], command: str | None, device: str
) -> dict[str, Any]:
    """What ``run.json`` says, written if it isn't there yet; called by the one process that has the folder."""
    run = read_run(folder)
    if run is not None:
        check_same(folder, run["request"], request.document())
        check_same(folder, {name: run[name] for name in follows}, follows)
        return run
    run = {
        "request": request.document(),
        **follows,
        "command": command,
        "batch_size": request.batch_size,
        "device": device,
        "versions": versions(),
    }
    write_run(folder, run)
    return run


def plan_cells(
    request: EvalRequest, tasks: Sequence[_Prepared], size: ModelSize, model_config: Any
) -> tuple[list[Cell], list[str]]:
    """What a request comes to for a model: cells in the order in which they are done, and notes on what is left out.

    A recipe is left out of a task where its budget has no room for what it protects, where it takes more bytes than
    asked for whatever its setting, and where its codecs don't fit the model, so that the others can be compared.

    Raises:
        ConfigError: if no recipe that compresses is left, though some were asked for.
    """
    cells: list[Cell] = []
    notes: list[str] = []
    for task in tasks:
        longest = task.longest_prompt + task.max_new_tokens
        for setting in request.settings:
            try:
                config, budget = _settled(setting, task, size, request.storage)
                check_codecs(config, model_config)
            except KVCompressError as error:
                notes.append(f"left out: {setting.recipe} at {setting.budget} on {task.name}: {error}")
                continue
            cell = Cell(setting.recipe, budget, task.name, config, task.context, task.max_new_tokens)
            if cell not in cells:
                cells.append(cell)
            if config.evicts and config.max_slots >= longest:
                notes.append(
                    f"{setting.recipe} at {budget} on {task.name} evicts nothing: K + B is {config.max_slots:,} "
                    f"tokens, prompt and answer have at most {longest:,}; lower the budget or the buffer"
                )
        if size.max_context is not None and longest > size.max_context:
            notes.append(
                f"{task.name}: prompt and answer may reach {longest:,} tokens, past the {size.max_context:,} of the "
                "model"
            )
    compressing = any(setting.config.stages for setting in request.settings)
    if compressing and not any(cell.config.stages for cell in cells):
        raise ConfigError(f"budgets: none leaves a recipe that compresses; {'; '.join(notes)}")
    return cells, notes


def _settled(
    setting: Setting, task: _Prepared, size: ModelSize, storage: Storage | None
) -> tuple[CompressionConfig, str]:
    """The recipe with everything filled in for a task, and the budget that it is listed under."""
    config, budget = setting.config, setting.budget
    if config.storage == "model":
        config = config.with_fields({"storage": storage or ("float16" if size.dtype == "float32" else "model")})
    if setting.target is None:
        config = config.resolve(task.context)
    else:
        target = setting.target
        if isinstance(target, float):
            full = CompressionConfig(storage=config.storage)
            target = int(target * cache_bytes(full, size.shapes, task.context, dtype=size.dtype))
        solved = solve_for_bytes(config, size.shapes, task.context, target, size.dtype)
        config = solved.config
        budget = NO_BUDGET if solved.chosen == NOTHING_TO_CHOOSE else budget
    if config.evicts:
        check_protected(config, task.longest_prompt, candidates=task.longest_prompt)
    return config, budget


def fingerprint(model: Any) -> str:
    """A hash of names, shapes and some values of all parameters, that tells other weights from the same ones."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        probed = flat[:: max(1, len(flat) // _PROBED)][:_PROBED].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(probed.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Prepared:
    """A task with its problems as tokens."""

    name: str
    items: list[Item]
    prompts: list[list[int]]
    context: int
    max_new_tokens: int

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    @classmethod
    def of(cls, task: Task, request: EvalRequest, tokenizer: Any) -> _Prepared:
        items = [task.item(index) for index in range(request.problems)]
        prompts = [encode_prompt(tokenizer, item.prompt, chat=request.chat)["input_ids"][0].tolist() for item in items]
        # Tokens of the answer as it should be, with the one that ends it.
        expected = [
            None
            if item.reference is None
            else 1 + len(tokenizer(item.reference, add_special_tokens=False)["input_ids"])
            for item in items
        ]
        known = [tokens for tokens in expected if tokens is not None]
        limit = request.max_new_tokens or (math.ceil(1.25 * max(known)) if known else DEFAULT_NEW_TOKENS)
        context = request.context or max(
            len(prompt) + (limit if tokens is None else tokens)
            for prompt, tokens in zip(prompts, expected, strict=True)
        )
        return cls(task.name, items, prompts, context, limit)


class _Work:
    """Does batches with one model."""

    def __init__(self, request: EvalRequest, model: Any, size: ModelSize, ends: set[int], tokenizer: Any) -> None:
        self.request = request
        self.model = model
        self.size = size
        self.ends = ends
        self.tokenizer = tokenizer
        self.versions = versions()

    def batches(self) -> list[list[tuple[int, int]]]:
        """(problem, sample) of every batch of a cell."""
        request = self.request
        numbered = [(p, s) for p in range(request.problems) for s in range(request.samples)]
        return [numbered[i : i + request.batch_size] for i in range(0, len(numbered), request.batch_size)]

    def do(
        self, handle: Handle, cell: Cell, task: _Prepared, batch: Sequence[tuple[int, int]]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The samples of a batch and its timing."""
        start = time.perf_counter()
        answers = answer_batch(
            handle,
            [task.prompts[problem] for problem, _ in batch],
            [sequence_id(cell.task, task.items[problem].seed, sample) for problem, sample in batch],
            ends=self.ends,
            max_new_tokens=cell.max_new_tokens,
            sampling=self.request.sampling,
        )
        seconds = time.perf_counter() - start
        pairs = zip(batch, answers, strict=True)
        samples = [self._sample(cell, task, problem, sample, answer) for (problem, sample), answer in pairs]
        tokens = sum(answer.written for answer in answers)
        timing = {
            "recipe": cell.recipe,
            "budget": cell.budget,
            "task": cell.task,
            "samples": [list(pair) for pair in batch],
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "batch_size": self.request.batch_size,
            "device": describe_device(self.model.device),
        }
        return samples, timing

    def _sample(self, cell: Cell, task: _Prepared, problem: int, sample: int, answer: Answer) -> dict[str, Any]:
        request, item = self.request, task.items[problem]
        text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        loop = loop_of(answer.tokens)
        return {
            "recipe": cell.recipe,
            "budget": cell.budget,
            "task": cell.task,
            "problem": problem,
            "problem_seed": item.seed,
            "sample": sample,
            "prompt_tokens": len(task.prompts[problem]),
            "output": text,
            "output_tokens": answer.written,
            "correct": bool(item.is_correct(text)),
            "finished": answer.finished,
            "loop": loop is not None,
            "loop_period": None if loop is None else loop[0],
            "loop_tokens": 0 if loop is None else loop[1],
            "tokens_kept": answer.kept,
            "events": answer.events,
            "kv_bytes": sequence_bytes(cell.config, self.size, answer.seen),
            "config": cell.config.model_dump(mode="json"),
            "context": cell.context,
            "max_new_tokens": cell.max_new_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.sampling.seed,
            "model": request.model,
            "dtype": self.size.dtype,
            "versions": self.versions,
        }


def sequence_id(task: str, seed: int, sample: int) -> int:
    """What keys the random numbers of a sample, under every recipe: a signed 64-bit hash."""
    digest = hashlib.blake2b(f"{task} {seed} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@lru_cache(maxsize=4096)
def _compressed_bytes(recipe: str, size: ModelSize, tokens: int) -> int:
    return cache_bytes(load_config(json.loads(recipe)), size.shapes, tokens, dtype=size.dtype)


def sequence_bytes(config: CompressionConfig, size: ModelSize, tokens: int) -> int:
    """Bytes that a cache of its own holds for one sequence of so many tokens.

    Computed, not read off the cache of the batch: what that has allocated depends on the longest of its rows.
    """
    # What evicts has allocated its slots at the first token.
    length = 1 if config.evicts else tokens
    return size.own_bytes(tokens)[0] + _compressed_bytes(json.dumps(config.model_dump(mode="json")), size, length)


def _missing(cell: Cell, batch: Sequence[tuple[int, int]], done: set[Key]) -> set[Key]:
    return {(cell.recipe, cell.budget, cell.task, problem, sample) for problem, sample in batch} - done


@contextmanager
def _blamed(label: str) -> Iterator[None]:
    """Says which cell an error comes from."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise KVCompressError(f"batch_size: {label}: out of memory; use smaller batches, the run can go on") from error
    except KVCompressError as error:
        raise type(error)(f"{label}: {error}") from error
