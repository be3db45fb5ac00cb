"""Every attack by name, and how a description is read."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from federation.attacks.base import Attack, AttackError
from federation.attacks.colluding import Alie, Ipm, Mimic, MinMax, StandStill
from federation.attacks.lone import FreeRider, Gaussian, Infinite, Inflation, ModelReplacement, NotANumber, SignFlip
from federation.attacks.poisoning import Backdoor, LabelFlip

ATTACKS: Mapping[str, type[Attack]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            SignFlip,
            Gaussian,
            ModelReplacement,
            Alie,
            Ipm,
            MinMax,
            Mimic,
            StandStill,
            LabelFlip,
            Backdoor,
            FreeRider,
            NotANumber,
            Infinite,
        )
    }
)
_KINDS: tuple[tuple[type, str], ...] = ((int, "a whole number"), (float, "a number"), (str, "a word"))
_HINT = "write scale=100,bias=1000, or one of the two, or the name of an attack"


def parse_attack(text: str) -> Attack:
    """Reads "sign-flip", "alie:z=1.5" or "scale=100,bias=1000".

    Raises:
        AttackError: no such attack, no such number of it, or one out of range.
    """
    head, colon, tail = (part.strip() for part in text.partition(":"))
    if "=" in head or not head:
        return _make(Inflation, text)
    if head not in ATTACKS:
        raise AttackError(f"{head!r} is no attack: there are {', '.join(ATTACKS)}; {_HINT}")
    kind = ATTACKS[head]
    if not colon:
        return kind()
    if not tail:
        raise AttackError(f"{text.strip()!r} ends in a colon; write {_example(kind)}")
    return _make(kind, tail)


def _make(kind: type[Attack], text: str) -> Attack:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in fields or not value or name in values:
            known = f"{kind.name} takes {', '.join(fields) or 'nothing'}" if kind.name else _HINT
            what = "is said twice" if name in values else "describes no attack"
            raise AttackError(f"{part.strip()!r} {what}: {known}")
        convert, wanted = next((kind, words) for kind, words in _KINDS if fields[name].type is kind)
        try:
            values[name] = convert(value)
        except ValueError:
            raise AttackError(f"{part.strip()!r} describes no attack: {name} is {wanted}") from None
    return kind(**values)


def _example(kind: type[Attack]) -> str:
    first = next(iter(dataclasses.fields(kind)), None)
    return f"{kind.name}:{first.name}={first.default}" if first else kind.name


@dataclasses.dataclass(frozen=True)
class Entry:
    """An attack as people read of it.

    Attributes:
        spelling: how it is written, with every default.
        summary: what it does.
        options: what each of its numbers means.
    """

    spelling: str
    summary: str
    options: dict[str, str]


def entries() -> tuple[Entry, ...]:
    """Every attack."""
    kinds: tuple[type[Attack], ...] = (Inflation, *ATTACKS.values())
    found = []
    for kind in kinds:
        fields = dataclasses.fields(kind)
        numbers = ",".join(f"{field.name}={str(field.default).removesuffix('.0')}" for field in fields)
        spelling = ":".join(part for part in (kind.name, numbers) if part)
        found.append(Entry(spelling, kind().summary, {field.name: field.metadata["help"] for field in fields}))
    return tuple(found)
