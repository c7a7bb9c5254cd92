"""A tiny model on disk that reads and writes words, with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from tiny import VOCAB, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(VOCAB - 6)]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PROMPT = " ".join(WORDS[7 * number % 100] for number in range(60))


def save_text_model(folder: Path, *, chat: bool = True, kind: str = "llama") -> Path:
    """Save it under ``folder``; every word is a token, and so are ``<system>``, ``<user>`` and ``<assistant>``."""
    specials = ["<pad>", "<end>", "<unknown>"]
    roles = ["<system>", "<user>", "<assistant>"]
    vocabulary = {word: index for index, word in enumerate([*specials, *roles, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny(kind).save_pretrained(folder)
    return folder
