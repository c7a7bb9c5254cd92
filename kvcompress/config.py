"""Recipes: what a compression is, how it is checked, and how it is read from and written to YAML."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, Union

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from kvcompress.errors import ConfigError
from kvcompress.stages import (
    ROLES,
    Protected,
    ProtectStage,
    ScoreStage,
    SelectStage,
    Stage,
    StoreStage,
    nearest,
    registered_stages,
)

Storage = Literal["model", "float16", "bfloat16"]

_RECIPES = "kvcompress.configs"
_StageT = TypeVar("_StageT", bound=Stage)


class CompressionConfig(BaseModel):
    """One compression recipe: a budget and an ordered list of stages.

    Attributes:
        budget: K, the slots per layer, KV head and sequence that are in use right after a compression, the recent
            buffer included. A whole number of tokens, or a ratio between 0 and 1 of a context length that
            :meth:`resolve` is told. Left out exactly when nothing is evicted.
        buffer: B, recent tokens that are never candidates; also how many tokens come in between two compressions,
            and the length of the query window. Memory is bounded by K + B slots.
        seed: key of all random numbers; the same seed keeps the same tokens.
        prefill: ``compress`` applies the pipeline as soon as the prompt has been read, ``defer`` keeps a long prompt
            whole until decoding first reaches a multiple of the buffer past the budget (as published).
        check_finite: look for NaN and infinity among the candidates of each event.
        storage: type that keys and values are stored in: the model's own, or ``float16`` or ``bfloat16``, which halve
            the cache of a model that computes in float32.
        stages: protect, score, select and store stages, in this order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    name: str = "custom"
    description: str = ""
    budget: int | float | None = None
    buffer: int = Field(64, ge=1)
    seed: int = Field(0, ge=0, lt=2**64)
    prefill: Literal["compress", "defer"] = "compress"
    check_finite: bool = True
    storage: Storage = "model"
    stages: tuple[SerializeAsAny[Stage], ...] = ()

    @field_validator("budget", mode="before")
    @classmethod
    def _budget_kind(cls, budget: Any) -> Any:
        if budget is None:
            return None
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            raise ValueError("must be a whole number of tokens, or a ratio between 0 and 1")
        if isinstance(budget, float) and not 0 < budget < 1:
            raise ValueError("must be a whole number of tokens (at least 2), or a ratio strictly between 0 and 1")
        if isinstance(budget, int) and budget < 2:
            raise ValueError("must be at least 2, since it holds the buffer and at least one older token")
        return budget

    @field_validator("buffer", "seed", mode="before")
    @classmethod
    def _whole_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("must be a whole number")
        return value

    @field_validator("stages", mode="before")
    @classmethod
    def _stages_by_name(cls, stages: Any) -> Any:
        if not isinstance(stages, (list, tuple)):
            raise ValueError("must be a list of stages")
        return tuple(_parse_stage(index, stage) for index, stage in enumerate(stages))

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        _check_roles(self.stages)
        _check_store(self)
        if not self.evicts:
            if self.budget is not None:
                raise ValueError(
                    f"budget: {self.budget} has no effect, since no select stage evicts anything; "
                    "add a select stage (top_k or sample) or leave budget out"
                )
            return self
        if self.budget is None:
            raise ValueError("budget: missing; a recipe with a select stage needs one, e.g. budget: 1024")
        _check_windows(self)
        if isinstance(self.budget, int):
            _check_budget(self, self.budget)
        return self

    @property
    def evicts(self) -> bool:
        """Whether any stage selects, so that memory is bounded."""
        return any(isinstance(stage, SelectStage) for stage in self.stages)

    @property
    def quantizes(self) -> bool:
        """Whether a store stage keeps tokens in codes."""
        return any(isinstance(stage, StoreStage) for stage in self.stages)

    @property
    def old_slots(self) -> int:
        """M = K - B, the slots for tokens older than the buffer; of a recipe that evicts, its budget in tokens."""
        assert isinstance(self.budget, int)
        return self.budget - self.buffer

    @property
    def max_slots(self) -> int:
        """K + B, the most slots ever in use; of a recipe that evicts, its budget in tokens."""
        return self.old_slots + 2 * self.buffer

    def of_role(self, kind: type[_StageT]) -> tuple[_StageT, ...]:
        """The stages of one role, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, kind))

    def resolve(self, context_length: int) -> CompressionConfig:
        """The same recipe with a ratio budget turned into tokens: ``budget * context_length``, rounded down.

        Raises:
            ConfigError: if the resulting budget has no room for the buffer and the protected tokens.
        """
        if not isinstance(self.budget, float):
            return self
        # Decimal ratios are not exact in binary: 0.29 * 100 = 28.999... must give 29.
        budget = int(self.budget * context_length + 1e-9)
        try:
            return CompressionConfig.model_validate({**dict(self), "budget": budget})
        except ValidationError as error:
            raise ConfigError(
                f"budget: {self.budget} of a context of {context_length} tokens is {budget} tokens; " + _describe(error)
            ) from error

    def with_fields(self, overrides: Mapping[str, Any]) -> CompressionConfig:
        """A copy with fields replaced; see :func:`load_config` for the spelling of ``overrides``."""
        return load_config(self, overrides)

    def protected_bound(self, prompt_length: int = 0) -> int:
        """Most candidates that the protect stages can claim in one head, for a prompt of the given length."""
        assert isinstance(self.budget, int)
        bound = Protected(0, 0)
        for stage in self.of_role(ProtectStage):
            bound = stage.bound(bound, self.budget, self.buffer, prompt_length)
        return bound.total

    def to_yaml(self) -> str:
        """The recipe as YAML that :func:`load_config` reads back to an equal config; defaults are left out."""
        # The name always, since a file without one takes its own name.
        data = {"name": self.name, **self.model_dump(exclude_defaults=True)}
        data["stages"] = [{"stage": s.stage, **s.model_dump(exclude_defaults=True)} for s in self.stages]
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe, with every registered stage discriminated by its name."""
    union: Any = Annotated[Union[tuple(registered_stages().values())], Field(discriminator="stage")]  # noqa: UP007
    schema = CompressionConfig.model_json_schema()
    stages = TypeAdapter(union).json_schema(ref_template="#/$defs/{model}")
    schema["$defs"] = stages.pop("$defs")
    schema["properties"]["stages"]["items"] = stages
    return schema


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in files(_RECIPES).iterdir() if entry.name.endswith(".yaml")
    )


