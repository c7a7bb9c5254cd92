"""Compile every kernel for GPUs that are not there, and report what it takes of each.

    python -m kvcompress.kernels.checks.compiled --output-dir docs/data

Dispatching functions run as they would on a GPU, with launches that compile instead (``TRITON_INTERPRET`` must not be
set). Registers, spills and shared memory are read from what the compiler made: by cuobjdump, which comes with Triton,
from a cubin; from the metadata of AMD's assembly.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kvcompress.kernels.backend import backend
from kvcompress.kernels.checks import COMPILED, Case
from kvcompress.kernels.checks.cases import copied
from kvcompress.kernels.launch import Compiled, compiling, is_interpreted, triton

# Shared memory that one program may take, in bytes (CUDA programming guide, table of compute capabilities; CDNA 3 ISA).
TARGETS: dict[str, int] = {
    "cuda:80": 163 * 1024,
    "cuda:90": 227 * 1024,
    "cuda:100": 227 * 1024,
    "hip:gfx942": 64 * 1024,
}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: bytes of shared memory, registers per thread, and spilled ones."""

    target: str
    operation: str
    case: str
    kernel: str
    warps: int
    shared: int
    registers: int
    spills: int


def compile_case(case: Case, target: str) -> Iterator[Resources]:
    """Compile the kernels that a case launches; those compiled before for the same arguments take no time."""
    assert not is_interpreted(), "TRITON_INTERPRET is set: nothing would be compiled"
    arguments = copied(case.make(torch.device("cpu")))
    _target(target)
    with backend("triton"), compiling() as compiled:
        case.call(**arguments)
    assert compiled, f"{case}: launched no kernel"
    for made in compiled:
        # On Blackwell input_precision="ieee" doesn't always hold (triton issue 10176).
        assert "tf32" not in made.kernel.asm.get("ptx", ""), f"{case}: {made.name} for {target} multiplies in TF32"
    for made in compiled:
        yield Resources(target, case.operation, case.name, made.name, made.tiling.warps, *_resources(made, target))


def _target(name: str) -> None:
    """Make Triton compile for a target from now on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    kind, _, architecture = name.partition(":")
    driver.set_active(
        _Absent(GPUTarget(kind, int(architecture) if kind == "cuda" else architecture, 32 if kind == "cuda" else 64))
    )


class _Absent:
    """A driver that knows its target and has no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps what it has compiled by device.
        return str(self.target)

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _resources(made: Compiled, target: str) -> tuple[int, int, int]:
    """Shared memory, registers, spills."""
    shared, asm = made.kernel.metadata.shared, made.kernel.asm
    if target.startswith("hip"):
        text = asm["amdgcn"]
        registers, spills = (_number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count"))
        return shared, registers, spills
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    # A stack of its own is where the compiler puts registers that it has no room for.
    return shared, _number(r"REG:(\d+)", report), _number(r"STACK:(\d+)", report) + _number(r"LOCAL:(\d+)", report)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"the compiler's report has no {pattern}"
    return int(found[1])


def distinct(resources: Iterable[Resources]) -> list[Resources]:
    """One of those that are the same kernel with the same needs, the one that was compiled first."""
    first: dict[tuple[Any, ...], Resources] = {}
    for item in resources:
        first.setdefault((item.target, item.operation, item.kernel, item.shared, item.registers), item)
    return list(first.values())


def compile_all(target: str) -> list[Resources]:
    """Compile everything for one target.

    Raises:
        AssertionError: if a product of float32 numbers is left to TF32, which rounds them to 10 bits.
    """
    return distinct(item for case in COMPILED for item in compile_case(case, target))


def main(output_dir: Path) -> None:
    """Compile for all targets, side by side, and write compiled.json and compiled.md."""
    with ProcessPoolExecutor(min(len(TARGETS), os.cpu_count() or 1), get_context("spawn")) as workers:
        resources = [item for found in workers.map(compile_all, TARGETS) for item in found]
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "compiled.json").write_text(json.dumps([asdict(item) for item in resources], indent=1) + "\n")
    (output_dir / "compiled.md").write_text(to_markdown(resources))


def to_markdown(resources: Sequence[Resources]) -> str:
    """Per kernel and target the most that a configuration without spills takes, and a list of those that spill."""
    lines = ["| operation | kernel | " + " | ".join(TARGETS) + " |", "|---|---|" + "---|" * len(TARGETS)]
    for operation, kernel in dict.fromkeys((item.operation, item.kernel) for item in resources):
        same = [i for i in resources if (i.operation, i.kernel) == (operation, kernel) and not i.spills]
        most = [_most([item for item in same if item.target == target]) for target in TARGETS]
        lines.append(f"| {operation} | `{kernel.lstrip('_')}` | {' | '.join(most)} |")
    lines += ["", "Configurations that spill:", ""]
    for operation, kernel, case in dict.fromkeys((i.operation, i.kernel, i.case) for i in resources if i.spills):
        same = [i for i in resources if (i.operation, i.kernel, i.case) == (operation, kernel, case) and i.spills]
        bytes_of = ", ".join(f"{item.spills} bytes on {item.target}" for item in same)
        lines.append(f"- {operation}, `{kernel.lstrip('_')}`, {case}: {bytes_of}")
    return "\n".join(lines) + "\n"


def _most(resources: Sequence[Resources]) -> str:
    if not resources:
        return "spills"
    shared, registers = (max(getattr(item, name) for item in resources) for name in ("shared", "registers"))
    return f"{shared / 1024:.1f} KiB, {registers}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for compiled.json and compiled.md")
    main(parser.parse_args().output_dir)
