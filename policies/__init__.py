"""Built-in protect, score and select stages, one file each (installed as ``kvcompress.policies``)."""

from kvcompress.policies.accumulated_attention import AccumulatedAttention
from kvcompress.policies.attention import Attention
from kvcompress.policies.key_diff import KeyDiff
from kvcompress.policies.key_norm import KeyNorm
from kvcompress.policies.last_query import LastQuery
from kvcompress.policies.leverage import Leverage
from kvcompress.policies.prompt import Prompt
from kvcompress.policies.random import Random
from kvcompress.policies.random_tokens import RandomTokens
from kvcompress.policies.recency import Recency
from kvcompress.policies.recent import Recent
from kvcompress.policies.redundancy import Redundancy
from kvcompress.policies.sample import Sample
from kvcompress.policies.sinks import Sinks
from kvcompress.policies.top_k import TopK
from kvcompress.policies.value_norm import ValueNorm
from kvcompress.policies.value_range import ValueRange
from kvcompress.stages import Stage

STAGES: tuple[type[Stage], ...] = (
    Sinks,
    ValueRange,
    Prompt,
    Recent,
    RandomTokens,
    Attention,
    Redundancy,
    Leverage,
    AccumulatedAttention,
    LastQuery,
    KeyNorm,
    ValueNorm,
    KeyDiff,
    Recency,
    Random,
    TopK,
    Sample,
)

__all__ = [stage.__name__ for stage in STAGES] + ["STAGES"]
