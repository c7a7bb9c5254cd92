"""Generation for the command line: text as it comes, with times."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer


class TimedStreamer(TextStreamer):
    """Prints the answer to standard output as it grows, if wanted, and notes when each token came.

    Attributes:
        started: when the prompt was handed in. arrivals: times of the tokens, in seconds of ``time.perf_counter``.
    """

    def __init__(self, tokenizer: Any, *, visible: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.visible = visible
        self.started = time.perf_counter()
        self.arrivals: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append(time.perf_counter())
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.visible:
            super().on_finalized_text(text, stream_end)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from the start to the first token: reading the prompt."""
        return self.arrivals[0] - self.started if self.arrivals else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode steps per second; the first token comes out of the prompt and doesn't count."""
        if len(self.arrivals) < 2:
            return None
        return (len(self.arrivals) - 1) / (self.arrivals[-1] - self.arrivals[0])


def generate(
    model: Any,
    encoded: dict[str, Tensor],
    streamer: TimedStreamer,
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Tensor:
    """Generate from one prompt, greedily unless ``temperature`` or ``top_p`` asks for sampling.

    Returns:
        (new tokens,) int64 on the CPU.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature or (top_p is not None and temperature is None):
        # Other filters that a checkpoint sets by default stay off, so that the two settings say all there is.
        sampling = {"do_sample": True, "temperature": temperature or 1.0, "top_p": top_p or 1.0, "top_k": 0}
    torch.manual_seed(seed)
    inputs = {name: tensor.to(model.device) for name, tensor in encoded.items()}
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
    return output[0, inputs["input_ids"].shape[1] :].cpu()
