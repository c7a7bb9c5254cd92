"""Compile every kernel for GPUs that are not there, and report what it takes of each.

    python -m kvcompress.kernels.checks.compiled --output-dir docs/data

Dispatching functions run as they would on a GPU, with launches that compile instead (``TRITON_INTERPRET`` must not be
set). Registers, spills and shared memory are read from what the compiler made: by cuobjdump, which comes with Triton,
from a cubin; from the metadata of AMD's assembly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvcompress.kernels.backend import backend
from kvcompress.kernels.checks.cases import Case, copied
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

    def problems(self, hot: bool) -> list[str]:
        """Why it cannot run, or runs badly."""
        found = []
        if self.shared > TARGETS[self.target]:
            found.append(f"{self}: more shared memory than the {TARGETS[self.target]} bytes that there are")
        if hot and self.spills:
            found.append(f"{self}: spills registers")
        return found


def compile_case(case: Case, target: str) -> Iterator[Resources]:
    """Compile the kernels that a case launches; those compiled before for the same arguments take no time."""
    assert not is_interpreted(), "TRITON_INTERPRET is set: nothing would be compiled"
    arguments = copied(case.make(torch.device("cpu")))
    _target(target)
    with backend("triton"), compiling() as compiled:
        case.call(**arguments)
    assert compiled, f"{case}: launched no kernel"
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


def as_rows(resources: list[Resources]) -> list[dict[str, Any]]:
    return [asdict(item) for item in resources]
