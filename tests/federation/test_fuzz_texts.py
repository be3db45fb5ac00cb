"""Parsers of documents: each input gives a value or the parser's own error, whatever it holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.ownership import CoordinatorHomeError
from coordinator.rounds.runs.submission import Submission
from coordinator.settings import Settings
from experiments.definition import ExperimentError, parse
from experiments.results import DamagedError, parsed
from federation.attacks.base import AttackError
from federation.attacks.catalogue import parse_attack
from federation.line.proxies import Proxy, ProxyError
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec, SpecError
from federation.trust.join_string import JoinStringFields
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import IdentityError, new_tls_key
from federation.trust.member_files import MemberFiles
from tests.fuzzing import Parser, documents, fuzz
from tests.scripted import CLIENT, FEDERATION
from worker.receipts import ReceiptsError, read_receipts
from worker.site.policy import Policy, PolicyError
from worker.site.roster import Roster, RosterError, read_roster

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)  # of the member and of the coordinator in the corpus
MEMBER = MemberFiles(
    federation_id=FEDERATION,
    addresses=("localhost:1",),
    ca=b"",
    certificate=b"",
    tls_key=new_tls_key(),
    client_id=CLIENT,
    signing_key=KEY,
    coordinator=CoordinatorKeys(FEDERATION, KEY.public_key()),
)


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


# By the name of its corpus; `path` is a place for a file.
PARSERS: dict[str, Callable[[Path], Parser]] = {
    "specification": lambda path: Parser(RunSpec.parse, SpecError, document_of, documents),
    "submission": lambda path: Parser(lambda data: Submission.parse(data, ("loss",)), Refusal, None, documents),
    "policy": lambda path: Parser(in_file(path, Policy.load), PolicyError, document_of, documents),
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
}


@pytest.mark.parametrize("name", PARSERS)
def test_each_input_gives_a_value_or_the_parsers_own_error(name: str, tmp_path: Path) -> None:
    fuzz(name, PARSERS[name](tmp_path / "input"))
