"""A reasoning model in the box: a tiny Qwen3 that solves small problems by long chains of thought.

    model, tokenizer = kvcompress.reasoner.load()
    problem = kvcompress.reasoner.generate("program", evaluation_seed(0))

The model was trained on nothing but the problems of :mod:`kvcompress.reasoner.tasks` (``tools/train_reasoner.py``);
``weights/MODEL_CARD.md`` says how well it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import KVCompressError
from kvcompress.reasoner.tasks import FAMILIES, Problem, evaluation_seed, generate, grade

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "WEIGHTS", "Problem", "evaluation_seed", "generate", "grade", "load"]

WEIGHTS = Path(__file__).parent / "weights"


def load(
    *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", folder: str | Path | None = None
) -> tuple[Any, Any]:
    """Load the bundled reasoner.

    Args:
        dtype: precision of weights and computation; float32 by default, although the weights are stored in 16 bits.
        device: torch device.
        folder: another folder of weights, such as one that ``tools/train_reasoner.py`` exported.

    Returns:
        (a ``Qwen3ForCausalLM`` in eval mode, its tokenizer, which pads on the left).

    Raises:
        KVCompressError: if the folder has no weights.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    place = WEIGHTS if folder is None else Path(folder)
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (place / name).is_file()]
    if missing:
        raise KVCompressError(
            f"reasoner: {', '.join(missing)} missing in {place}; "
            "reinstall kvcompress, or train the weights with tools/train_reasoner.py"
        )
    model = Qwen3ForCausalLM.from_pretrained(place, dtype=dtype or torch.float32, local_files_only=True)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(place, local_files_only=True)
