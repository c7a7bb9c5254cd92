"""What the bench needs of the Python that it runs on; imports none of it, so that it can say what is missing.

python kvcompress/bench/gpu/needed.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys

# Oldest versions, as in pyproject.toml.
NEEDED = {"torch": "2.11", "transformers": "5.17", "triton": "3.6", "pydantic": "2.9", "pyyaml": "6.0"}
_MODULES = {"pyyaml": "yaml"}


def complaint(needed: dict[str, str] = NEEDED) -> str | None:
    """One line that says what to install, or None if everything is there."""
    lacking = []
    for package, oldest in needed.items():
        if importlib.util.find_spec(_MODULES.get(package, package)) is None:
            lacking.append((f"{package}>={oldest}", "missing"))
            continue
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # Triton comes under other names for other GPUs.
            continue
        if _numbers(found) < _numbers(oldest):
            lacking.append((f"{package}>={oldest}", f"found {found}"))
    if not lacking:
        return None
    wanted = " ".join(f"'{requirement}'" for requirement, _ in lacking)
    reasons = ", ".join(f"{requirement} ({why})" for requirement, why in lacking)
    return f"make gpu needs {reasons}: {sys.executable} -m pip install {wanted}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


if __name__ == "__main__":
    sys.exit(complaint())
