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
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from kvcompress.errors import ConfigError
from kvcompress.scoring import TokenStatistics

ENTRY_POINT_GROUP = "kvcompress.stages"

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


class StoreStage(Stage):
    """Assigns a precision to survivors; none is built in yet, so survivors keep the model's own."""

    role: ClassVar[Role] = "store"


@cache
def registered_stages() -> dict[str, type[Stage]]:
    """All stages that recipes can name: built-in ones and those of installed packages, by name.

    Raises:
        ConfigError: if a package's entry point is broken or claims a name that is taken.
    """
    from kvcompress.policies import STAGES

    found: dict[str, type[Stage]] = {}
    for stage in STAGES:
        _register(found, stage, "kvcompress")
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.value == "kvcompress.policies:STAGES":
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
