"""Free-running accuracy of the bundled reasoner on held-out problems: greedy, batched, optionally compressed.

    OMP_NUM_THREADS=1 python tools/evaluate_reasoner.py --difficulties 3 8 --problems 100
    OMP_NUM_THREADS=1 python tools/evaluate_reasoner.py --recipe snapkv --smaller 4 --difficulties 6

Prints one line for each family and difficulty: mean number of tokens of prompt and chain, problems answered rightly,
and problems whose whole chain is that of the generator.
"""

from __future__ import annotations

import argparse
import math
import time

import torch

import kvcompress
from kvcompress.reasoner import FAMILIES, Problem, evaluation_seed, generate, grade, load
from kvcompress.reasoner.tasks import DEFAULT_REDUNDANCY


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(folder=options.folder)
    for difficulty in options.difficulties:
        for family in options.families:
            started = time.monotonic()
            problems = [
                generate(family, evaluation_seed(index), difficulty, options.redundancy)
                for index in range(options.first, options.first + options.problems)
            ]
            texts = answers(model, tokenizer, problems, options)
            right = sum(grade(problem, text) for problem, text in zip(problems, texts, strict=True))
            exact = sum(problem.chain == text for problem, text in zip(problems, texts, strict=True))
            tokens = sum(length(problem) for problem in problems) / len(problems)
            print(
                f"{family} difficulty {difficulty} redundancy {options.redundancy} tokens {tokens:.0f} "
                f"right {right} of {len(problems)}, chain exact {exact}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", help="weights to evaluate; by default those of the package")
    add("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--difficulties", type=int, nargs="+", default=[3, 8])
    add("--redundancy", type=int, default=DEFAULT_REDUNDANCY)
    add("--problems", type=int, default=100, help="of each family and difficulty")
    add("--first", type=int, default=0, help="number of the first evaluation seed")
    add("--batch", type=int, default=50)
    add("--recipe", help="compress by this recipe; by default transformers' own full cache")
    add("--smaller", type=float, default=4.0, help="with --recipe: tokens of the longest problem per token kept")
    add("--buffer", type=int, default=8, help="with --recipe: tokens between two compressions")
    add("--threads", type=int, default=1)
    return parser.parse_args()


def length(problem: Problem) -> int:
    """Tokens of prompt and chain, with <bos> and <eos>."""
    return len(problem.prompt) + len(problem.chain) + 2


def answers(model: object, tokenizer: object, problems: list[Problem], options: argparse.Namespace) -> list[str]:
    """What the model writes for each problem; problems of similar length share a batch."""
    order = sorted(range(len(problems)), key=lambda index: length(problems[index]))
    texts = [""] * len(problems)
    for start in range(0, len(order), options.batch):
        indices = order[start : start + options.batch]
        batch = [problems[index] for index in indices]
        if options.recipe is None:
            written = write(model, tokenizer, batch)
        else:
            budget = math.ceil(max(length(problem) for problem in batch) / options.smaller)
            with kvcompress.apply(model, options.recipe, budget=budget - options.buffer, buffer=options.buffer):
                written = write(model, tokenizer, batch)
        for index, text in zip(indices, written, strict=True):
            texts[index] = text
    return texts


def write(model: object, tokenizer: object, batch: list[Problem]) -> list[str]:
    """Greedy continuations, at most a quarter longer than the reference chain of the longest."""
    inputs = tokenizer([problem.prompt for problem in batch], padding=True, return_tensors="pt")
    limit = max(len(problem.chain) for problem in batch)
    output = model.generate(**inputs, max_new_tokens=limit + limit // 4, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