def load_config(
    source: str | Path | Mapping[str, Any] | CompressionConfig,
    overrides: Mapping[str, Any] | None = None,
    **fields: Any,
) -> CompressionConfig:
    """Read a recipe.

    Args:
        source: the name of a packaged recipe, the path of a YAML file (ends in .yaml or .yml, or contains a path
            separator), a dict, or a config.
        overrides: fields to replace: ``{"budget": 512, "value_range.share": 0.5}``; a stage's field is written
            ``stage.field``. Setting one of two exclusive fields (tokens, share) clears the other.
        **fields: top-level fields to replace, ``budget=512``.

    Raises:
        ConfigError: if there is no such recipe or file, the YAML is malformed, or it describes no possible
            compression; the message names field, value and what is allowed.
    """
    replaced = {**(overrides or {}), **fields}
    if isinstance(source, CompressionConfig):
        if not replaced:
            return source
        data, origin = dict(source), source.name
    elif isinstance(source, Mapping):
        data, origin = dict(source), "config"
    elif isinstance(source, (str, Path)):
        data, origin = _read(source)
    else:
        raise ConfigError(
            f"config: {source!r} of type {type(source).__name__} is not a recipe; give a recipe name, a path of a "
            "YAML file, a dict or a CompressionConfig"
        )
    return _validate(_override(data, replaced, origin) if replaced else data, origin)


