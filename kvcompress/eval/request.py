"""What an evaluation is asked to do, checked as far as that goes without the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast, get_args

from kvcompress.compare import comparison_configs
from kvcompress.config import CompressionConfig, Storage
from kvcompress.errors import KVCompressError
from kvcompress.eval.generation import Sampling
from kvcompress.eval.tasks import Task, parse_task
from kvcompress.kernels.backend import Backend
from kvcompress.quantities import BYTES, parse_quantity

# The budget of a recipe that has none to choose.
NO_BUDGET = "-"
DEFAULT_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Setting:
    """A recipe and what it may take.

    Attributes:
        recipe: its name. budget: as asked for, such as ``160``, ``0.25`` or ``8MiB``.
        config: the recipe, its budget possibly a ratio of the context.
        target: bytes per sequence, or their ratio to the full cache, that the recipe is to be solved for; or None.
    """

    recipe: str
    budget: str
    config: CompressionConfig
    target: int | float | None = None


@dataclass(frozen=True)
class EvalRequest:
    """Recipes x budgets x tasks x problems x samples.

    Attributes:
        model: where it comes from. settings: recipes with budgets. tasks: what is asked.
        problems: of each task. samples: answers to each problem.
        max_new_tokens: of an answer; by default a quarter more than the longest reference, or 1024 without references.
        context: tokens that ratios are ratios of; by default prompt and reference of the longest problem.
        chat: as in :func:`kvcompress.models.encode_prompt`.
        storage: type of the slots of recipes that don't say it; by default 16 bits, float16 where the model computes in
            float32, so that what takes fewer bits is compared with what models are served with.
        batch_size: answers side by side; decides speed and memory, and nothing but rounding otherwise.
    """

    model: str
    settings: tuple[Setting, ...]
    tasks: tuple[Task, ...]
    problems: int
    samples: int
    sampling: Sampling
    max_new_tokens: int | None
    context: int | None
    chat: bool | None
    storage: Storage | None
    batch_size: int
    dtype: str | None
    backend: Backend

    @classmethod
    def of(
        cls,
        *,
        model: str = "reasoner",
        recipes: Sequence[str],
        tasks: Sequence[str | Task],
        budgets: Sequence[str] = (),
        equal_bytes: Sequence[str] = (),
        buffer: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        difficulty: int | None = None,
        problems: int = 100,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        max_new_tokens: int | None = None,
        context: int | None = None,
        chat: bool | None = None,
        storage: str | None = None,
        batch_size: int = 32,
        dtype: str | None = None,
        backend: str = "auto",
    ) -> Self:
        """Check what people write and put it together.

        Args:
            recipes: names or YAML files. tasks: as for :func:`parse_task`, or tasks of your own.
            budgets: numbers of tokens, or ratios of the context, for the recipes that evict; by default their own.
            equal_bytes: instead of budgets, sizes per sequence (8MiB) or ratios of the full cache (0.25) that every
                recipe is solved for.
            buffer, overrides: as for :func:`kvcompress.compare.comparison_configs`.
            difficulty: of the reasoner's families that come without one.
            seed: of sampled tokens, and of the recipes' random stages.

        Raises:
            KVCompressError: naming field, value and what is allowed.
        """
        for field, value in (
            ("problems", problems),
            ("samples", samples),
            ("batch_size", batch_size),
            ("max_new_tokens", max_new_tokens),
            ("context", context),
        ):
            if value is not None and value < 1:
                raise KVCompressError(f"{field}: {value} must be at least 1")
        if backend not in get_args(Backend):
            raise KVCompressError(f"backend: {backend!r} is not one of {', '.join(get_args(Backend))}")
        if storage is not None and storage not in get_args(Storage):
            raise KVCompressError(f"storage: {storage!r} is not one of {', '.join(get_args(Storage))}")
        if not recipes:
            raise KVCompressError("recipes: none given; name at least one")
        if budgets and equal_bytes:
            raise KVCompressError(
                "budgets: given together with equal bytes, which choose them; leave out one of the two"
            )
        sampling = Sampling(temperature, top_p, seed)
        given = tuple(parse_task(task, difficulty) if isinstance(task, str) else task for task in tasks)
        _check_tasks(given, problems)
        shared: dict[str, Any] = {"buffer": buffer, "seed": seed, "overrides": overrides}
        if equal_bytes:
            settings = _equal_bytes_settings(comparison_configs(recipes, **shared), equal_bytes)
        else:
            settings = _budget_settings(recipes, budgets, shared)
        return cls(
            model=model,
            settings=tuple(settings),
            tasks=given,
            problems=problems,
            samples=samples,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            context=context,
            chat=chat,
            storage=cast(Storage | None, storage),
            batch_size=batch_size,
            dtype=dtype,
            backend=cast(Backend, backend),
        )

    def document(self) -> dict[str, Any]:
        """All that decides the samples, ready for JSON; the batch size doesn't."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "backend": self.backend,
            "chat": self.chat,
            "storage": self.storage,
            "tasks": [task.settings for task in self.tasks],
            "problems": self.problems,
            "samples": self.samples,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": self.sampling.seed,
            "max_new_tokens": self.max_new_tokens,
            "context": self.context,
            "settings": [
                {
                    "recipe": setting.recipe,
                    "budget": setting.budget,
                    "target": setting.target,
                    "config": setting.config.model_dump(mode="json"),
                }
                for setting in self.settings
            ],
        }


