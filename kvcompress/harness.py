"""EleutherAI's lm-eval with a compressed KV cache, for every generative task that it has.

    kvcompress lm-eval --model_args pretrained=Qwen/Qwen3-4B,recipe=vase-attnv,budget=4096 --tasks gsm8k

is ``lm_eval --model kvcompress ...``: versions of lm-eval that find models of other packages by entry point know the
name ``kvcompress`` by themselves; for the others, this command registers it first. All other arguments of
``--model_args`` are those of lm-eval's own ``hf`` model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from kvcompress.config import load_config
from kvcompress.errors import KVCompressError
from kvcompress.kernels.backend import Backend
from kvcompress.model import apply
from kvcompress.models import SMOLLM2, load_model
from kvcompress.reasoner import WEIGHTS
from kvcompress.stats import CacheStats

NAME = "kvcompress"
_FIELDS = ("budget", "buffer", "seed", "prefill", "storage")


@register_model(NAME)
class CompressedLM(HFLM):
    """lm-eval's ``hf`` model under a recipe.

    Args:
        pretrained: as for ``hf``, or the words ``reasoner`` and ``smollm2`` for the models that come in packages.
        recipe: recipe name or YAML file. budget, buffer, seed, prefill, storage: fields of the recipe to replace.
        context_length: prompt and answer in tokens, which a budget that is a ratio needs.
        kernels: what operations run by, as ``backend`` of :func:`kvcompress.apply`.
        kwargs: of ``hf``.

    Raises:
        ConfigError: if the recipe is not possible. UnsupportedModelError: if the model cannot be compressed.
    """

    def __init__(
        self,
        pretrained: Any,
        recipe: str,
        budget: int | float | None = None,
        buffer: int | None = None,
        seed: int | None = None,
        prefill: str | None = None,
        storage: str | None = None,
        context_length: int | None = None,
        kernels: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        given = dict(zip(_FIELDS, (budget, buffer, seed, prefill, storage), strict=True))
        config = load_config(recipe, {name: value for name, value in given.items() if value is not None})
        if pretrained == SMOLLM2:
            pretrained, kwargs["tokenizer"] = load_model(
                pretrained, dtype=kwargs.pop("dtype", None), device=kwargs.get("device")
            )
        elif pretrained == "reasoner":
            pretrained = str(WEIGHTS)
            kwargs.setdefault("dtype", "float32")
        super().__init__(pretrained=pretrained, **kwargs)
        self.handle = apply(self.model, config, context_length=context_length, backend=kernels)

    def stats(self) -> CacheStats:
        """What the cache of the last answers holds."""
        return self.handle.stats()

    def loglikelihood(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        raise _not_generative("loglikelihood")

    def loglikelihood_rolling(self, requests: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        raise _not_generative("loglikelihood_rolling")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results: the whole recipe too."""
        return {**super().get_model_info(), "kvcompress": self.handle.config.model_dump(mode="json")}


def _not_generative(kind: str) -> KVCompressError:
    return KVCompressError(
        f"tasks: one of them asks for {kind}, which reads a whole text in one pass, before anything is compressed, so "
        "the score would be that of the full cache; choose tasks that generate (output_type: generate_until)"
    )


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with ``--model kvcompress``."""
    from lm_eval.__main__ import cli_evaluate

    if any(argument == "--model" or argument.startswith("--model=") for argument in arguments):
        raise KVCompressError("--model: is kvcompress here; leave it out, or use the command lm_eval")
    sys.argv = ["lm_eval", "run", "--model", NAME, *arguments]
    cli_evaluate()
