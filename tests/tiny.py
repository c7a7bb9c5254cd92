"""Small random causal language models of every supported architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvcompress.model import cache_keyword

PAD = 0
VOCAB = 128
HIDDEN = 64
WINDOW = 16

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LAYERS3 = {"num_hidden_layers": 3}

# What differs from _BASE, by transformers' model type.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _ROUTED | {"decoder_sparse_step": 1},
    "mistral": {"sliding_window": None},
    "mixtral": _MOE | {"sliding_window": None},
    "gemma2": _SLIDING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": _SLIDING | {"query_pre_attn_scalar": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "cohere2": _SLIDING | {"logit_scale": 1.0},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt2": {"n_embd": HIDDEN, "n_head": 4, "n_layer": 2, "n_positions": 1024, "n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "llama4_text": _MOE
    | _LAYERS3
    | {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "stablelm": {"partial_rotary_factor": 0.5},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "exaone4": _LAYERS3
    | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "minimax_m2": _MOE | {"rotary_dim": 8},
    "gpt_oss": _MOE | _SLIDING | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mimo_v2_flash": _SLIDING
    | {
        "num_key_value_heads": 1,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
    },
    "qwen3_next": _ROUTED
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "partial_rotary_factor": 0.5,
    },
}
ARCHITECTURES = tuple(_CONFIGS)


def tiny(kind: str, attention: str = "sdpa", seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model with random weights, 2 or 3 layers, hidden size 64, 4 query and 2 KV heads, vocabulary of 128.

    Weights are large enough for attention to decide the output, the embedding of padding is not zero, and nothing
    ends a generation early. Architectures with sliding or linear layers have a full one too.

    Args:
        kind: transformers' model type, one of ``ARCHITECTURES``.
        attention: attention implementation.
        config: fields of the architecture's config to replace.
    """
    model_config = AutoConfig.for_model(kind, **(_BASE | _CONFIGS[kind] | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation=attention).eval()
    randomize(model, seed)
    model.generation_config.do_sample = False
    return model


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Fill all parameters from one seed, in order of name."""
    generator = torch.Generator().manual_seed(seed)
    embedding_scale = float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name or "wte" in name or "wpe" in name:
            parameter.copy_(noise / embedding_scale)
        elif "sinks" in name:
            parameter.copy_(1.0 + noise)
        elif parameter.dim() == 1:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * 1.6 / HIDDEN**0.5)


def prompt(length: int = 40, rows: int = 1, seed: int = 0) -> Tensor:
    """(rows, length) token ids, none of them padding."""
    return torch.randint(2, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Several (1, n) prompts as one batch with padding on the left, and its attention mask."""
    rows = list(rows)
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - row.shape[1] :] = row[0]
        mask[index, longest - row.shape[1] :] = 1
    return ids, mask


def distinct(length: int, seed: int = 0) -> Tensor:
    """(1, length) token ids of which none occurs twice, so that no two tokens have equal values in the first layer."""
    return (torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(seed))[None, :length]) + 1


def feed(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits (rows, columns, vocabulary) of one call with a cache; positions follow from the mask."""
    with torch.no_grad():
        if mask is not None:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs[cache_keyword(model)] = cache
        return model(input_ids=ids, attention_mask=mask, use_cache=True, **inputs).logits


def generate(
    model: PreTrainedModel, ids: Tensor, steps: int, mask: Tensor | None = None, cache: Any = None, **settings: Any
) -> Tensor:
    """(rows, steps) new tokens, greedy unless settings say otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    if cache is not None:
        settings[cache_keyword(model)] = cache
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, **settings)[:, ids.shape[1] :]