def _parse_stage(index: int, stage: Any) -> Stage:
    if isinstance(stage, Stage):
        return stage
    if isinstance(stage, str):
        stage = {"stage": stage}
    if not isinstance(stage, Mapping) or "stage" not in stage:
        raise ValueError(f"stages.{index}: {stage!r} names no stage; write '- stage: NAME' and its settings")
    known = registered_stages()
    name = stage["stage"]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"stages.{index}.stage: {name!r} is not a stage; {nearest(name, known)}")
    return _build_stage(index, known[name], stage)


def _build_stage(index: int, kind: type[Stage], fields: Mapping[str, Any]) -> Stage:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        name = kind.model_fields["stage"].default
        raise ValueError(_describe(error, f"stages.{index} ({name})", kind)) from None


def _check_roles(stages: tuple[Stage, ...]) -> None:
    order = [ROLES.index(stage.role) for stage in stages]
    for index in range(1, len(order)):
        if order[index] < order[index - 1]:
            raise ValueError(
                f"stages.{index}.stage: {stages[index].stage!r} ({stages[index].role}) comes after "
                f"{stages[index - 1].stage!r} ({stages[index - 1].role}); the order is {' -> '.join(ROLES)}"
            )
    selects = [stage.stage for stage in stages if isinstance(stage, SelectStage)]
    scores = [stage for stage in stages if isinstance(stage, ScoreStage)]
    if len(selects) > 1:
        raise ValueError(f"stages: {len(selects)} select stages ({', '.join(selects)}); at most one is allowed")
    if selects and not scores:
        raise ValueError(f"stages: {selects[0]!r} has no score to select by; put a score stage before it")
    stores = [stage for stage in stages if isinstance(stage, StoreStage)]
    if len(stores) > 1:
        names = ", ".join(stage.stage for stage in stores)
        raise ValueError(f"stages: {len(stores)} store stages ({names}); at most one is allowed")
    if not selects:
        scored = any(stage.ranks_by_score for stage in stores)
        useless = [s.stage for s in stages if s.role == "protect" or (s.role == "score" and not scored)]
        if useless:
            raise ValueError(
                f"stages: {', '.join(useless)} without a select stage, so that nothing would be evicted; "
                "add top_k or sample after the scores"
            )
    unranked = [stage.stage for stage in stores if stage.ranks_by_score and not scores]
    if unranked:
        raise ValueError(f"stages: {unranked[0]!r} ranks tokens by their score; put a score stage before it")
    if any(s.needs_nonnegative_scores for s in stages if isinstance(s, SelectStage)):
        negative = [stage.stage for stage in scores if not stage.nonnegative or stage.weight < 0]
        if negative:
            raise ValueError(
                f"stages: {selects[0]!r} reads scores as weights, but {', '.join(negative)} can be negative; "
                f"set 'weights: softmax' on {selects[0]!r} or use top_k"
            )


def _check_store(config: CompressionConfig) -> None:
    for stage in config.of_role(StoreStage):
        if config.evicts and config.prefill == "defer":
            raise ValueError(
                f"prefill: defer keeps a long prompt in full precision, which contradicts {stage.stage!r}; "
                "use prefill: compress"
            )
        if not isinstance(config.budget, float):
            stage.check_recipe(config.budget if config.evicts else None, config.buffer)


def _check_windows(config: CompressionConfig) -> None:
    for stage in config.stages:
        needed = stage.queries_needed(config.buffer)
        if needed > config.buffer:
            raise ValueError(
                f"{stage.stage}.window: {needed} exceeds buffer {config.buffer}; only the queries of the buffer "
                f"are kept, so use a window of at most {config.buffer}"
            )


def _check_budget(config: CompressionConfig, budget: int) -> None:
    buffer = config.buffer
    if buffer >= budget:
        raise ValueError(
            f"buffer: {buffer} must be smaller than budget {budget}, which holds the buffer and the older tokens; "
            f"use a buffer of at most {budget - 1} or a budget of at least {buffer + 1}"
        )
    protected = config.protected_bound()
    if protected > budget - buffer:
        claims = ", ".join(stage.stage for stage in config.of_role(ProtectStage))
        raise ValueError(
            f"budget: {budget} leaves {budget - buffer} slots for tokens older than the buffer of {buffer}, but "
            f"{claims} protect {protected}; raise budget, lower buffer or protect fewer"
        )


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loading that refuses a key given twice, where YAML loaders silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else repr(key))
        return super().construct_mapping(node, deep=deep)


