"""Which implementation of an operation runs: its torch reference, its Triton kernel, or flash-attn.

    auto        Triton kernels on CUDA and ROCm, flash-attn for unquantized pools where it is installed, else torch
    triton      Triton kernels, flash-attn never
    flash_attn  flash-attn for unquantized pools, the rest as in auto
    torch       the references, and scaled_dot_product_attention

An operation whose kernel doesn't cover a case runs its reference, whatever is asked for; :func:`ran` tells what did.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from kvcompress.errors import ConfigError
from kvcompress.kernels import launch

Backend = Literal["auto", "triton", "flash_attn", "torch"]

_requested: ContextVar[Backend] = ContextVar("backend", default="auto")
_ran: ContextVar[dict[str, str]] = ContextVar("ran")


@contextmanager
def backend(name: Backend, ran: dict[str, str] | None = None) -> Iterator[None]:
    """Run operations within the block by the named backend.

    Args:
        ran: filled with the implementation that each operation ran by last.
    """
    request = _requested.set(name)
    record = _ran.set({} if ran is None else ran)
    try:
        yield
    finally:
        _ran.reset(record)
        _requested.reset(request)


def check_backend(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot run on a device.

    Raises:
        ConfigError: naming the backend, what it lacks, and which ones can run.
    """
    known = get_args(Backend)
    if name not in known:
        raise ConfigError(f"backend: {name!r} is not a backend; known: {', '.join(known)}")
    lacking = None
    if name == "triton":
        if launch.triton is None:
            lacking = "the package triton: pip install 'kvcompress[triton]'"
        elif device.type != "cuda" and not launch.is_interpreted():
            lacking = f"a CUDA or ROCm device, and the model lies on {device} (with TRITON_INTERPRET=1 it runs, slowly)"
    elif name == "flash_attn":
        if not _has_flash_attn():
            lacking = "the package flash-attn: pip install 'kvcompress[flash-attn]'"
        elif device.type != "cuda":
            lacking = f"a CUDA device, and the model lies on {device}"
    if lacking:
        raise ConfigError(f"backend: {name!r} needs {lacking}; use auto or torch")


def use_triton(operation: str, device: torch.device, supported: bool = True) -> bool:
    """Whether an operation runs as its Triton kernel now; notes what runs.

    Args:
        supported: whether the kernel covers the case at hand.
    """
    asked = _requested.get()
    if asked == "triton":
        chosen = supported
    else:
        chosen = supported and asked != "torch" and device.type == "cuda" and launch.triton is not None
    note(operation, "triton" if chosen else "torch")
    return chosen


def use_flash_attn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash-attn serves unquantized pools of this type."""
    if _requested.get() not in ("auto", "flash_attn") or dtype not in (torch.float16, torch.bfloat16):
        return False
    return device.type == "cuda" and _has_flash_attn()


def note(operation: str, implementation: str) -> None:
    """Record by what an operation runs."""
    record = _ran.get(None)
    if record is not None:
        record[operation] = implementation


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None
