"""Every kernel, in every configuration that dispatch can choose, compiled for GPUs that are not there."""

import json
from pathlib import Path

import pytest

from kvcompress.kernels.launch import is_interpreted

if is_interpreted():
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled", allow_module_level=True)

from kvcompress.kernels.checks import COMPILED
from kvcompress.kernels.checks.compiled import TARGETS, compile_all

pytestmark = pytest.mark.slow

TABLE = Path(__file__).parents[1] / "docs" / "data" / "compiled.json"
# Products of float32 numbers, 3 bits, 8 bytes for 8-bit floats and for a tiling that isn't the default, head sizes and
# ranks that no model has, and a cosine in float64.
MAY_SPILL = ("float32", "int3", "fp8", "tiling 128x8x2", "x20,", "x20x", "x33", "normals")


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_fits_and_does_not_spill(target):
    resources = compile_all(target)
    assert {item.operation for item in resources} == {case.operation for case in COMPILED}
    for item in resources:
        assert item.shared <= TARGETS[target], item
        assert not item.spills or any(name in item.case for name in MAY_SPILL), item
    listed = {(row["operation"], row["kernel"]) for row in json.loads(TABLE.read_text()) if row["target"] == target}
    assert listed == {(item.operation, item.kernel) for item in resources}