def _read(source: str | Path) -> tuple[dict[str, Any], str]:
    text = str(source)
    if isinstance(source, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        path = Path(source)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe file {text}: cannot be read: {error}") from error
    elif text in recipe_names():
        content = (files(_RECIPES) / f"{text}.yaml").read_text(encoding="utf-8")
    else:
        raise ConfigError(
            f"recipe: {text!r} is not a packaged recipe; {nearest(text, recipe_names())}. "
            "A recipe file is given as a path that ends in .yaml"
        )
    try:
        data = yaml.load(content, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {text}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"recipe {text}: holds {type(data).__name__}, not a mapping of fields such as budget and stages"
        )
    return {"name": Path(text).stem, **data}, text


_EXCLUSIVE = ({"tokens", "share"},)


def _override(data: Mapping[str, Any], overrides: Mapping[str, Any], origin: str) -> dict[str, Any]:
    result = dict(data)
    of_stages: dict[str, dict[str, Any]] = {}
    for key, value in overrides.items():
        name, dot, attribute = key.partition(".")
        if dot:
            of_stages.setdefault(name, {})[attribute] = value
        elif key in CompressionConfig.model_fields:
            result[key] = value
        else:
            hint = nearest(key, CompressionConfig.model_fields)
            raise ConfigError(f"override {key!r}: not a field of a recipe; {hint}")
    stages = result.get("stages", ())
    if not of_stages or not isinstance(stages, (list, tuple)):
        return result
    names = [_stage_name(stage) for stage in stages]
    for name, fields in of_stages.items():
        if name not in names:
            key, present = f"{name}.{next(iter(fields))}", ", ".join(names) or "none"
            raise ConfigError(f"override {key!r}: {origin} has no stage {name!r}; its stages: {present}")
    try:
        result["stages"] = [
            _with_fields(index, stage, of_stages[name]) if name in of_stages else stage
            for index, (stage, name) in enumerate(zip(stages, names, strict=True))
        ]
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return result


def _stage_name(stage: Any) -> str:
    if isinstance(stage, Mapping):
        return str(stage.get("stage"))
    return stage.stage if isinstance(stage, Stage) else str(stage)


def _with_fields(index: int, stage: Any, overrides: Mapping[str, Any]) -> Any:
    if isinstance(stage, Stage):
        # Not dict(stage): a field called keys would pass for the method of a mapping.
        fields = {name: getattr(stage, name) for name in type(stage).model_fields}
    else:
        fields = {"stage": stage} if isinstance(stage, str) else dict(stage)
    for group in _EXCLUSIVE:
        if any(overrides.get(attribute) is not None for attribute in group):
            fields = {attribute: value for attribute, value in fields.items() if attribute not in group}
    fields.update(overrides)
    # A stage that came as an object need not be registered, so its class must be carried over.
    return _build_stage(index, type(stage), fields) if isinstance(stage, Stage) else fields


def _validate(data: Mapping[str, Any], origin: str) -> CompressionConfig:
    try:
        return CompressionConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_describe(error, origin, CompressionConfig)) from error


def _describe(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> str:
    """All faults of a validation in one line: where, what is allowed, what was given."""
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden" and len(fault["loc"]) > 1:
            message = f"is not a setting of {'.'.join(map(str, fault['loc'][:-1]))}"
        elif fault["type"] == "extra_forbidden" and model is not None:
            message = f"is not a field; {nearest(str(fault['loc'][-1]), model.model_fields)}"
        given = fault.get("input")
        shown = f" (got {given!r})" if where and not isinstance(given, (dict, list, tuple, BaseModel)) else ""
        faults.append(f"{where}: {message}{shown}" if where else message)
    return (f"{prefix}: " if prefix else "") + "; ".join(faults)
