"""Fuzzing of parsers: each input gives a value or the parser's own error, and a value that is written stays the same.

Inputs are made from those of the corpus, tests/corpus/PARSER: bytes are changed, and so are values of TOML documents
and fields of messages. In `make test` each parser gets 30 inputs, the same ones each time; in `make fuzz` 10,000,
others each time. Put an input that fails into the corpus; the error shows it.
"""

import random
import resource
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.few import FEW_EXAMPLES
from tests.mutation import JUNK, TEXTS, mutated
from tests.paths import TESTS

CORPUS = TESTS / "corpus"
INPUTS = settings().max_examples  # of the profile: few, hypothesis's own, or fuzz
SECONDS = 5.0  # CPU time for one input, on a slow machine
MEMORY = 512 << 20  # address space that reading one input may take, in bytes

Inputs = Callable[[Sequence[bytes]], st.SearchStrategy[bytes]]


def _edited(seed: bytes, edits: Sequence[tuple[str, int, int, bytes]]) -> bytes:
    data = seed
    for kind, place, length, piece in edits:
        at = place % (len(data) + 1)
        before, part, after = data[:at], data[at : at + length], data[at + length :]
        match kind:
            case "flip":
                data = before + bytes(byte ^ (piece[0] if piece else 1) for byte in part[:1]) + part[1:] + after
            case "remove":
                data = before + after
            case "repeat":
                data = before + part * (1 + length) + after
            case "insert":
                data = before + piece + part + after
            case "overwrite":
                data = before + piece + (part + after)[len(piece) :]
            case "cut":
                data = before
    return data


_PIECES = (*JUNK, *(text.encode() for text in TEXTS if len(text) < 200), b"\xff\xff\xff\xff", b'"""', b"[[", b"1e999")


def damaged(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs whose bytes were changed in a few places, and now and then random bytes."""
    kind = st.sampled_from(("flip", "flip", "remove", "repeat", "insert", "overwrite", "cut"))
    piece = st.one_of(st.sampled_from(_PIECES), st.binary(max_size=8))
    edit = st.tuples(kind, st.integers(0, 1 << 16), st.integers(1, 32), piece)
    changed = st.builds(_edited, st.sampled_from(seeds), st.lists(edit, max_size=4))
    return st.one_of(changed, changed, changed, changed, st.binary(max_size=200))


def messages(kind: type[Message]) -> Inputs:
    """Messages of this type with a field that is extreme, or with spoilt bytes."""

    def made(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        drawn = st.integers(0, 2**63).map(random.Random)
        return st.builds(
            lambda seed, rng: mutated(kind.FromString(seed), rng), st.sampled_from(readable(seeds, kind)), drawn
        )

    return made


def readable(seeds: Sequence[bytes], kind: type[Message]) -> list[bytes]:
    """The inputs that are messages of this type."""
    found = []
    for seed in seeds:
        try:
            kind.FromString(seed)
        except DecodeError:
            continue
        found.append(seed)
    return found


def _values() -> st.SearchStrategy[Any]:
    numbers = st.one_of(st.integers(), st.floats(), st.sampled_from((0, 1, -1, 2**63 - 1, 2**63, 10**400, 1e308)))
    texts = st.one_of(st.text(max_size=20), st.sampled_from([text for text in TEXTS if "\0" not in text]))
    plain = st.one_of(st.booleans(), numbers, texts, st.datetimes(), st.dates(), st.times())
    return st.recursive(
        plain,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
        max_leaves=5,
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _with(document: dict[str, Any], at: int, value: Any) -> bytes:
    places = list(_places(document))
    *path, last = places[at % len(places)]
    holder: Any = document
    for key in path:
        holder = holder[key]
    holder[last] = value
    return tomli_w.dumps(document).encode("utf-8", "surrogatepass")


def _read(seeds: Sequence[bytes]) -> Iterator[str]:
    for seed in seeds:
        try:
            document = tomllib.loads(seed.decode())
        except (ValueError, RecursionError):
            continue
        if document:
            yield seed.decode()


def documents(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """TOML documents in which one value is another, and others whose bytes were changed."""
    whole = list(_read(seeds))
    changed = st.builds(
        lambda text, at, value: _with(tomllib.loads(text), at, value),
        st.sampled_from(whole),
        st.integers(0, 1 << 16),
        _values(),
    )
    return st.one_of(changed, damaged(seeds))


@dataclass(frozen=True)
class Parser:
    """A parser of input from another party.

    Attributes:
        parse: reads an input.
        refuses: the errors that its docstring names.
        written: writes a value, as an input that gives it again; None where the value has no such form.
        inputs: makes inputs of the corpus.
    """

    parse: Callable[[bytes], Any]
    refuses: type[Exception] | tuple[type[Exception], ...]
    written: Callable[[Any], bytes] | None = None
    inputs: Inputs = damaged


def corpus(name: str) -> list[bytes]:
    """The inputs of a parser that are checked in."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@contextmanager
def bounded_memory(more: int = MEMORY) -> Iterator[None]:
    """Limits how many more bytes this process may allocate inside; beyond the limit it gets a MemoryError."""
    status = Path("/proc/self/status").read_text()
    taken = int(status.partition("VmSize:")[2].split()[0]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def accepts(parser: Parser, data: bytes) -> bool:
    """Whether it is a value, which then survives being written. Any error but the parser's own is raised."""
    began = time.process_time()
    try:
        with bounded_memory():
            value = parser.parse(data)
    except parser.refuses:
        return False
    finally:
        assert time.process_time() - began < SECONDS
    if parser.written is not None:
        text = parser.written(value)
        assert parser.written(parser.parse(text)) == text
    return True


def fuzz(name: str, parser: Parser, *fresh: bytes) -> None:
    """Gives a parser its corpus, of which it must take a part and refuse a part, and inputs made from it.

    `fresh` inputs count to the corpus: those that have a format which still changes.
    """
    seeds = [*corpus(name), *fresh]
    assert {accepts(parser, seed) for seed in seeds} == {True, False}, name

    @settings(
        max_examples=INPUTS,
        derandomize=INPUTS == FEW_EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.inputs(seeds))
    def each(data: bytes) -> None:
        accepts(parser, data)

    each()
