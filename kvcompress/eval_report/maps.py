"""Which recipes of a run to watch on which problem, and with what model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcompress.config import load_config
from kvcompress.errors import KVCompressError
from kvcompress.eval.generation import end_tokens
from kvcompress.eval.request import NO_BUDGET
from kvcompress.eval.runner import fingerprint, sequence_id
from kvcompress.eval.tasks import parse_task
from kvcompress.eval_report.recording import VALUE_RANGE, Recording, own_answer, record
from kvcompress.eval_report.results import Results
from kvcompress.models import encode_prompt

_FEW = 4
_FEW_LAYERS = 3


def record_maps(
    results: Results,
    load: Callable[[], tuple[Any, Any]],
    *,
    recipes: Sequence[str] = (),
    task: str | None = None,
    problem: int = 0,
    layers: Sequence[int] = (),
) -> list[Recording]:
    """Let recipes read the model's own answer, written with the full cache, to one problem of the runs.

    Args:
        load: gives model and tokenizer of the runs.
        recipes: by name; by default up to four that evict, at the budget of the ablation.
        task: as for :func:`kvcompress.eval.parse_task`; by default the first of the runs that isn't a file.
        layers: by default the first, the middle and the last one.

    Raises:
        KVCompressError: naming recipe, task, problem or layer, if the runs or the model have no such thing, or the
            model, if it isn't that of the runs.
    """
    asked = results.runs[0].about["request"]
    known = {settings["name"]: settings for run in results.runs for settings in run.about["request"]["tasks"]}
    if task is None:
        task = next((name for name, settings in known.items() if "family" in settings), None)
        if task is None:
            raise KVCompressError(f"map task: the tasks {', '.join(known)} come from files; give one of these files")
    chosen = parse_task(task)
    if chosen.settings != known.get(chosen.name):
        why = "has other problems than in the runs" if chosen.name in known else f"is none of {', '.join(known)}"
        raise KVCompressError(f"map task: {task!r} {why}")
    if not 0 <= problem < asked["problems"]:
        raise KVCompressError(f"map problem: {problem} is none of the {asked['problems']} of the runs, from 0 on")
    cells = _cells(results, chosen.name, recipes)
    model, tokenizer = load()
    if fingerprint(model) != results.runs[0].about["model"]["fingerprint"]:
        raise KVCompressError(
            f"model: its weights, in {str(model.dtype).removeprefix('torch.')}, are not those of the runs, made with "
            f"{asked['model']} in {results.runs[0].about['model']['dtype']}"
        )
    item = chosen.item(problem)
    prompt = encode_prompt(tokenizer, item.prompt, chat=asked["chat"])["input_ids"][0].tolist()
    key = sequence_id(chosen.name, item.seed, 0)
    limit = cells[0]["max_new_tokens"]
    answer = own_answer(model, prompt, key, ends=end_tokens(model, tokenizer), max_new_tokens=limit)
    places = _layers(model, layers)
    texts = [tokenizer.decode([token]) for token in (*prompt, *answer)]
    recordings = [
        record(
            model,
            load_config(cell["config"]),
            prompt,
            answer,
            budget=cell["budget"],
            sequence_id=key,
            layers=places,
        )
        for cell in cells
    ]
    for recording in recordings:
        recording.texts = texts
    return recordings


def _cells(results: Results, task: str, recipes: Sequence[str]) -> list[dict[str, Any]]:
    cells = [
        cell
        for run in results.runs
        for cell in run.about["cells"]
        if cell["task"] == task and cell["budget"] in (results.at, NO_BUDGET)
    ]
    there: dict[str, dict[str, Any]] = {}
    for cell in cells:
        there.setdefault(cell["recipe"], cell)
    if recipes:
        for name in recipes:
            if name not in there:
                raise KVCompressError(
                    f"map recipe: {name!r} is none of those at budget {results.at} on {task}: {', '.join(there)}"
                )
        return [there[name] for name in dict.fromkeys(recipes)]
    evicting = [cell for cell in there.values() if load_config(cell["config"]).evicts]
    if not evicting:
        raise KVCompressError(
            f"map recipe: no recipe at budget {results.at} on {task} evicts; there are {', '.join(there)}"
        )
    # One that protects by value range, if there is one, so that its threshold can be shown.
    protecting = [cell for cell in evicting if any(s["stage"] == VALUE_RANGE for s in cell["config"]["stages"])]
    few = evicting[:_FEW]
    return few if not protecting or protecting[0] in few else [*few[:-1], protecting[0]]


def _layers(model: Any, layers: Sequence[int]) -> list[int]:
    from kvcompress.support import compressible_layers

    possible = compressible_layers(model.config.get_text_config(decoder=True))
    for layer in layers:
        if layer not in possible:
            raise KVCompressError(
                f"map layer: {layer} is none of the compressed layers {', '.join(map(str, possible))}"
            )
    if layers:
        return sorted(set(layers))
    last = len(possible) - 1
    return sorted({possible[round(last * k / (_FEW_LAYERS - 1))] for k in range(_FEW_LAYERS)})
