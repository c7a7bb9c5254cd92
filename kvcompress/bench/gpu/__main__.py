"""Check the kernels on a GPU, then measure them and generation; one command, offline, under ten minutes on an H200.

    python -m kvcompress.bench.gpu --output-dir gpu-report

Writes gpu.json and gpu.md after every row that is measured. If a kernel fails a check, nothing is timed and the exit
status is 1. Without a GPU the same command runs to the end at toy size in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcompress.bench.gpu.needed import complaint

PARTS = ("checks", "attention", "kernels", "decoding")


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if something failed."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m kvcompress.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-report"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run, in this order")
    parser.add_argument("--minutes", type=float, default=9.0, help="after so many, what is left is skipped and listed")
    options = parser.parse_args(given)
    lacking = complaint()
    if lacking:
        raise SystemExit(lacking)
    import torch

    from kvcompress.kernels.launch import is_interpreted

    if not torch.cuda.is_available() and not is_interpreted():
        if argv is not None:
            parser.error("there is no GPU, and TRITON_INTERPRET=1 was not set before kvcompress was imported")
        # The package itself imports Triton, which looks at the environment then: so once more from the start.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from kvcompress.bench.gpu.run import Bench

    return Bench(options.output_dir, options.minutes, given).run(options.parts)


if __name__ == "__main__":
    sys.exit(main())
