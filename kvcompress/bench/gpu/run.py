"""The order of things: checks first, then what is measured, and the report after every row."""

from __future__ import annotations

import functools
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvcompress.bench.gpu import attention, checks, decoding, kernels, report
from kvcompress.bench.gpu.timing import Clock, Row, copy_rates, first_line, free
from kvcompress.environment import describe_device, versions
from kvcompress.kernels.launch import is_interpreted

# Shares of the time that is left which parts may take; the last one gets the rest.
MEASURED = ("attention", "kernels", "decoding")
_SHARES = {"attention": 0.45, "kernels": 0.25, "decoding": 1.0}
_COPY_BYTES = 4 << 30


def machine(device: torch.device) -> dict[str, str]:
    """The device and the versions that decide results."""
    found = {name: version or "not installed" for name, version in versions().items()}
    names = ("torch", "triton", "transformers", "kvcompress", "python")
    return {
        "device": describe_device(device),
        "driver": _driver(device),
        "CUDA or ROCm of torch": torch.version.cuda or torch.version.hip or "none",
        **{name: found[name] for name in names},
        "flash-attn": found["flash-attn"],
    }


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    for path in (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
    return "unknown"


class Bench:
    """One run: parts one after the other, the report rewritten after every row."""

    def __init__(self, output_dir: Path, minutes: float, argv: Sequence[str]) -> None:
        self.output_dir = output_dir
        self.device = torch.device("cuda:0" if torch.cuda.is_available() and not is_interpreted() else "cpu")
        self.clock = Clock(60 * minutes)
        command = shlex.join(["python", "-m", "kvcompress.bench.gpu", *argv])
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.results = report.new_results(machine(self.device), command, date, self.device.type != "cuda")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def part(self, name: str, rows: Callable[[], Iterator[Row]]) -> None:
        """Run a part, whatever becomes of it."""
        part = self.results["parts"][name]
        start = time.monotonic()
        part["status"] = "unfinished"
        report.write(self.results, self.output_dir)
        try:
            for row in rows():
                part["rows"].append(row)
                part["seconds"] = time.monotonic() - start
                # Cases come by the hundred.
                if name != "checks" or not len(part["rows"]) % 50:
                    report.write(self.results, self.output_dir)
            skipped = any("skipped" in row or row.get("status") == "skipped" for row in part["rows"])
            part["status"] = "complete but for what is listed as skipped" if skipped else "complete"
        except Exception as error:
            part["status"] = f"failed: {first_line(error)}"
        part["seconds"] = time.monotonic() - start
        free(self.device)
        report.write(self.results, self.output_dir)
        print(f"{name}: {part['status']}, {len(part['rows'])} rows, {part['seconds']:.1f} s", flush=True)

    def run(self, asked: Sequence[str]) -> int:
        """The parts that are asked for; 0, or 1 if something failed."""
        for name in (*MEASURED, "checks"):
            if name not in asked:
                self.results["parts"][name]["status"] = "not asked for"
        if "checks" in asked:
            self.part("checks", functools.partial(checks.measure_all, self.device, self.clock))
            wrong = [row for row in self.results["parts"]["checks"]["rows"] if row["status"] == "failed"]
            if wrong or "failed" in self.results["parts"]["checks"]["status"]:
                print("kernels fail their checks, so nothing is timed:")
                print("\n".join(f"  {row['case']}: {row['why']}" for row in wrong), flush=True)
                return 1
        if set(MEASURED) & set(asked):
            nbytes = _COPY_BYTES if self.on_gpu else 1 << 20
            self.part("copy", lambda: iter([copy_rates(self.device, nbytes)]))
            self._measure(asked)
        else:
            self.results["parts"]["copy"]["status"] = "not asked for"
            report.write(self.results, self.output_dir)
        wrong_at = report.failures(self.results)
        for line in wrong_at:
            print(line, flush=True)
        return 1 if wrong_at else 0

    def _measure(self, asked: Sequence[str]) -> None:
        copied = self.results["parts"]["copy"]["rows"]
        copy = copied[0]["copy_bytes_per_s"] if copied else None
        if copy is None:
            return
        measures: dict[str, tuple[Callable[..., Iterator[Row]], Any]] = {
            "attention": (attention.measure_all, attention.GRID if self.on_gpu else attention.TOY),
            "kernels": (kernels.measure_all, kernels.EVENT if self.on_gpu else kernels.TOY),
            "decoding": (decoding.measure_all, decoding.PLAN if self.on_gpu else decoding.TOY),
        }
        for name, (measure, size) in measures.items():
            if name in asked:
                clock = self.clock.share(_SHARES[name])
                self.part(name, functools.partial(measure, self.device, clock, copy, size))
