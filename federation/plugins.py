"""Plug-ins: an owner's own classes, named by an entry point of an installed package or as `module:Class`.

A plug-in is code that the owner of a machine installed there, or put into a directory of `--code`; it is never read
from bytes that arrived over the wire. Entry points in `NAME.dist-info/entry_points.txt` of such a directory count like
those of an installed package. Between two calls, only Python's imported modules remain.
"""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from federation.digests import digest
from federation.errors import Error
from federation.owners_code import described, passes

T = TypeVar("T")
CODE = "FEDPARETO_CODE"  # the variable of the environment with the directories of `--code`
_DIGEST = "__fedpareto_digest__"  # the name of a module's attribute
_named_by_others: ContextVar[bool] = ContextVar("named_by_others", default=False)


class PluginError(Error, ValueError):
    """A plug-in cannot be used: it was not found, is of another class, or its code raises an exception."""


class PluginAbsent(PluginError):
    """A plug-in is not on this machine: there is no such name, or no such module."""


@contextmanager
def names_of_others() -> Iterator[None]:
    """Inside, names of plug-ins come from somebody else, such as the author of a bundle.

    Entry points count. Of `module:Class`, only modules in directories of `--code` are imported, and `__main__` counts.
    """
    token = _named_by_others.set(True)
    try:
        yield
    finally:
        _named_by_others.reset(token)


@dataclass(frozen=True)
class Offer:
    """A plug-in, or something built in, that this machine can load by a name; its origin is written `module:Class`.

    `package` is the installed package that brings it; empty if the package has no name.
    """

    name: str
    origin: str
    package: str


@dataclass(frozen=True)
class CodeOrigin:
    """The origin of the code of a class, such as that of an "algorithm".

    The class is named as `module:Class`, and by its name alone if it is built in. The package is empty for a class in a
    directory of `--code`. `digest` is of the file of its module, as this process imported it; empty for built-in code.
    """

    kind: str
    class_name: str
    package: str = ""
    version: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Plugins(Generic[T]):
    """One kind of plug-in.

    Attributes:
        word: the noun for people, such as "rule".
        group: of its entry points, such as "fedpareto.rules".
        base: the class that each plug-in inherits from.
        face: the name of that class for people, such as "fedpareto.Rule".
        built_in: names that no plug-in can take.
    """

    word: str
    group: str
    base: type[Any]
    face: str
    built_in: Collection[str] = ()

    def offers(self) -> tuple[Offer, ...]:
        """The entry points of this kind, by name. Nothing is imported."""
        all_offers = offers(self.group)
        return tuple(offer for offer in all_offers if offer.name not in self.built_in)

    def find(self, name: str) -> type[T]:
        """The class of a name: an entry point, or `module:Class` for a class on Python's path (`--code` appends to it).

        Raises:
            PluginError: there is none, or its code raises an exception, or it does not inherit from `base`; or the name
                is one of `names_of_others`, and its module is not in a directory of `--code`.
        """
        origin = name if ":" in name else self._origin(name)
        module, _, attribute = origin.partition(":")
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise PluginError(f"{self.word} {name!r}: {module} is a module of Python itself")
        if ":" in name and _named_by_others.get() and not _lies_in_code(module):
            raise PluginError(
                f"{self.word} {name!r}: this name is another person's choice, so its module is not imported: name its "
                "directory with --code DIR, or install a package with an entry point, if you trust its code"
            )
        with self.code(name, f"importing {module}"):
            imported = self._imported(name, module)
        value = getattr(imported, attribute, None)
        if value is None:
            file = getattr(imported, "__file__", None) or module
            raise PluginError(f"{self.word} {name!r}: {file} has no {attribute!r}{_elsewhere(imported)}")
        if not (isinstance(value, type) and issubclass(value, self.base)):
            raise PluginError(f"{self.word} {name!r}: {origin} is not a subclass of {self.face}")
        plugin: type[T] = value
        _note_file(plugin.__module__)
        return plugin

    def origin(self, name: str, kind: type[T]) -> CodeOrigin:
        """The origin of the code of a class that has this name, as a plug-in or built in."""
        if name in self.built_in:  # where its module lies is no part of the record, and may change
            return CodeOrigin(self.word, kind.__qualname__, "fedpareto", version("fedpareto"))
        class_name = f"{kind.__module__}:{kind.__qualname__}"
        noted = getattr(sys.modules[kind.__module__], _DIGEST, "")
        for point in entry_points(group=self.group):
            if point.name == name and point.dist is not None:
                return CodeOrigin(self.word, class_name, point.dist.name or "", point.dist.version or "", noted)
        return CodeOrigin(self.word, class_name, digest=noted)

    @contextmanager
    def code(self, name: str, doing: str, *own: type[Exception]) -> Iterator[None]:
        """Turns an error of a plug-in's code into a PluginError that names its line.

        `doing` is the action of the code, such as "importing mine"; `own` are exceptions of the plug-in's own, which
        are passed on.

        Raises:
            PluginError: the code raised an exception, or tried to end the process.
        """
        with plugin_code(f"{self.word} {name!r}", doing, *own):
            yield

    def _origin(self, name: str) -> str:
        """The class of an entry point, as `module:Class`."""
        matching = [offer for offer in self.offers() if offer.name == name]
        if not matching:
            known = ", ".join([*self.built_in, *sorted({offer.name for offer in self.offers()})])
            raise PluginAbsent(f"no {self.word} {name!r}; there are {known}; or name a class of your own, module:Class")
        if len({offer.origin for offer in matching}) > 1:
            packages = ", ".join(offer.package for offer in matching)
            raise PluginError(f"{self.word} {name!r} comes with several packages ({packages}): name it as module:Class")
        return matching[0].origin

    def _imported(self, name: str, module: str) -> ModuleType:
        """A module of plug-ins. Raises PluginError if Python does not find it."""
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports another one that does not
            raise PluginAbsent(
                f"{self.word} {name!r}: there is no module {error.name!r}: name its directory with --code DIR or in "
                "FEDPARETO_CODE, or install its package"
            ) from None
        except (TypeError, ValueError) as error:
            if module and not module.startswith("."):
                raise  # of the module's own code
            raise PluginError(f"{self.word} {name!r}: expected a name, or module:Class") from error


