"""The targets of `--to NAME:ADDRESS`: which sink takes a run there, and how people may see the address."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from federation.errors import Error
from federation.plugins import PluginAbsent, Plugins
from federation.text import escaped
from fedpareto.missing_packages import need
from fedpareto.sinks.sink import Sink, SinkError

GROUP = "fedpareto.sinks"  # of entry points
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "mlflow": "fedpareto.sinks.mlflow_sink:MlflowSink",
        "tensorboard": "fedpareto.sinks.tensorboard_sink:TensorBoardSink",
        "wandb": "fedpareto.sinks.wandb_sink:WandbSink",
    }
)
_HIDDEN = "***"
_SHORTEST = 4  # letters of a value in a query that can be a secret
_LONGEST = 300  # characters of an error that are told


@dataclass(frozen=True)
class SinkTarget:
    """Where a run goes: the class that takes it there, and the address, which may hold a password."""

    name: str
    kind: type[Sink]
    address: str = field(repr=False)

    @property
    def shown(self) -> str:
        """The target for people and logs: without a password, and without what follows a question mark."""
        return escaped(f"{self.name}:{self._without_secrets(self.address)}")

    def make(self) -> Sink:
        """The sink. Raises SinkError: the address cannot be one."""
        return self.kind(self.address)

    def told(self, error: BaseException) -> str:
        """An error of the target in one line, without secrets of the address."""
        text = " ".join(str(error).split())
        line = self._without_secrets(text)
        if isinstance(error, Error):
            return escaped(line)  # its words are for people
        return escaped(f"{type(error).__name__}: {line[:_LONGEST]}" if line else type(error).__name__)

    def _without_secrets(self, text: str) -> str:
        """A text without the secrets of the address, as they stand there and decoded, and of any address in it."""
        text = re.sub(r"(?<=://)[^/\s@]*@", f"{_HIDDEN}@", text.replace(self.address, _bare(self.address)))
        for secret in _secrets(self.address):
            text = text.replace(secret, _HIDDEN)
        return text


def _secrets(address: str) -> Sequence[str]:
    """The passwords and queries in an address, the longest first."""
    try:
        parts = urlsplit(address)
        values = [pair.partition("=")[2] for pair in parts.query.split("&")]
        given = [parts.password or "", parts.query, *(value for value in values if len(value) >= _SHORTEST)]
        if "://" in address and not parts.password:
            given.append(parts.username or "")  # a token
    except ValueError:
        return []
    return sorted({form for text in given for form in (text, unquote(text)) if form}, key=len, reverse=True)


def _bare(address: str) -> str:
    """An address without user, password, query and fragment."""
    bare = re.sub(r"://[^/]*@", f"://{_HIDDEN}@", address)
    return re.sub(r"[?#].*", f"?{_HIDDEN}", bare) if "://" in address else bare


def target_of(text: str) -> SinkTarget:
    """The target that `NAME:ADDRESS` names. Nothing is reached yet.

    Raises:
        SinkError: it has no such form, or no sink has this name, or the address cannot be one of it.
        PackagesMissing: the sink needs packages that are not installed here.
        PluginError: the code of an installed sink cannot be used.
    """
    name, colon, address = text.partition(":")
    names = _names()
    if not colon or not address:
        raise SinkError(f"{escaped(name)}: expected NAME:ADDRESS, such as tensorboard:DIR; there are {names}")
    kind = _kind(name, names)
    need(f"{name} needs", *kind.packages, extra="tracking")
    target = SinkTarget(name, kind, address)
    try:
        target.make().close()
    except (Exception, SystemExit) as error:
        raise SinkError(f"{target.shown}: {target.told(error)}") from None
    return target


def targets_of(texts: Sequence[str]) -> list[SinkTarget]:
    """The targets of several texts, as `target_of`. Raises SinkError, too: one of them is named twice."""
    targets = [target_of(text) for text in texts]
    if len(set(targets)) < len(targets):
        raise SinkError("a target is named twice")
    return targets


def _kind(name: str, names: str) -> type[Sink]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind: type[Sink] = getattr(import_module(module), attribute)
        return kind
    try:
        return _plugins().find(name)
    except PluginAbsent:
        raise SinkError(f"no sink {escaped(name)!r}; there are {names}") from None


def _plugins() -> Plugins[Sink]:
    return Plugins(word="sink", group=GROUP, base=Sink, face="fedpareto.Sink", built_in=tuple(BUILT_IN))


def _names() -> str:
    return ", ".join(sorted({*BUILT_IN, *(offer.name for offer in _plugins().offers())}))
