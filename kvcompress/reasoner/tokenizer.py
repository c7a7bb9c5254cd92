"""The reasoner's tokenizer: one token per character, as a Hugging Face tokenizer."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvcompress.reasoner.text import ALPHABET

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *ALPHABET])}
MAX_LENGTH = 4096


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with <bos>, pads on the left, and maps characters it lacks to <unk>."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> list[int]:
    """Ids of the characters of ``text``, all of which must be in the alphabet, without special tokens; fast."""
    return [VOCABULARY[character] for character in text]
