"""What a pipeline stage is, and the registry that finds stages by name.

A stage is a frozen Pydantic model with one method. It declares its name as the literal default of the field
``stage``; everything else in it is a setting. To add one, subclass the role's base class, and either pass instances
to :class:`~kvcompress.config.CompressionConfig` or publish the class (or a list of classes) under the entry-point
group ``kvcompress.stages``, after which YAML recipes can name it.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from kvcompress.errors import ConfigError
from kvcompress.kernels.value_statistics import Statistic
from kvcompress.quant.codec import Codec
from kvcompress.scoring import TokenStatistics

ENTRY_POINT_GROUP = "kvcompress.stages"

_BUILTIN = ("kvcompress.policies:STAGES", "kvcompress.quant:STAGES")

Role = Literal["protect", "score", "select", "store"]
ROLES: tuple[Role, ...] = ("protect", "score", "select", "store")


class Protected(NamedTuple):
    """Upper bound on the protected candidates of one head: the first ``prefix`` positions, and ``others``."""

    prefix: int
    others: int

    @property
    def total(self) -> int:
        return self.prefix + self.others


class Stage(BaseModel, ABC):
    """Base of all stages; subclass one of the role classes below instead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: ClassVar[Role]
    stage: str

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, data: Any) -> Any:
        """Refuse ``tokens: true``, which Pydantic would read as 1."""
        for name, value in data.items() if isinstance(data, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name}: must not be true or false (got {value})")
        return data

    def queries_needed(self, buffer: int) -> int:
        """How many of the most recent queries the stage looks at (at most ``buffer``)."""
        return 0

    @property
    def needs_mass(self) -> bool:
        """Whether the wrapper must accumulate the attention that every slot receives."""
        return False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics of value vectors that the stage looks at; under a store stage they are kept beside the codes."""
        return ()


class ProtectStage(Stage):
    """Marks candidates that must stay. They count inside the budget."""

    role: ClassVar[Role] = "protect"

    @abstractmethod
    def bound(self, before: Protected, budget: int, buffer: int, prompt_length: int) -> Protected:
        """Upper bound on the protected candidates after this stage, given the bound before it."""

    @abstractmethod
    def protect(self, tokens: TokenStatistics, protected: Tensor) -> Tensor:
        """Returns the mask after this stage.

        Args:
            protected: (rows, kv_heads, N) bool, what earlier stages protect; must stay protected.
        """


class ScoreStage(Stage):
    """Gives each candidate a number; higher stays. Several stages combine in order of the recipe."""

    role: ClassVar[Role] = "score"
    nonnegative: ClassVar[bool] = False

    weight: float = Field(1.0, allow_inf_nan=False, description="factor on this score; not 0")
    combine: Literal["add", "multiply"] = Field("add", description="how to join the scores of earlier stages")

    @field_validator("weight")
    @classmethod
    def _weight_not_zero(cls, weight: float) -> float:
        if weight == 0:
            raise ValueError("must not be 0, since the stage would have no effect; remove it instead")
        return weight

    @abstractmethod
    def score(self, tokens: TokenStatistics) -> Tensor:
        """(rows, kv_heads, N) float32, not yet multiplied by ``weight``."""


class SelectStage(Stage):
    """Turns scores into the survivors: the M best by rank, protected candidates first."""

    role: ClassVar[Role] = "select"

    @property
    def needs_nonnegative_scores(self) -> bool:
        """Whether scores are read as weights, so that negative ones make no sense."""
        return False

    @abstractmethod
    def rank(self, scores: Tensor, tokens: TokenStatistics) -> Tensor:
        """(rows, kv_heads, N) float32 by which the unprotected candidates are ordered; -inf comes last.

        Equal ranks keep the more recent token.
        """


class Rung(NamedTuple):
    """One precision below the pools' own type."""

    keys: Codec
    values: Codec

    @property
    def label(self) -> str:
        """Short name, such as int4, or k:int8,v:int4 where keys and values differ."""
        keys, values = self.keys.label, self.values.label
        return keys if keys == values else f"k:{keys},v:{values}"


