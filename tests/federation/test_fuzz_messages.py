"""Parsers of messages: each message, signed or not, gives a value or the parser's own error."""

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from coordinator.audit.checkpoints import LogKey
from coordinator.rounds.replies.content import check_is_time, check_matches, content_problem, privacy_problem
from coordinator.rounds.replies.declines import claimed_assignment, reason_and_message, verified_decline
from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.secure.dealing import DealShares
from federation.secure.errors import Malformed
from federation.secure.payloads import Unmasking, join_envelopes, pack_open, split_envelopes, unpack_open
from federation.sketches import sketch
from federation.sketches.base import ClientSketch, SketchError
from federation.spec.run_spec import RunSpec
from federation.training.pipe import Messages, PipeError
from federation.transport.channels import LONGEST_RETRY_SECONDS, STATUS_KEY, refusal_from_rpc_error, signed_detail
from federation.transport.chunks import Chunk, read_fetched, read_submitted
from federation.trust.envelope import sign, verify
from federation.trust.key_chain import KeyChain
from federation.v1 import common_pb2 as common
from federation.v1 import secure_pb2 as secure
from federation.v1.federation_pb2 import FetchBlobResponse, GetModelRequest, GetModelResponse, SubmitRequest
from federation.work.base import Shape, WorkError
from federation.work.peers import open_reply
from federation.work.registry import decode, decode_statement, encode, statement_problem
from federation.work.secure.wire import read_terms, terms_bytes
from federation.work.site import Site
from federation.work.train.work import Train
from fedpareto.cli.member.fetch_model import _card_facts, _document, _lines
from fedpareto.cli.show.model_card import markdown
from tests.federation.scene import KEY, MEMBER
from tests.fuzzing import CORPUS, Parser, corpus, fuzz, messages
from tests.scripted import CLIENT, FEDERATION, ScriptedLog
from tests.worker.scene import ALLOWED, LAYOUT
from tests.works import MESSAGES
from worker.connection.witness import Witness
from worker.progress import StatementError
from worker.results.comparison import compared
from worker.results.run_model import ModelDisputed, RunModel, checked
from worker.site.assignment_checks import Declined, check_assignment
from worker.site.policy_file import WorkLimits

LOG_KEY = Ed25519PrivateKey.from_private_bytes(b"l" * 32)
RAW = KEY.public_key().public_bytes_raw()
KEYS = KeyChain(KEY.public_key())
NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
OBJECTIVES = ("left", "right")
SHAPE = Shape(LAYOUT, OBJECTIVES, OBJECTIVES)
SKETCHES = ("count", "svd", "svd-two-way", "top-k", "mask", "gram", "exact")
SPEC = RunSpec.parse('name = "fuzz"\ntask = "digits"\nrounds = 1')
WORK: dict[str, type[Message]] = {
    **MESSAGES,
    "secure-ready": secure.SecureReadyWork,
    "secure-deal": secure.SecureDealWork,
    "secure-open": secure.SecureOpenWork,
    "secure-mask": secure.SecureMaskWork,
    "secure-confirm": secure.SecureConfirmWork,
    "secure-unmask": secure.SecureUnmaskWork,
}


def message(of: type[Message], data: bytes) -> Any:
    """A message as gRPC makes it; bytes that are none come no further than that."""
    try:
        return of.FromString(data)
    except DecodeError as error:
        raise Refusal("argument", str(error)) from None


def submitted(data: bytes) -> SubmitRequest | Chunk:
    """A request with a piece of a payload, as protobuf reads it."""
    found, meant = read_submitted(data), SubmitRequest.FromString(data)
    chunk = (meant.chunk, meant.offset) if meant.WhichOneof("message") == "chunk" else None
    assert chunk == ((bytes(found.data), found.offset) if isinstance(found, Chunk) else None)
    return found


def fetched(data: bytes) -> memoryview:
    """A piece of a blob, as protobuf reads it."""
    found = read_fetched(data)
    assert found == FetchBlobResponse.FromString(data).chunk
    return found


