"""Reports of evaluations: figures, and the same numbers as tables, in one HTML file.

    results = load_results([Path("runs/budgets"), Path("runs/equal-bytes")], against="r-kv", at="0.25")
    write_report(results, Path("report"), recordings=record_maps(results, reasoner.load))

``kvcompress report`` does the same from the command line; docs/reports.md says how to read it.
"""

from __future__ import annotations

from kvcompress.eval_report.document import write_report
from kvcompress.eval_report.maps import record_maps
from kvcompress.eval_report.recording import Recording, record
from kvcompress.eval_report.results import Panel, Point, Results, load_results

__all__ = ["Panel", "Point", "Recording", "Results", "load_results", "record", "record_maps", "write_report"]