class StoreStage(Stage):
    """Assigns a precision to the tokens that leave the buffer and survive. Codes are final: a token is encoded once.

    A token that leaves the buffer competes with those that have kept their precision so far; who loses is encoded,
    into the highest rung that has a free slot.
    """

    role: ClassVar[Role] = "store"

    @property
    @abstractmethod
    def rungs(self) -> tuple[Rung, ...]:
        """The codecs, from the highest precision down."""

    @abstractmethod
    def divide(self, old: int, budget: int | None) -> tuple[int, ...]:
        """How many of ``old`` tokens keep their precision, and how many are on each rung.

        Args:
            old: tokens older than the buffer, 0 or more.
            budget: K of a recipe that evicts; None for one whose cache grows.

        Returns:
            1 + len(rungs) counts that add up to ``old``, each of which grows with it.
        """

    @abstractmethod
    def rank(self, tokens: TokenStatistics, scores: Tensor | None) -> Tensor:
        """(rows, kv_heads, N) float32; higher keeps more bits, equal ones favour the more recent token.

        Args:
            scores: (rows, kv_heads, N) what the score stages gave; None unless :attr:`ranks_by_score`.
        """

    @property
    def ranks_by_score(self) -> bool:
        """Whether :meth:`rank` needs the scores of the score stages."""
        return False

    def check_recipe(self, budget: int | None, buffer: int) -> None:
        """Refuse settings that make no sense in the recipe around them.

        Args:
            budget: K of a recipe that evicts; None for one whose cache grows.

        Raises:
            ValueError: naming the setting and what is allowed.
        """
        for rung in self.rungs:
            for name, codec in zip(rung._fields, rung, strict=True):
                block = codec.block_tokens
                if block > 1 and budget is not None:
                    raise ValueError(
                        f"{self.stage}.{name}: {codec.label} shares metadata among {block} consecutive tokens, which "
                        "eviction would tear apart; use a per-token codec or drop the select stage"
                    )
                if block > 1 and (buffer % block or self.divide(4 * block, None) != (0, 4 * block)):
                    raise ValueError(
                        f"{self.stage}.{name}: {codec.label} needs every token in its place: a buffer that is a "
                        f"multiple of {block} (it is {buffer}), and no token in full precision but those of the buffer"
                    )

    def check(self, dims: Mapping[str, int]) -> None:
        """Refuse vectors that the codecs cannot hold.

        Args:
            dims: size of the vectors of ``keys`` and of ``values``.

        Raises:
            ConfigError: naming the setting and what is allowed.
        """
        for rung in self.rungs:
            for name, dim in dims.items():
                getattr(rung, name).check(dim, f"{self.stage}.{name}")


@cache
def registered_stages() -> dict[str, type[Stage]]:
    """All stages that recipes can name: built-in ones and those of installed packages, by name.

    Raises:
        ConfigError: if a package's entry point is broken or claims a name that is taken.
    """
    from kvcompress.policies import STAGES
    from kvcompress.quant import STAGES as STORE_STAGES

    found: dict[str, type[Stage]] = {}
    for stage in (*STAGES, *STORE_STAGES):
        _register(found, stage, "kvcompress")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.value in _BUILTIN:
            continue
        try:
            loaded = point.load()
        except Exception as error:
            raise ConfigError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP} cannot be loaded: {error}"
            ) from error
        for stage in loaded if isinstance(loaded, Iterable) else [loaded]:
            _register(found, stage, point.value)
    return found


def _register(found: dict[str, type[Stage]], stage: Any, origin: str) -> None:
    if not (isinstance(stage, type) and issubclass(stage, Stage)):
        raise ConfigError(f"entry point {origin} of group {ENTRY_POINT_GROUP} gives {stage!r}, not a Stage class")
    name = stage.model_fields["stage"].default
    if not isinstance(name, str) or get_args(stage.model_fields["stage"].annotation) != (name,):
        raise ConfigError(
            f"stage class {stage.__qualname__} of {origin} declares no name; declare one by "
            '\'stage: Literal["NAME"] = "NAME"\''
        )
    if getattr(stage, "role", None) not in ROLES:
        raise ConfigError(
            f"stage {name!r} of {origin} has no role; derive it from ProtectStage, ScoreStage, SelectStage or "
            "StoreStage"
        )
    if inspect.isabstract(stage):
        missing = ", ".join(sorted(stage.__abstractmethods__))
        raise ConfigError(f"stage {name!r} of {origin} does not implement {missing}")
    if found.get(name, stage) is not stage:
        raise ConfigError(f"stage name {name!r} of {origin} is already taken by {found[name].__module__}")
    found[name] = stage


def nearest(name: str, known: Iterable[str]) -> str:
    """Ends an error message: the nearest known name if there is one, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}"