def opened(data: bytes) -> common.ReplyManifest:
    """An update that the key of the corpus has signed: one of those in the corpus, and no other."""
    envelope = message(common.SignedEnvelope, data)
    found = verify(envelope, common.ReplyManifest, KEY.public_key())
    signed = [common.SignedEnvelope.FromString(seed).manifest for seed in corpus("envelope") if seed != b"junk"]
    assert envelope.manifest in signed
    return found


def asked(data: bytes) -> Any:
    """What a worker makes of an assignment that its coordinator has signed."""
    return check_assignment(
        sign(message(common.AssignmentManifest, data), KEY),
        member=MEMBER,
        offers=ALLOWED,
        limits=WorkLimits(),
        site=Site(),
        newest_round=lambda run: 3,
        now=NOON,
    )


def run_model(data: bytes) -> RunModel:
    """What a member makes of the coordinator's signed answer about a model, down to the card that others read."""
    document = b'name = "fuzz"\ntask = "digits"\nrounds = 9'
    given = sign(message(common.ModelManifest, data), KEY)
    request = GetModelRequest(run="fuzz", nonce=bytes(16))
    found = checked(MEMBER, request, GetModelResponse(model=given, spec=document))
    told = compared(found, [], None)
    json.dumps(_document(found, told), allow_nan=False)
    assert markdown(_card_facts(found, told), Path("model")).replace("\n", "").isprintable()
    assert "\n".join(_lines(found, told, Path("model"), None, None)).replace("\n", "").isprintable()
    return found


def work(name: str) -> Callable[[bytes], Any]:
    """Work as a worker reads it, with what it takes and gives."""

    def read(data: bytes) -> Any:
        found = decode(name, data, SHAPE)
        found.demand(50)
        found.rows(SHAPE)
        found.input_sizes(SHAPE)
        return found

    return read


def statement(data: bytes) -> Any:
    """A statement as the answer to the stage that it names."""
    said = decode_statement("secure-ready", data)
    asked_for = (CORPUS / f"work-{said.stage.value}" / "one").read_bytes()
    if problem := statement_problem(said.stage.value, asked_for, data):
        raise WorkError(problem)
    return said


def reply(data: bytes) -> common.ReplyManifest:
    """A reply whose client has signed it: what the coordinator checks before it looks at the payload."""
    order = common.AssignmentManifest.FromString((CORPUS / "assignment" / "train").read_bytes())
    manifest: common.ReplyManifest = message(common.ReplyManifest, data)
    check_is_time(manifest.created)
    check_matches(manifest, order)
    if (problem := content_problem(manifest, Train, SPEC.limits) or privacy_problem(manifest, order)) is not None:
        raise problem
    return manifest


def declined(data: bytes) -> common.DeclineManifest:
    """A member's signed refusal of the assignment of the corpus, as the coordinator takes it."""
    envelope = message(common.SignedEnvelope, data)
    claimed_assignment(envelope)
    order = sign(common.AssignmentManifest.FromString((CORPUS / "assignment" / "train").read_bytes()), KEY)
    found = verified_decline(envelope, order, KEYS)
    reason, text = reason_and_message(found)
    assert len(reason) <= 80
    assert reason.isascii()
    assert text.isprintable()
    return found