def _check_tasks(tasks: Sequence[Task], problems: int) -> None:
    if not tasks:
        raise KVCompressError("tasks: none given; name at least one")
    names = [task.name for task in tasks]
    for task in tasks:
        if names.count(task.name) > 1:
            raise KVCompressError(f"tasks: {task.name!r} is given twice; name each task once")
        if task.size is not None and problems > task.size:
            raise KVCompressError(f"problems: {problems} asked for, but task {task.name!r} has only {task.size}")


def _budget_settings(recipes: Sequence[str], budgets: Sequence[str], shared: Mapping[str, Any]) -> list[Setting]:
    labels = _distinct("budget", budgets)
    if not labels:
        own = comparison_configs(recipes, **shared)
        return [Setting(c.name, str(c.budget) if c.evicts else NO_BUDGET, c) for c in own]
    by_budget = {label: comparison_configs(recipes, budget=_budget(label), **shared) for label in labels}
    settings = []
    for index in range(len(recipes)):
        configs = {label: configs[index] for label, configs in by_budget.items()}
        first = configs[labels[0]]
        if first.evicts:
            settings += [Setting(config.name, label, config) for label, config in configs.items()]
        else:
            settings.append(Setting(first.name, NO_BUDGET, first))
    return settings


def _equal_bytes_settings(configs: Sequence[CompressionConfig], sizes: Sequence[str]) -> list[Setting]:
    targets = {label: _target(label) for label in _distinct("equal bytes", sizes)}
    settings = []
    for config in configs:
        if config.stages:
            settings += [Setting(config.name, label, config, target) for label, target in targets.items()]
        else:
            settings.append(Setting(config.name, NO_BUDGET, config))
    if all(setting.target is None for setting in settings):
        raise KVCompressError("equal bytes: none of the recipes has anything to choose; add one that compresses")
    return settings


def _distinct(field: str, labels: Sequence[str]) -> list[str]:
    for label in labels:
        if list(labels).count(label) > 1:
            raise KVCompressError(f"{field}: {label!r} is given twice")
    return list(labels)


def _budget(text: str) -> int | float:
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return float(text)
    raise KVCompressError(f"budget: {text!r} is not a number of tokens, nor a ratio between 0 and 1")


def _target(text: str) -> int | float:
    if re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return float(text)
    return parse_quantity("equal bytes", text, BYTES, "a size per sequence (8MiB) or a ratio of the full cache (0.25)")
