"""The codecs that a recipe can name: in full, ``{codec: uniform, bits: 4, group: 64}``, or in short, ``int4``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from kvcompress.quant.codec import Codec
from kvcompress.quant.float8 import Float8
from kvcompress.quant.nf4 import NF4
from kvcompress.quant.per_channel import PerChannel
from kvcompress.quant.uniform import Uniform

CODECS: dict[str, type[Codec]] = {
    str(kind.model_fields["codec"].default): kind for kind in (Uniform, Float8, NF4, PerChannel)
}

SHORT_NAMES: dict[str, Codec] = {
    "int8": Uniform(bits=8),
    "int4": Uniform(bits=4),
    "int3": Uniform(bits=3),
    "int2": Uniform(bits=2),
    "fp8": Float8(),
    "nf4": NF4(),
}


def parse_codec(given: Any) -> Codec:
    """A codec from its short name, or from its settings; settings without a name are those of ``uniform``.

    Raises:
        ValueError: if there is no such codec, or it has no such setting.
    """
    if isinstance(given, Codec):
        return given
    if isinstance(given, str) and given in SHORT_NAMES:
        return SHORT_NAMES[given]
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{given!r} is not a codec; use one of {', '.join(SHORT_NAMES)}, or settings such as "
            "{bits: 4, group: 64, rotate: true}"
        )
    name = given.get("codec", "uniform")
    if name not in CODECS:
        raise ValueError(f"codec: {name!r} is not a codec; known: {', '.join(CODECS)}")
    return CODECS[name].model_validate(dict(given))


def describe_codec(codec: Codec) -> dict[str, Any]:
    """Settings that :func:`parse_codec` reads back to an equal codec; defaults are left out."""
    settings = codec.model_dump(exclude_defaults=True)
    return settings if isinstance(codec, Uniform) else {"codec": codec.codec, **settings}


def _schema() -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [kind.model_json_schema() for kind in CODECS.values()]
    return {"anyOf": [{"enum": list(SHORT_NAMES)}, *kinds]}


AnyCodec = Annotated[
    Codec, BeforeValidator(parse_codec), PlainSerializer(describe_codec), WithJsonSchema(_schema(), mode="validation")
]
