"""Parsers of documents, files, certificates and first messages: each input gives a value or the parser's own error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from coordinator.front.server_name import server_name
from coordinator.ownership import CoordinatorHomeError
from coordinator.rounds.runs.submission import Submission
from coordinator.settings import Settings
from federation.attacks.base import AttackError
from federation.attacks.catalogue import parse_attack
from federation.record.bundle import BlobAbsent, BundleError, BundleReader
from federation.record.provenance import read_exported
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError
from federation.transport.payload_check import PayloadCheck
from federation.transport.proxies import Proxy, ProxyError
from federation.trust.certificates import csr_public_key, issuer_in
from federation.trust.identity import parse_peer
from federation.trust.join_string import JoinStringFields
from federation.trust.keys import IdentityError
from federation.vectors import DTYPES, Layout, Tensor, model_layout, parse_header, to_bytes
from fedpareto.experiments.definition import ExperimentError, parse
from fedpareto.experiments.result_store import DamagedError, parsed
from tests.federation.scene import MEMBER
from tests.fuzzing import Parser, documents, fuzz
from tests.stage import Stage
from tests.verification.scene import exported
from verification.errors import VerificationError, Verified
from verification.replay import parse_gram
from verification.run import verify
from worker.config import WorkerConfig, WorkerConfigError
from worker.receipts import ReceiptsError, read_receipts
from worker.site.policy_file import Policy, PolicyError
from worker.site.roster import Roster, RosterError, read_roster


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def in_file(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A parser of a file at this path."""

    def parsed(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return parsed


def document_of(value: Any) -> bytes:
    return tomli_w.dumps(value.model_dump(mode="json", exclude_unset=True, exclude_none=True)).encode()


def cards_of(roster: Roster) -> bytes:
    return "\n".join(card.text() for card in roster.cards).encode()


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


def verified(path: Path) -> list[Verified]:
    """A bundle that is verified as a whole."""
    with BundleReader(path) as reader:
        return list(verify(reader))


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
    "specification": lambda path: Parser(RunSpec.parse, SpecError, document_of, documents),
    "submission": lambda path: Parser(lambda data: Submission.parse(data, ("loss",)), Refusal, None, documents),
    "policy": lambda path: Parser(in_file(path, Policy.load), PolicyError, document_of, documents),
    "worker-config": lambda path: Parser(in_file(path, WorkerConfig.load), WorkerConfigError, document_of, documents),
    "settings": lambda path: Parser(
        lambda data: Settings.parse(text(data), "settings"),
        CoordinatorHomeError,
        lambda made: made.render().encode(),
        documents,
    ),
    "experiment": lambda path: Parser(lambda data: parse("own", text(data)), ExperimentError, None, documents),
    "roster": lambda path: Parser(
        in_file(path, lambda file: read_roster(file, MEMBER)), RosterError, cards_of, documents
    ),
    "receipts": lambda path: Parser(
        in_file(path, lambda file: read_receipts(file, MEMBER.coordinator.chain)), ReceiptsError
    ),
    "result": lambda path: Parser(parsed, DamagedError),
    "attack": lambda path: Parser(
        lambda data: parse_attack(text(data)), AttackError, lambda attack: attack.spelling().encode()
    ),
    "proxy": lambda path: Parser(
        lambda data: Proxy.parse(text(data), "--proxy"), ProxyError, lambda proxy: proxy.url.encode()
    ),
    "join-string": lambda path: Parser(
        lambda data: JoinStringFields.decode(text(data)), IdentityError, lambda made: made.encode().encode()
    ),
    # Of files, certificates and first messages.
    "header": lambda path: Parser(header, Refusal, lambda layout: layout.header),
    "payload": lambda path: Parser(payload(path), Refusal),
    "exported-model": lambda path: Parser(in_file(path, lambda file: read_exported(file, "blake3")), Refusal),
    "gram": lambda path: Parser(parse_gram, VerificationError),
    "certificate": lambda path: Parser(parse_peer, IdentityError),
    "issuer": lambda path: Parser(issuers, (LookupError, IdentityError)),
    "request": lambda path: Parser(csr_public_key, IdentityError),
    "hello": lambda path: Parser(named, LookupError),
}


@pytest.mark.parametrize("name", PARSERS)
def test_each_input_gives_a_value_or_the_parsers_own_error(name: str, tmp_path: Path) -> None:
    fuzz(name, PARSERS[name](tmp_path / "input"))


def test_a_bundle_is_verified_or_refused_with_what_is_wrong(stage: Stage, tmp_path: Path) -> None:
    model = to_bytes(Layout((Tensor("weight", (3,)),)), np.ones(3, np.float32))
    run, players = stage.begin("ann", "ben", more="selection.minimum = 2", model=model)
    stage.complete(run, *players)
    made = [exported(stage, run, tmp_path / "run", payloads=payloads).read_bytes() for payloads in (True, False)]
    fuzz("bundle", Parser(in_file(tmp_path / "input", verified), (BundleError, BlobAbsent, VerificationError)), *made)
