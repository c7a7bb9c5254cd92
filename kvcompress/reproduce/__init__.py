"""Claims of the literature, put to the test on the bundled reasoner: ``kvcompress reproduce``.

    plan = Plan.of(claims=["a", "d"], problems=80)
    outcome = reproduce(plan, Path("reproduction"), reasoner.load)
    write_document(outcome, Path("reproduction"))

What is compared, over which budgets, and from when on a claim holds is data (:mod:`kvcompress.reproduce.claims`) that
was written down before there were results.
"""

from __future__ import annotations

from kvcompress.reproduce.claims import CLAIMS, Claim, Comparison, Measurement, Statement
from kvcompress.reproduce.document import write_document
from kvcompress.reproduce.run import Outcome, Plan, reproduce
from kvcompress.reproduce.verdicts import Finding, Verdict, compare, conclude, judge

__all__ = [
    "CLAIMS",
    "Claim",
    "Comparison",
    "Finding",
    "Measurement",
    "Outcome",
    "Plan",
    "Statement",
    "Verdict",
    "compare",
    "conclude",
    "judge",
    "reproduce",
    "write_document",
]
