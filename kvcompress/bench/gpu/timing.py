"""How things are timed, and how much time is left for them.

On a GPU: CUDA events around one call, with a cold L2 (``triton.testing.do_bench``), the median. A call is captured in a
CUDA graph first and its replays are timed, so that the time is the device's; the time of the call as Python makes it is
given beside it, since an eager decode step pays that. In the interpreter a plain clock serves, which means nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]

# Milliseconds of warm-up and of measuring, per call.
_WARMUP, _REPEAT = 10, 60


class Clock:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    def share(self, share: float) -> Clock:
        """A clock for a part of what is left."""
        return Clock(share * self.left)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back memory that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(call: Callable[[], Any], device: torch.device, capture: bool = True) -> Row:
    """Median microseconds of a call: ``us`` on the device, and ``eager_us`` as Python makes it.

    Args:
        capture: time replays of a CUDA graph. Where there is none, or the call cannot be captured, ``us`` is the eager
            time; ``timed`` says which it is.
    """
    if device.type != "cuda":
        eager = _plain(call)
        return {"us": eager, "eager_us": eager, "timed": "clock"}
    eager = _median_us(call)
    if not capture:
        return {"us": eager, "eager_us": eager, "timed": "eager"}
    try:
        replay = _captured(call)
    except Exception as error:
        return {"us": eager, "eager_us": eager, "timed": f"eager, since it was not captured: {first_line(error)}"}
    return {"us": _median_us(replay), "eager_us": eager, "timed": "graph"}


def _median_us(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return 1000 * float(do_bench(call, warmup=_WARMUP, rep=_REPEAT, return_mode="median"))


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
    # Once on another stream, as capturing asks for; libraries and compilers then have what they need.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def _plain(call: Callable[[], Any], repeats: int = 3) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def copy_rates(device: torch.device, nbytes: int) -> Row:
    """Bytes per second of a copy within the device, read and written bytes counted, and of a sum that only reads."""
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copied = measure(lambda: target.copy_(source), device)
    summed = measure(lambda: source.sum(), device)
    return {
        "bytes": nbytes,
        "copy_us": copied["us"],
        "copy_bytes_per_s": rate(2 * nbytes, copied["us"]),
        "read_us": summed["us"],
        "read_bytes_per_s": rate(nbytes, summed["us"]),
    }


def rate(nbytes: float, us: float) -> float:
    """Bytes per second."""
    return nbytes / us * 1e6


def difference(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected|, of all elements together; NaN if either holds one."""
    wide = expected.double()
    return float((result.double() - wide).norm() / wide.norm().clamp_min(torch.finfo(torch.float64).tiny))


def first_line(error: BaseException) -> str:
    """Kind and first line of an error, for a report."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