@contextmanager
def plugin_code(whose: str, doing: str, *own: type[Exception]) -> Iterator[None]:
    """As `Plugins.code`; `whose` is the plug-in in words, such as "rule 'mine'"."""
    passed: tuple[type[Exception], ...] = (PluginError, MemoryError, *own)
    try:
        yield
    except passed:
        raise
    except BaseException as error:
        if passes(error):
            raise
        raise PluginError(f"{whose}: {doing} failed: {described(error)}") from error


def _lies_in_code(module: str) -> bool:
    """True if a module is `__main__`, or lies in a directory of `--code`. Nothing is imported."""
    package = module.partition(".")[0]
    if module == "__main__" or not package.isidentifier():
        return module == "__main__"
    try:
        spec = find_spec(package)
    except ValueError:  # an imported module without a spec
        return False
    if spec is None:
        return False
    directories = [Path(each).resolve() for each in os.environ.get(CODE, "").split(os.pathsep) if each]
    origins = [spec.origin] if spec.has_location and spec.origin else []
    places = [Path(each).resolve() for each in (*origins, *(spec.submodule_search_locations or ()))]
    return bool(places) and all(any(each in place.parents for each in directories) for place in places)


def _note_file(module: str) -> None:
    """Notes the digest of a module's file on the module, right after its import: the file may change later."""
    imported = sys.modules[module]
    path = Path(getattr(imported, "__file__", None) or "")
    if not hasattr(imported, _DIGEST) and path.is_file():
        setattr(imported, _DIGEST, digest(path.read_bytes()))


def offers(group: str) -> tuple[Offer, ...]:
    """The entry points of a group, by name. Nothing is imported."""
    found = [
        Offer(point.name, f"{point.module}:{point.attr}", (point.dist.name or "") if point.dist is not None else "")
        for point in entry_points(group=group)
    ]
    return tuple(sorted(found, key=lambda offer: (offer.name, offer.package)))


def _elsewhere(imported: ModuleType) -> str:
    """The text about another module of the same name on Python's path, which the imported one hides; or empty."""
    name = imported.__name__
    for directory in sys.path:
        spec = PathFinder.find_spec(name, [directory]) if "." not in name else None
        if spec is not None and spec.origin and spec.origin != imported.__file__:
            return f"; it hides {spec.origin}: rename that module"
    return ""
