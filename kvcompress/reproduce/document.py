"""What comes out of a reproduction: ``claims.json``, ``reproduction.md``, and one figure per claim.

``values.json`` has what claim e was measured on, text by text, for those who want to look closer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcompress.compare import Estimate
from kvcompress.errors import KVCompressError
from kvcompress.eval.summary import RESAMPLES
from kvcompress.report import format_bytes, write_json
from kvcompress.reproduce.claims import WHOLE, Claim, Measurement
from kvcompress.reproduce.figures import draw_claim
from kvcompress.reproduce.recipes import BUFFER, BYTES, Arm, arms_for, config_of, slug
from kvcompress.reproduce.run import RECIPES, Outcome
from kvcompress.reproduce.verdicts import CRITERIA, REACH, Finding, shown, with_error

CLAIMS_FILE, VALUES_FILE, DOCUMENT = "claims.json", "values.json", "reproduction.md"
# Problems of a task below which the output says that intervals are wide.
ENOUGH = 50
FOOTNOTE = (
    "difference: of pass@1 in points, first minus second, problems of all tasks pooled and each the mean over the "
    f"cache sizes of the comparison, ± standard error by bootstrap over problems ({RESAMPLES:,} resamples); 95 % "
    f"interval: ± {REACH} of it."
)


def check_figures() -> None:
    """Raises: KVCompressError: if matplotlib is not installed, before hours of work rather than after."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise KVCompressError("reproduce draws figures with matplotlib: pip install matplotlib") from error


def warning(outcome: Outcome) -> str:
    """What readers have to know about few problems, or nothing."""
    problems = outcome.plan.request.problems
    if problems >= ENOUGH:
        return ""
    return f"Only {problems} problems of each task: intervals are wide, and 'undecided' means little."


def claims_document(outcome: Outcome) -> dict[str, Any]:
    """``claims.json``: what ``reproduction.md`` says, and every recipe as YAML."""
    request = outcome.plan.request.document()
    recipes = dict.fromkeys(arm.recipe for arm in outcome.plan.arms)
    return {
        "command": outcome.command,
        "settings": {name: request[name] for name in ("model", "tasks", "problems", "samples", "temperature", "seed")}
        | {"buffer": BUFFER},
        "seconds": outcome.seconds,
        "versions": outcome.versions,
        "criteria": {str(name): text for name, text in CRITERIA.items()},
        "warning": warning(outcome) or None,
        "claims": [
            {
                "key": claim.key,
                "title": claim.title,
                "statements": [
                    {
                        "statement": statement.text,
                        "published": statement.published,
                        "verdict": str(outcome.verdict(claim, number)),
                        "findings": [finding.document() for finding in outcome.findings[claim.key, number]],
                    }
                    for number, statement in enumerate(claim.statements)
                ],
            }
            for claim in outcome.plan.claims
        ],
        "accuracy": [
            {
                "recipe": arm.recipe,
                "size": arm.size,
                "mean": value.mean,
                "standard_error": value.standard_error,
                "kv_bytes": outcome.bytes_held[arm],
            }
            for arm, value in outcome.accuracy.items()
        ],
        "recipes": {recipe: config_of(recipe, request["seed"]).to_yaml() for recipe in recipes},
        "notes": outcome.notes,
    }


