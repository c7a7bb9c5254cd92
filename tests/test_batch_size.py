"""The bundled reasoner gives the same answers alone and in a batch, under every packaged recipe."""

import pytest

import kvcompress
from kvcompress import reasoner
from kvcompress.eval import EvalRequest, evaluate, read_samples

# Fields that differ from the recipe's own: codecs in blocks of 64 channels don't fit heads of 32, and keys per channel
# need a buffer of whole groups.
CHANGES = {
    "nf4": {"quantize.keys": {"codec": "nf4", "group": 32}, "quantize.values": {"codec": "nf4", "group": 32}},
    "kivi": {"buffer": 32},
}
PROBLEMS = 32


@pytest.mark.slow
@pytest.mark.parametrize("recipe", kvcompress.recipe_names())
def test_the_batch_size_changes_no_answer(recipe, tmp_path):
    changes = CHANGES.get(recipe, {})
    config = kvcompress.load_config(recipe)
    evicts = config.evicts
    for batch_size in (1, PROBLEMS):
        request = EvalRequest.of(
            recipes=[recipe],
            tasks=["program:1:3"],
            budgets=["0.4"] if evicts else (),
            buffer=changes.get("buffer", 8) if config.stages else None,
            overrides={key: value for key, value in changes.items() if key != "buffer"},
            problems=PROBLEMS,
            batch_size=batch_size,
        )
        evaluate(request, tmp_path / str(batch_size), reasoner.load)
    alone, together = ((tmp_path / str(size) / "samples.jsonl").read_bytes() for size in (1, PROBLEMS))
    assert alone == together
    samples = read_samples(tmp_path / "1")
    assert len({sample["prompt_tokens"] for sample in samples}) > 1
    assert not evicts or all(sample["events"] > 2 for sample in samples if sample["output_tokens"] > 60)