def estimate(data: bytes) -> Any:
    """The Gram matrix of a message of finite numbers; the first byte says of which sketch."""
    own = sketch(SKETCHES[data[0] % len(SKETCHES)] if data else "count", d=24, objectives=OBJECTIVES, budget=0.5)
    numbers = np.frombuffer(data[1 : 1 + (len(data) - 1) // 4 * 4], "<f4")
    if not np.isfinite(numbers).all():
        raise SketchError("refused with the payload")
    rows, at = {}, 0
    for name, length in own.rows(OBJECTIVES):
        rows[name] = numbers[at : at + length]
        at += length
    found = own.gram([ClientSketch(OBJECTIVES, np.ones(2), rows)], OBJECTIVES, shared_seed=1)
    assert found.shape == (2, 2)
    assert np.isfinite(found).all()
    assert (found == found.T).all()
    return found


class Ended(grpc.RpcError, grpc.Call):
    """A call that ended with these details."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.ABORTED

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> Any:
        return ((STATUS_KEY, self._details),)

    def unasked(self, *_: Any) -> Any:
        raise NotImplementedError

    initial_metadata = is_active = time_remaining = cancel = add_callback = unasked  # type: ignore[assignment]


def status(data: bytes) -> str:
    """The reason in the details of a status; those without one count as refused."""
    found = refusal_from_rpc_error(Ended(data))
    signed_detail(Ended(data))
    assert 0 <= found.retry_seconds <= LONGEST_RETRY_SECONDS
    if not found.reason:
        raise LookupError
    return found.reason


def witnessed(path: Path) -> Callable[[bytes], Any]:
    """A checkpoint that is shown to a worker that has seen one entry of the log."""
    log = ScriptedLog(KEY)
    log.key = LogKey(federation_id=FEDERATION, key=LOG_KEY)
    certified, first = log.key.certified(KEY), log.head(0)

    def shown(data: bytes) -> Any:
        path.unlink(missing_ok=True)
        witness = Witness(path, path.with_suffix(".fork"), member=MEMBER, events=Events(io.StringIO()))
        witness.welcome(certified, first, None)
        witness.saw(message(common.LogHead, data))
        return witness.size

    return shown


def said(data: bytes) -> int:
    """The messages that the process of a trainer wrote."""
    pipe, count = Messages(io.BytesIO(data), io.BytesIO(), 1 << 12), 0
    while pipe.read() is not None:
        count += 1
    return count


# By the name of its corpus; `path` is a place for a file.
PARSERS: dict[str, Callable[[Path], Parser]] = {
    "envelope": lambda path: Parser(opened, Refusal, None, messages(common.SignedEnvelope)),
    "submit-request": lambda path: Parser(submitted, DecodeError, None, messages(SubmitRequest)),
    "fetch-response": lambda path: Parser(fetched, DecodeError, None, messages(FetchBlobResponse)),
    "assignment": lambda path: Parser(asked, (Refusal, Declined), None, messages(common.AssignmentManifest)),
    "run-model": lambda path: Parser(run_model, (Refusal, ModelDisputed), None, messages(common.ModelManifest)),
    "reply": lambda path: Parser(reply, Refusal, None, messages(common.ReplyManifest)),
    "decline": lambda path: Parser(declined, Refusal, None, messages(common.SignedEnvelope)),
    "statement": lambda path: Parser(statement, WorkError, None, messages(secure.SecureStatement)),
    "secure-terms": lambda path: Parser(
        lambda data: read_terms(data, SHAPE), WorkError, terms_bytes, messages(secure.SecureTerms)
    ),
    "peer-reply": lambda path: Parser(lambda data: open_reply(data, {CLIENT: RAW}), ValueError),
    "inbox": lambda path: Parser(lambda data: split_envelopes(data)[0], Malformed, join_envelopes),
    "opening": lambda path: Parser(lambda data: unpack_open(data, 3), Malformed, pack_open),
    "deal": lambda path: Parser(lambda data: DealShares.from_bytes(data, 3), Malformed, DealShares.to_bytes),
    "unmasking": lambda path: Parser(
        lambda data: Unmasking.from_bytes(data, 2, 1, verified=True), Malformed, Unmasking.to_bytes
    ),
    "sketch": lambda path: Parser(estimate, SketchError),
    "status": lambda path: Parser(status, LookupError, None, messages(Status)),
    "log-head": lambda path: Parser(witnessed(path), (Refusal, StatementError), None, messages(common.LogHead)),
    "trainer": lambda path: Parser(said, PipeError),
    **{
        f"work-{name}": lambda path, name=name, of=of: Parser(work(name), WorkError, encode, messages(of))  # type: ignore[misc]
        for name, of in WORK.items()
    },
}


@pytest.mark.parametrize("name", PARSERS)
def test_each_input_gives_a_value_or_the_parsers_own_error(name: str, tmp_path: Path) -> None:
    fuzz(name, PARSERS[name](tmp_path / "input"))