def write_document(outcome: Outcome, folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """Write everything; returns the files, and what ``claims.json`` says.

    Raises:
        KVCompressError: if the folder cannot be written, or matplotlib is not installed.
    """
    document = claims_document(outcome)
    files = [folder / CLAIMS_FILE, folder / DOCUMENT]
    try:
        write_json(files[0], document)
        if outcome.measured:
            files.append(folder / VALUES_FILE)
            write_json(files[-1], {"by text, layer and bits": outcome.measured})
        for claim in outcome.plan.claims:
            files.append(folder / figure_name(claim))
            files[-1].write_bytes(draw_claim(claim, outcome))
        files[1].write_text(to_markdown(outcome), encoding="utf-8")
    except OSError as error:
        raise KVCompressError(f"output folder: {folder} cannot be written: {error.strerror or error}") from error
    return files, document


def figure_name(claim: Claim) -> str:
    return f"reproduction-{claim.key}.png"


def to_markdown(outcome: Outcome) -> str:
    """``reproduction.md``."""
    plan = outcome.plan
    tasks = ", ".join(f"`{task.name}`" for task in plan.request.tasks)
    count = sum(map(len, outcome.findings.values()))
    lines = [
        f"<!-- generated by {outcome.command or 'kvcompress reproduce'} -->",
        "",
        "# Claims, reproduced on the bundled reasoner",
        "",
        f"    {outcome.command or 'kvcompress reproduce'}",
        "",
        f"{plan.request.problems} problems of each of {tasks}, one greedy answer each, buffer {BUFFER}, 16-bit cache "
        f"unless quantized; {len(plan.arms)} recipes at cache sizes, {outcome.seconds / 60:.0f} minutes of batches.",
        "",
        FOOTNOTE,
        "",
        *(f"- **{name}**: {text}." for name, text in CRITERIA.items()),
        "",
        f"{count} comparisons in all: where there is no difference, one interval in 40 lies above 0 by chance, and one "
        "below.",
    ]
    if note := warning(outcome):
        lines += ["", f"**{note}**"]
    lines += ["", "| | statement | published | verdict here |", "|---|---|---|---|"]
    for claim in plan.claims:
        for number, statement in enumerate(claim.statements):
            verdict = outcome.verdict(claim, number)
            lines.append(f"| {claim.key} | {statement.text} | {statement.published} | **{verdict}** |")
    for claim in plan.claims:
        lines += _claim_section(claim, outcome)
    return "\n".join([*lines, *_accuracy_section(outcome), *_recipe_section(plan.arms, outcome)]) + "\n"


def _claim_section(claim: Claim, outcome: Outcome) -> list[str]:
    lines = ["", f"## {claim.key}. {claim.title}", "", f"![{claim.title}]({figure_name(claim)})"]
    for number, statement in enumerate(claim.statements):
        findings = outcome.findings[claim.key, number]
        lines += ["", f"**{statement.text}**: {outcome.verdict(claim, number)}. Published: {statement.published}.", ""]
        if isinstance(statement.comparisons[0], Measurement):
            lines += ["| measured | value | 95 % interval | claimed | n | verdict |", "|---|---|---|---|---|---|"]
            for finding in findings:
                bar = f"above {finding.bar:g}"
                cells = [finding.label, *shown(finding), bar, str(finding.count), str(finding.verdict)]
                lines.append(f"| {' | '.join(cells)} |")
            continue
        lines += [
            "| first - second | first, % | second, % | difference | 95 % interval | verdict | by size | by task |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for finding in findings:
            cells = [
                finding.label,
                _percent(finding.better),
                _percent(finding.worse),
                *shown(finding),
                str(finding.verdict),
                _details(finding, "size "),
                _details(finding, "task "),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _accuracy_section(outcome: Outcome) -> list[str]:
    sizes = sorted({arm.size for arm in outcome.accuracy})
    recipes = list(dict.fromkeys(arm.recipe for arm in outcome.accuracy))
    lines = ["", "## Accuracy of all recipes", "", "pass@1 in %, all problems, and mean bytes held at the end.", ""]
    lines += [f"| recipe | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for recipe in recipes:
        cells = []
        for size in sizes:
            arm = Arm(recipe, size)
            known = outcome.accuracy.get(arm)
            cells.append("" if known is None else f"{_percent(known)}, {format_bytes(outcome.bytes_held[arm])}")
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    return lines + [f"\n- {note}" for note in outcome.notes]


def _recipe_section(arms: Sequence[Arm], outcome: Outcome) -> list[str]:
    """How to run one of them alone."""
    request = outcome.plan.request
    tasks = ",".join(task.name for task in request.tasks)
    one = next((arm for arm in arms if arm.size != WHOLE and not arm.size.startswith(BYTES)), None)
    if one is None:
        return []
    seed = request.sampling.seed
    command = (
        f"kvcompress eval -r {RECIPES}/{slug(one.recipe)}.yaml --budget {one.size} --task {tasks} "
        f"-p {request.problems} --batch-size {request.batch_size} --seed {seed} -o alone"
    )
    lines = ["", "## Recipes", "", f"Each is a file in `{RECIPES}/`; one of them alone, in this folder:", ""]
    lines += [f"    {command}", "", f"`{BYTES}0.4` is `--equal-bytes 0.4` in place of `--budget`.", ""]
    lines += ["| recipe | file | stages |", "|---|---|---|"]
    for recipe in dict.fromkeys(arm.recipe for arm in arms_for(outcome.plan.claims)):
        stages = " → ".join(stage.stage for stage in config_of(recipe, seed).stages) or "none"
        lines.append(f"| {recipe} | `{slug(recipe)}.yaml` | {stages} |")
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    return [*lines, "", f"Versions: {versions}."]


def _details(finding: Finding, kind: str) -> str:
    parts = {name.removeprefix(kind): value for name, value in finding.details.items() if name.startswith(kind)}
    return ", ".join(f"{name} {with_error(value, 100, '+.0f')}" for name, value in parts.items())


def _percent(value: Estimate | None) -> str:
    return "-" if value is None else with_error(value, 100, ".1f")
