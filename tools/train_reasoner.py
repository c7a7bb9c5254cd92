"""Train the bundled reasoner on its own tasks.

    OMP_NUM_THREADS=1 python tools/train_reasoner.py --output /tmp/reasoner      # trains, or goes on where it stopped
    python tools/train_reasoner.py --output /tmp/reasoner --export kvcompress/reasoner/weights

The defaults are those of the shipped weights. Everything is a function of the seed and of step counts, never of the
clock, so a run that is stopped, continued or killed at any moment ends with the same weights (on the same machine and
number of threads). A checkpoint is written to a temporary file and renamed, at the end of a round: a round is a fixed
number of problems, cut into batches of similar length.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from kvcompress.reasoner.tasks import FAMILIES, MAX_DIFFICULTY, MAX_REDUNDANCY, generate
from kvcompress.reasoner.tokenizer import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID, VOCABULARY, build_tokenizer, encode

_NO_LOSS = -100
_FIRST_LEVEL = 4  # below, look-ups have so few candidates that a model learns to guess


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    training = Training(options)
    training.resume()
    if options.export:
        training.export(Path(options.export))
    else:
        training.run()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of checkpoint and log; an existing run is continued")
    add("--export", help="write the weights of the last checkpoint to this folder and stop")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=7000, help="optimizer steps; the learning rate falls over the last 40 %%")
    add("--tokens", type=int, default=4096, help="tokens per step, padding included")
    add("--round-problems", type=int, default=96, help="problems drawn at once and sorted by length")
    add("--learning-rate", type=float, default=3e-3, help="of Muon and of AdamW")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--intermediate", type=int, default=512)
    add("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    add("--max-redundancy", type=int, default=MAX_REDUNDANCY)
    add("--minutes-between-checkpoints", type=float, default=3.0)
    add("--threads", type=int, default=1)
    return parser.parse_args()


def build_model(options: argparse.Namespace) -> Qwen3ForCausalLM:
    """A small Qwen3: QK-norm, RoPE, four query heads and two KV heads of size 32, tied embeddings."""
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=options.intermediate,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Phase:
    """What problems are drawn in a part of the training.

    Attributes:
        begin: fraction of the steps at which it begins.
        shares: of the families, relative.
        little: share of the problems with at most one restatement, where a token teaches most.
        highest: redundancy of the others, from 0 on.
        max_length: problems of more tokens are drawn again at a lower difficulty.
    """

    begin: float
    shares: dict[str, int]
    little: float
    highest: int
    max_length: int


# First, programs take the most practice: looking up statements, looking up values, and arithmetic. Then the others
# catch up, and problems grow longer. In the end, more of the one thing that is learned last: to stop at the label that
# the query names, although the prompt has the next one.
_FIRST_SHARES = {"program": 2, "interleaved": 2, "sort": 1, "store": 1}
_LATE_SHARES = {"program": 2, "interleaved": 1, "sort": 2, "store": 2}
_LAST_SHARES = {"program": 1, "interleaved": 5, "sort": 1, "store": 1}
_PHASES = (
    Phase(0.0, _FIRST_SHARES, little=1 / 2, highest=6, max_length=1600),
    Phase(0.5, _LATE_SHARES, little=1 / 3, highest=6, max_length=1600),
    Phase(0.7, _LATE_SHARES, little=1 / 3, highest=9, max_length=1800),
    Phase(0.95, _LAST_SHARES, little=2 / 3, highest=9, max_length=1800),
)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/), for matrices.

    The update is scaled by 0.2 sqrt(max(rows, columns)), which gives it the size of an AdamW update (Liu et al., 2025,
    arXiv 2502.16982), so that both optimizers can share one learning rate. In float32: bfloat16, which torch's own Muon
    uses, is emulated on most CPUs.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Matrices of one shape go through the iteration together.
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                shapes[matrix.shape].append(matrix)
            for shape, matrices in shapes.items():
                updates = []
                for matrix in matrices:
                    momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                    momentum.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(momentum, group["momentum"]))  # Nesterov
                scale = 0.2 * max(shape) ** 0.5
                for matrix, update in zip(matrices, orthogonalize(torch.stack(updates)), strict=True):
                    matrix.sub_(update, alpha=group["lr"] * scale)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About U V^T for each matrix U S V^T of (count, rows, columns), by Newton-Schulz iterations of fifth order."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@dataclass
class Progress:
    """Where a run stands; together with the seed it decides everything that follows."""

    step: int = 0
    round: int = 0
    levels: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAMILIES, _FIRST_LEVEL))  # highest drawn
    tokens: int = 0
    seconds: float = 0.0


class Training:
    """Model, optimizers and progress of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.progress = Progress()
        self.model = build_model(options)
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=options.learning_rate),
            torch.optim.AdamW(others, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        options.output.mkdir(parents=True, exist_ok=True)
        self.checkpoint = options.output / "checkpoint.pt"

    def run(self) -> None:
        count = sum(p.numel() for p in self.model.parameters())
        self.log(f"{count} parameters, from step {self.progress.step} to {self.options.steps}")
        saved = time.monotonic()
        while self.progress.step < self.options.steps:
            self.train_round()
            if time.monotonic() - saved > 60 * self.options.minutes_between_checkpoints:
                self.save()
                saved = time.monotonic()
        self.save()
        self.log("done")

    def train_round(self) -> None:
        """One round of problems; afterwards the difficulty of the families that went well rises."""
        started = time.monotonic()
        rng = Random(f"{self.options.seed} {self.progress.round}")
        batches = draw_batches(rng, self.progress, self.options)
        right: dict[str, int] = defaultdict(int)
        total: dict[str, int] = defaultdict(int)
        exact: dict[str, int] = defaultdict(int)
        count: dict[str, int] = defaultdict(int)
        loss_sum = 0.0
        for families, tokens, labels in batches:
            loss, correct = self.train_step(tokens, labels)
            loss_sum += loss
            mask = labels != _NO_LOSS
            for row, family in enumerate(families):
                hits, all_ = int(correct[row].sum()), int(mask[row].sum())
                right[family] += hits
                total[family] += all_
                exact[family] += hits == all_
                count[family] += 1
            self.progress.tokens += tokens.numel()
        self.progress.round += 1
        self.progress.seconds += time.monotonic() - started
        self.log(
            f"step {self.progress.step} loss {loss_sum / len(batches):.4f} tokens {self.progress.tokens / 1e6:.2f}M "
            f"seconds {self.progress.seconds:.0f} exact {sum(exact.values()) / self.options.round_problems:.2f} |"
            + "".join(
                f" {family} level {self.progress.levels[family]} accuracy {right[family] / total[family]:.4f} "
                f"exact {exact[family] / count[family]:.2f}"
                for family in sorted(total)
            )
        )
        for family in total:
            if right[family] / total[family] > 0.97:
                self.progress.levels[family] = min(MAX_DIFFICULTY, self.progress.levels[family] + 1)

    def train_step(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, torch.Tensor]:
        """One optimizer step on (rows, length) tokens; returns the loss and which labels were predicted."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate * schedule(self.progress.step / self.options.steps)
        # Rows are padded on the right, where causal attention never looks: no mask is needed. The head is applied
        # only where there is a loss.
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        mask = labels[:, 1:] != _NO_LOSS
        logits = self.model.lm_head(hidden[mask])
        wanted = labels[:, 1:][mask]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        correct = torch.zeros_like(mask)
        correct[mask] = logits.argmax(-1) == wanted
        return loss.item(), correct

    def save(self) -> None:
        state = {
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        if not self.checkpoint.exists():
            if self.options.export:
                sys.exit(f"--export: there is no checkpoint in {self.options.output}")
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.progress = Progress(**state["progress"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def export(self, folder: Path) -> None:
        """Model in 16 bits and tokenizer, as transformers loads them."""
        model = self.model.to(torch.float16)
        model.generation_config = GenerationConfig(
            pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID, do_sample=False
        )
        model.save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        print(json.dumps({"exported": str(folder), **asdict(self.progress)}))

    def log(self, line: str) -> None:
        print(line, flush=True)


def schedule(fraction: float) -> float:
    """Factor of the learning rate: a short warm-up, constant, and linear decay over the last 40 %."""
    # The last round may run a few steps over.
    return min(1.0, fraction / 0.01 + 0.01, max(0.0, 1 - fraction) / 0.4)


def draw_batches(
    rng: Random, progress: Progress, options: argparse.Namespace
) -> list[tuple[list[str], torch.Tensor, torch.Tensor]]:
    """Problems up to the level of their family, half of them of it, in batches of at most ``options.tokens`` tokens.

    Returns:
        for each batch, in random order: families of the rows, tokens (rows, length) padded on the right, and labels of
        the same shape, which are the tokens of the chain and _NO_LOSS elsewhere.
    """
    phase = [phase for phase in _PHASES if progress.step >= phase.begin * options.steps][-1]
    levels = progress.levels
    families = [family for family in options.families for _ in range(phase.shares[family])]
    rows = []
    for index in range(options.round_problems):
        family = families[index % len(families)]
        difficulty = levels[family] if rng.random() < 0.5 else rng.randint(1, levels[family])
        redundancy = min(options.max_redundancy, draw_redundancy(rng, levels[family], phase))
        while True:
            problem = generate(family, rng.randrange(2**40), difficulty, redundancy)
            prompt, chain = [BOS_ID, *encode(problem.prompt)], [*encode(problem.chain), EOS_ID]
            if len(prompt) + len(chain) <= phase.max_length:
                break
            difficulty -= 1
        rows.append((family, prompt + chain, [_NO_LOSS] * len(prompt) + chain))
    rows.sort(key=lambda row: len(row[1]))
    batches = []
    while rows:
        # The last row is the longest that is left: all rows of its batch are padded to it.
        count = min(len(rows), max(1, options.tokens // len(rows[-1][1])))
        batch, rows = rows[-count:], rows[:-count]
        length = len(batch[-1][1])
        tokens = torch.tensor([row[1] + [PAD_ID] * (length - len(row[1])) for row in batch])
        labels = torch.tensor([row[2] + [_NO_LOSS] * (length - len(row[2])) for row in batch])
        batches.append(([row[0] for row in batch], tokens, labels))
    rng.shuffle(batches)
    return batches


def draw_redundancy(rng: Random, level: int, phase: Phase) -> int:
    """Mostly none while a family is new, since it teaches little and takes most tokens; later any amount."""
    if level <= _FIRST_LEVEL:
        return rng.choice((0, 0, 0, 0, 0, 0, 1, 2))
    return rng.randint(0, 1) if rng.random() < phase.little else rng.randint(0, phase.highest)


if __name__ == "__main__":
    main()
