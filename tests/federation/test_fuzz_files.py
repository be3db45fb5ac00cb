"""Parsers of files, certificates and first messages: all bytes give a value or the parser's own error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.front.hello import server_name
from federation.line.payload_check import PayloadCheck
from federation.record.bundle import BlobAbsent, BundleError, BundleReader
from federation.record.provenance import read_exported
from federation.refusals import Refusal
from federation.trust.certificates import csr_public_key, issuer_in
from federation.trust.identity import parse_peer
from federation.trust.keys import IdentityError
from federation.vectors import DTYPES, Layout, Tensor, model_layout, parse_header, to_bytes
from storage.states import RunState
from tests.fuzzing import Parser, fuzz
from tests.stage import Stage, spec
from tests.verification.test_bundle import exported
from verification.errors import Wrong
from verification.replay import parse_gram
from verification.run import verify


def header(data: bytes) -> Layout:
    return parse_header(data, DTYPES)[0]


def payload(path: Path) -> Callable[[bytes], bytes]:
    """A payload that arrives in pieces; what the check lets pass can be read from its file."""

    def arrived(data: bytes) -> bytes:
        check = PayloadCheck(None)
        for start in range(0, len(data), 7):
            check.feed(data[start : start + 7])
        check.finish()
        if check.problem is not None:
            raise check.problem
        path.write_bytes(data)
        assert [tensor.name for tensor in model_layout(path).tensors] == list(check.norms)
        return data

    return arrived


def exported_model(path: Path) -> Callable[[bytes], Any]:
    """A model that somebody has exported, with what it says of its origin."""

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        return read_exported(path, "blake3")

    return read


def bundle(path: Path) -> Callable[[bytes], Any]:
    """A bundle that is verified as a whole."""

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        with BundleReader(path) as reader:
            return list(verify(reader))

    return read


def named(data: bytes) -> str:
    """The name in a first message; a message without one counts as refused."""
    name = server_name(data)
    if not name:
        raise LookupError(name)
    return name


def issuers(data: bytes) -> list[bytes]:
    """The CA certificates in one that a server shows; one without any counts as refused."""
    found = issuer_in(data)
    if not found:
        raise LookupError
    return found


# By the name of its corpus; `path` is a place for a file.
PARSERS: dict[str, Callable[[Path], Parser]] = {
    "header": lambda path: Parser(header, Refusal, lambda layout: layout.header),
    "payload": lambda path: Parser(payload(path), Refusal),
    "exported-model": lambda path: Parser(exported_model(path), Refusal),
    "gram": lambda path: Parser(parse_gram, Wrong),
    "certificate": lambda path: Parser(parse_peer, IdentityError),
    "issuer": lambda path: Parser(issuers, (LookupError, IdentityError)),
    "request": lambda path: Parser(csr_public_key, IdentityError),
    "hello": lambda path: Parser(named, LookupError),
}


@pytest.mark.parametrize("name", PARSERS)
def test_each_input_gives_a_value_or_the_parsers_own_error(name: str, tmp_path: Path) -> None:
    fuzz(name, PARSERS[name](tmp_path / "input"))


def test_a_bundle_is_verified_or_refused_with_what_is_wrong(stage: Stage, tmp_path: Path) -> None:
    task = stage.task()
    players = stage.cast(task, "ann", "ben")
    model = to_bytes(Layout((Tensor("weight", (3,)),)), np.ones(3, np.float32))
    run = stage.submit(spec(f"fuzz-{stage.count}", task, more="selection.minimum = 2"), model=model)
    stage.play(run, *players)
    stage.wait_state(run, RunState.COMPLETED)
    made = [exported(stage, run, tmp_path / "run", payloads=payloads).read_bytes() for payloads in (True, False)]
    fuzz("bundle", Parser(bundle(tmp_path / "input"), (BundleError, BlobAbsent, Wrong)), *made)
