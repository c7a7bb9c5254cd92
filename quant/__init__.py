"""Codecs and the stages that choose among them, one file each (installed as ``kvcompress.quant``)."""

from typing import Any

__all__ = ["STAGES"]


def __getattr__(name: str) -> Any:
    # Stages are built on codecs, and the base class of stages names them: loaded on first use, nothing is circular.
    if name == "STAGES":
        from kvcompress.quant.ladder import Ladder
        from kvcompress.quant.quantize import Quantize

        return (Quantize, Ladder)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
