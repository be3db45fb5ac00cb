"""Makes messages from rows and dataclasses that have the same attributes."""

from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def like(kind: type[M], source: object, **fields: Any) -> M:
    """A message of a kind, with the fields given; each other field is the attribute of `source` of the same name.

    Times are aware. A state becomes the value of the field's enum that has its name. None leaves a field unset.
    """
    for name, field in kind.DESCRIPTOR.fields_by_name.items():
        if name not in fields:
            fields[name] = getattr(source, name, None)
        value = fields[name]
        if isinstance(value, StrEnum) and field.enum_type is not None:
            fields[name] = field.enum_type.values[0].name.replace("UNSPECIFIED", value)
    return kind(**fields)
