"""How commands load their models: without the libraries' own bars and notes, and the bundled reasoner by its name."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

REASONER = "reasoner"


def load_for_command(model: str, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    """Load a model and its tokenizer as :func:`kvcompress.models.load_model` does, or the bundled reasoner.

    Args:
        model: ``reasoner``, or a source that ``load_model`` takes. dtype, device: as there.

    Raises:
        KVCompressError: naming what is wrong with model, dtype or device and what is allowed.
    """
    import transformers

    from kvcompress import console, reasoner
    from kvcompress.models import SMOLLM2, load_model

    if model == REASONER:
        if not (reasoner.WEIGHTS / "model.safetensors").is_file():
            reasoner.load()  # says what is missing
        model = str(reasoner.WEIGHTS)
    # They would run through our own, and end up in the logs of those who redirect.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if model == SMOLLM2 or model.endswith(".gguf"):
        # This bar alone doesn't obey the setting above.
        from transformers import modeling_gguf_pytorch_utils as gguf_reader

        if hasattr(gguf_reader, "tqdm"):
            gguf_reader.tqdm = partial(gguf_reader.tqdm, disable=True)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\..*")
    with console.loading(model):
        return load_model(model, dtype=dtype, device=device)
