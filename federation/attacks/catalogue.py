"""Every attack by name, and the reading of descriptions."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_type_hints

from federation.attacks.base import Attack, AttackError
from federation.attacks.colluding import Alie, Ipm, Mimic, MinMax, StandStill
from federation.attacks.lone import (
    FreeRider,
    Gaussian,
    Infinite,
    Inflation,
    LossScaling,
    ModelReplacement,
    NotANumber,
    SignFlip,
)
from federation.attacks.poisoning import Backdoor, LabelFlip
from federation.plugins import PluginError, Plugins
from federation.text import did_you_mean

ATTACKS: Mapping[str, type[Attack]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            LossScaling,
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
_PLUGINS: Plugins[Attack] = Plugins("attack", "fedpareto.attacks", Attack, "fedpareto.Attack", tuple(ATTACKS))
_CLASS = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?::(.*))?", re.DOTALL)
_WORDS = {int: "a whole number", float: "a number", str: "a word"}
_HINT = "write scale=100,bias=1000, or one of the two, or the name of an attack"


def parse_attack(text: str) -> Attack:
    """Reads "sign-flip", "alie:z=1.5", "scale=100,bias=1000" or, for one's own attack, "module:Class:z=1.5".

    Raises:
        AttackError: no such attack, no such number of it, or one out of range; or a plug-in's code raises an exception.
    """
    name, tail = _split(text)
    if not name:
        return _make("", Inflation, text)
    try:
        kind = ATTACKS[name] if name in ATTACKS else _PLUGINS.find(name)
        with _PLUGINS.code(name, f"making {kind.__name__}", AttackError):
            if tail == "":
                raise AttackError(f"{text.strip()!r} ends in a colon; write {_example(name, kind)}")
            attack = kind() if tail is None else _make(name, kind, tail)
            str(attack)
    except PluginError as error:
        raise AttackError(str(error)) from error
    object.__setattr__(attack, "name", name)  # it is frozen, and a plug-in has the name that its owner wrote
    return attack


def check_exists(text: str) -> None:
    """Raises AttackError unless a description names an attack; a plug-in, which a simulation needs, is not imported."""
    name, _ = _split(text)
    if name == "" or name in ATTACKS:
        parse_attack(text)


def _split(text: str) -> tuple[str, str | None]:
    """The name of an attack, empty for `Inflation`, and the text after it, None without one."""
    head, colon, tail = (part.strip() for part in text.partition(":"))
    if "=" in head or not head:
        return "", text
    if head in ATTACKS or head in {offer.name for offer in _PLUGINS.offers()}:
        return head, tail if colon else None
    if match := _CLASS.fullmatch(text.strip()):
        return match[1], match[2]
    names = [*ATTACKS, *(offer.name for offer in _PLUGINS.offers())]
    near = did_you_mean(head, names) or ":"
    raise AttackError(
        f"{head!r} is no attack{near} there are {', '.join(names)}; {_HINT}, or module:Class for a class of your own"
    )


def _make(called: str, kind: type[Attack], text: str) -> Attack:
    fields, types = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind)
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in fields or not value or name in values:
            known = f"{called} takes {', '.join(fields) or 'nothing'}" if called else _HINT
            defect = "is said twice" if name in values else "describes no attack"
            raise AttackError(f"{part.strip()!r} {defect}: {known}")
        convert = types[name]
        if convert not in _WORDS:
            raise AttackError(f"{called}: {name} is of type {convert}; the options of attacks are int, float or str")
        try:
            values[name] = convert(value)
        except ValueError:
            raise AttackError(f"{part.strip()!r} describes no attack: {name} is {_WORDS[convert]}") from None
    return kind(**values)


def _example(name: str, kind: type[Attack]) -> str:
    first = next(iter(dataclasses.fields(kind)), None)
    return f"{name}:{first.name}={first.default}" if first else name


@dataclasses.dataclass(frozen=True)
class ListedAttack:
    """An attack in a list for people: its description with every default, a summary, and the meaning of each option.

    `package` brings it, and is empty for a built-in attack.
    """

    spelling: str
    summary: str
    options: dict[str, str]
    package: str = ""


def entries() -> tuple[ListedAttack, ...]:
    """Every attack that has a name here: the built-in ones, then those of entry points, which are imported."""
    kinds: tuple[type[Attack], ...] = (Inflation, *ATTACKS.values())
    listed = [_entry(kind()) for kind in kinds]
    for offer in _PLUGINS.offers():
        try:
            listed.append(_entry(parse_attack(offer.name), offer.package))
        except AttackError as error:
            listed.append(ListedAttack(offer.name, f"cannot be used: {error}", {}, offer.package))
    return tuple(listed)


def names() -> tuple[str, ...]:
    """The names of attacks; imports no plug-in."""
    return (*ATTACKS, *(offer.name for offer in _PLUGINS.offers()))


def _entry(attack: Attack, package: str = "") -> ListedAttack:
    options = {field.name: field.metadata.get("help", "") for field in dataclasses.fields(attack)}
    return ListedAttack(attack.spelling(), attack.summary, options, package)
