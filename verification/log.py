"""Verifies the audit log of a run: its entries are those that were signed, and the record agrees with them."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from federation.digests import digest
from federation.record.bundle import BundleReader
from federation.record.exchange import Opened, OpenedExchange, open_consent
from federation.record.joinings import LEFT
from federation.record.log_entries import (
    ACCEPTED,
    DECLINED,
    DESCRIBED,
    EPOCH,
    EQUIVOCATED,
    FIRST,
    ISSUED,
    MEASURED,
    REFUSED,
    SKIPPED,
    STEPPED,
    SUBMITTED,
    Fact,
    LogEntry,
)
from federation.record.merkle import HASH_BYTES, ranges_around, root_from
from federation.record.results import RUN_ENDED
from federation.record.rounds import OpenedRound
from federation.refusals import Refusal
from federation.trust.identity import client_uri
from federation.trust.key_chain import KeyChain
from federation.trust.proofs import signing_public_key
from federation.v1.common_pb2 import (
    CheckpointManifest,
    ConsentManifest,
    LogKeyManifest,
    ReplyManifest,
    SignedEnvelope,
)
from federation.v1.record_pb2 import Bundle, LoggedEntry
from verification.errors import VerificationError
from verification.keys import Keys, verify_known
from verification.signed import SignedRound

COORDINATOR = "coordinator"  # the actor of its own entries
REVOKED = "client.revoked"
_REASON = 400  # characters that are kept of the reason of a round
_OF_KEYS = ("Enroll", "key.rotated")  # actions whose digest is that of a client's new signing key
_OF_EXCHANGES = (ISSUED, DECLINED, ACCEPTED, REFUSED, EQUIVOCATED)
_ENDS = {f"run.{state.lower()}": state for state in RUN_ENDED}
_TEXTS = ("actor", "action", "subject", "outcome", "detail", "digest")


@dataclass
class RunLog:
    """The entries of the log that tell of a run, under signed checkpoints.

    Attributes:
        run_id: the run.
        newest: the last checkpoint.
        entries: those that the bundle shows.
        nodes: the roots over the others, and the leaves of the entries, by the numbers where they begin and end.
    """

    run_id: str
    newest: CheckpointManifest
    entries: tuple[LoggedEntry, ...]
    nodes: dict[tuple[int, int], bytes]
    _recorded: set[int] = field(default_factory=set)  # the entries whose facts are in the record
    _replaced: dict[bytes, int] = field(default_factory=dict)  # ids of former keys -> the entries of the next ones
    _ended: int = -1  # the number of the entry of the newest step, or of the end of a round without one

    def __post_init__(self) -> None:
        self._by: dict[tuple[str, str], list[LoggedEntry]] = {}
        for entry in self.entries:
            self._by.setdefault((entry.action, entry.subject), []).append(entry)

    @property
    def end(self) -> LoggedEntry | None:
        """The entry about the end of the run; None while the run goes on."""
        return next((entry for entry in reversed(self.entries) if self._ends(entry)), None)

    @property
    def record(self) -> str:
        """The digest of the run's record; empty while the run goes on."""
        return "" if self.end is None else self.digest(self.end.number + 1)

    def digest(self, entries: int) -> str:
        """The digest of the log's first entries: the root over them. The last of them is in the bundle.

        Raises:
            LookupError: the bundle lacks a node that the root needs.
        """
        return f"sha256:{root_from(self.nodes, 0, entries).hex()}"

    def entry(self, number: int) -> LoggedEntry | None:
        """The entry with a number; None if the bundle does not show it."""
        index = bisect_left(self.entries, number, key=lambda entry: entry.number)
        entries = self.entries[index : index + 1]
        return entries[0] if entries and entries[0].number == number else None

    def forgotten(self, clients: Iterable[str]) -> list[str]:
        """Those of these clients that an administrator had forgotten: their payloads were removed."""
        return [name for name in sorted(clients) if ("client.forgotten", name) in self._by]

    def left_out(self, signed: SignedRound) -> list[list[str]]:
        """The sets of members that may have been left out of the measurements of a new model, the empty one first.

        The log tells when a member was revoked, and not when an evaluation ended.
        """
        replies = signed.evaluations.values()
        accepted = {reply.manifest.client_id: reply.order.assignment_id for reply in replies}
        first = min((reply.order.phase for reply in replies), default=0)
        asked = (order.assignment_id for order in signed.orders if order.phase >= first)
        gone = self._revoked_after(accepted, asked)
        return [gone[:count] for count in range(len(gone) + 1)]

    def _revoked_after(self, accepted: Mapping[str, str], asked: Iterable[str]) -> list[str]:
        """The clients that were revoked after a reply of theirs, before the run went on or ended, in the log's order.

        Args:
            accepted: the assignments that the replies fulfil, by client.
            asked: all assignments that were made at that time.
        """
        # Verify, metrics: a revocation counts only if the log has it before the run went on; later ones say nothing of
        # this evaluation.
        issued = max((entry.number for name in asked for entry in self._by.get((ISSUED, name), ())), default=-1)
        later = (entry for entry in self.entries if entry.number > issued)
        goes_on = (ISSUED, STEPPED, MEASURED, DESCRIBED, SKIPPED)
        until = next((entry.number for entry in later if entry.action in goes_on or self._ends(entry)), math.inf)
        revoked: dict[int, str] = {}
        for name, assignment in accepted.items():
            after = max((entry.number for entry in self._by.get((ACCEPTED, assignment), ())), default=-1)
            entries = self._by.get(("client.revoked", name), ())
            revoked |= {entry.number: name for entry in entries if after < entry.number < until}
        return [revoked[number] for number in sorted(revoked)]

    def check_run_logged(self, spec: str, about: Bundle, submitted_by: str | None) -> None:
        """Checks the entries of the run's submission and end; `submitted_by` is an administrator.

        Raises VerificationError.
        """
        state = about.state
        submission = self._check_logged(Fact(SUBMITTED, self.run_id, spec), "the submission of the run")
        # Verify, a verifier of your own, 3: members decide by this name, so the assignments must not have another one
        # than the log.
        if submitted_by is not None and submission.actor.rpartition("/")[2] != submitted_by:
            raise VerificationError(
                f"the assignments say that {submitted_by[:80]!r} submitted the run; the audit log says otherwise"
            )
        if not submission.detail.endswith(f", model {about.initial_model}"):
            raise VerificationError(
                f"the bundle says that the run began with {about.initial_model}; the audit log says otherwise"
            )
        ended = "" if self.end is None else _ENDS[self.end.action]
        if ended != (state if state in _ENDS.values() else ""):
            raise VerificationError(
                f"the bundle says that the run is {state}; the audit log tells {ended or 'of no end'}"
            )
        if self.end is not None:
            actor = "" if ended == "STOPPED" else COORDINATOR
            self._check_logged(Fact(self.end.action, self.run_id, ""), "the end of the run", actor)

    def check_keys_logged(self, keys: Keys) -> None:
        """Checks the entries of all signing keys; call it before `check_logged`. Raises VerificationError."""
        own = self._by.get(("key.set", "signing key"), [])
        self._check_key_chain_logged(keys.coordinator, own, "the coordinator's signing key")
        about: dict[str, list[LoggedEntry]] = {}
        for entry in self.entries:
            if entry.action in _OF_KEYS:
                about.setdefault(entry.subject, []).append(entry)
        for name, chain in keys.clients.items():
            self._check_key_chain_logged(chain, about.get(name, []), f"the signing key of {name}")

    def check_consents_logged(
        self, consents: Iterable[SignedEnvelope], facts: Mapping[str, object], keys: Keys
    ) -> None:
        """Checks that each answer to the run is signed by its client and is the newest one in the log.

        Raises VerificationError.
        """
        entries = {entry.subject: entry for entry in self.entries if entry.action.startswith("consent.")}
        for envelope in consents:
            try:
                client_id = ConsentManifest.FromString(envelope.manifest).client_id
            except DecodeError:
                raise VerificationError("an answer to the run is not a ConsentManifest") from None
            consent = open_consent(envelope, client_id, keys.signers, facts)
            if consent.problem is not None or consent.fact is None:
                raise VerificationError(consent.words)
            # Verify, 2: the newest entry of each member, once: an older answer that was taken back must not stand for
            # it.
            entry = entries.pop(consent.fact.subject, None)
            if entry is None or Fact(entry.action, entry.subject, entry.digest) != consent.fact:
                raise VerificationError(
                    f"{consent.name}: the audit log tells {'of none' if entry is None else 'of another'}"
                )
            self._check_logged(consent.fact, consent.name, client_uri(str(facts["federation_id"]), client_id))
            self._check_precedes(envelope, entry, consent.name)
        for subject, entry in entries.items():
            raise VerificationError(
                f"entry {entry.number} of the audit log tells of the answer {subject}, which is not in the record"
            )

    def gone(self, opened: OpenedRound) -> int:
        """The number of clients that were revoked, or left, between the round before and the last attempt at a round.

        Such clients may have been selected and not asked.
        """
        phases = [phase for phase in opened.phases if phase.decides] or opened.phases  # the latter of no step
        deciding = (exchange for phase in phases for exchange in phase.exchanges)
        facts = [exchange.assignment.fact for exchange in deciding]
        issued = [self._newest(fact) for fact in facts if fact is not None]
        first = min((entry.number for entry in issued if entry is not None), default=0)
        between = (entry for entry in self.entries if self._ended < entry.number < first)
        return len({entry.subject for entry in between if entry.action in (REVOKED, LEFT)})

    def check_logged(self, opened: OpenedRound, reason: str) -> None:
        """Checks that the log has an entry for each envelope of a round, in order. The envelopes have been verified.

        `reason` is why the round was skipped.

        Raises:
            VerificationError: an envelope has no entry, the entry is about another envelope, or it has the wrong
                position.
        """
        began, stepped, named = self._ended, None, set[str]()
        if opened.ended is not None:
            end = self._check_logged(opened.ended, "the end of the round", COORDINATOR)
            # Verify, a verifier of your own, 4: a reason of 400 characters is the begin of a longer one, and no
            # contradiction.
            cut = len(end.detail) >= _REASON and reason[:-1] == end.detail[: _REASON - 1]
            if reason != end.detail and not cut:
                raise VerificationError(
                    f"the record says why it was skipped; entry {end.number} of the audit log says otherwise"
                )
            self._check_follows(end, began, "the end of the round")
        if opened.step is not None:
            stepped, step = self._check_envelope_logged(opened.step, COORDINATOR), opened.step.manifest
            named = {*step.replies, *step.consulted}
            self._check_follows(stepped, began, "the step")
            self._check_precedes(opened.step.envelope, stepped, opened.step.name)
            self._check_gone(step.revoked, stepped.number, (REVOKED,))
            self._check_gone(step.forgotten, stepped.number, (REVOKED, LEFT))
        if opened.result is not None:
            described = self._check_envelope_logged(opened.result, COORDINATOR)
            self._check_follows(described, began, "the result")
            self._check_precedes(opened.result.envelope, described, opened.result.name)
        for phase in opened.phases:
            # Verify, 15: an evaluation of a model that the log does not know yet was not of this model.
            after = stepped.number if stepped is not None and phase.evaluates else began
            for exchange in phase.exchanges:
                for reply, entry in self._check_exchange_logged(exchange, after):
                    # Verify, 15: a reply that came after the step cannot have entered it.
                    if stepped is not None and reply.digest in named and entry.number > stepped.number:
                        raise VerificationError(
                            f"entry {entry.number} of the audit log tells of {reply.name} after the step"
                        )

    def _check_follows(self, entry: LoggedEntry, before: int, name: str) -> None:
        """Checks that the end of a round comes after that of the round before. Raises VerificationError."""
        # Verify, 15: rounds follow each other, or a coordinator could make a round again when it knows its outcome.
        if entry.number < before:
            raise VerificationError(
                f"entry {entry.number} of the audit log tells of {name} before the end of the round before"
            )
        if self.end is not None and entry.number > self.end.number:
            raise VerificationError(f"entry {entry.number} of the audit log tells of {name} after the end of the run")
        self._ended = entry.number

    def _check_exchange_logged(
        self, exchange: OpenedExchange, after: int
    ) -> Iterator[tuple[Opened[ReplyManifest], LoggedEntry]]:
        """Checks the entries of an exchange, the first after another entry; yields its replies with theirs."""
        assignment = exchange.assignment
        issued = self._check_envelope_logged(assignment, COORDINATOR)
        client = client_uri(assignment.manifest.federation_id, assignment.manifest.client_id)
        # Verify, 15: an assignment that is older than the round before was not given from its model.
        if issued.number < after:
            raise VerificationError(
                f"entry {issued.number} of the audit log tells of {assignment.name} before entry {after}"
            )
        self._check_precedes(assignment.envelope, issued, assignment.name)
        if exchange.decline is not None:
            self._check_envelope_logged(exchange.decline, client)
        for answer in exchange.answers:
            self._check_precedes(answer.reply.envelope, issued, assignment.name)
            refused = answer.receipt is not None and not answer.is_accepted
            reason = answer.receipt.manifest.reason if answer.receipt is not None and refused else ""
            entry = self._check_envelope_logged(answer.reply, client, reason)
            # Verify, 15: a reply from before its assignment was made for something else.
            if entry.number < issued.number:
                name = answer.reply.name
                raise VerificationError(f"entry {entry.number} of the audit log tells of {name} before its assignment")
            yield answer.reply, entry

    def check_all_logged(self) -> None:
        """Checks that the record has the facts of all entries about rounds. Raises VerificationError."""
        for entry in self.entries:
            kept = entry.action in _OF_EXCHANGES or (
                entry.action in (STEPPED, MEASURED, DESCRIBED, SKIPPED) and entry.subject.startswith(f"{self.run_id}/")
            )
            # Verify, 15: the log must tell of nothing that the record leaves out: a reply that was accepted, and then
            # hidden.
            if kept and entry.number not in self._recorded:
                raise VerificationError(
                    f"entry {entry.number} of the audit log tells {entry.action} of {entry.subject}, which is not in "
                    "the record"
                )

    def _ends(self, entry: LoggedEntry) -> bool:
        return entry.subject == self.run_id and entry.action in _ENDS

    def _check_gone(self, clients: Iterable[str], before: int, actions: Sequence[str]) -> None:
        for name in sorted(clients):
            told = (entry for action in actions for entry in self._by.get((action, name), ()))
            if not any(entry.number < before for entry in told):
                words = "revoked or gone" if LEFT in actions else "revoked"
                raise VerificationError(
                    f"the step leaves {name} out as {words}; no entry of the audit log tells of that before it"
                )

    def _check_key_chain_logged(self, keys: KeyChain, entries: Sequence[LoggedEntry], holder: str) -> None:
        """Checks that the log has an entry for each key of a holder, in order. Raises VerificationError."""
        numbers = {entry.digest: entry.number for entry in reversed(entries)}
        before: bytes | None = None
        for raw in keys.raw:
            number = numbers.get(digest(raw))
            if number is None:
                raise VerificationError(f"{holder}: no entry of the audit log tells of it")
            if before is not None:
                self._replaced[before] = number
            before = blake3(raw).digest()

    def _check_precedes(self, envelope: SignedEnvelope, entry: LoggedEntry, fact: str) -> None:
        """Checks that the key of an envelope was not replaced before an entry. Raises VerificationError."""
        number = self._replaced.get(envelope.key_id)
        # Verify, 1: by the order of the log, which nobody can date back: a key that was replaced signs nothing
        # afterwards.
        if number is not None and number < entry.number:
            raise VerificationError(
                f"entry {entry.number} of the audit log tells of {fact}; a key that was replaced by entry {number} "
                "has signed it or its reply"
            )

    def _check_envelope_logged(self, envelope: Opened[Any], actor: str, outcome: str = "") -> LoggedEntry:
        """The newest entry about an envelope.

        Raises VerificationError; ValueError for an envelope without an entry of its own.
        """
        if envelope.fact is None:
            raise ValueError(f"{envelope.name} has no entry of its own")
        return self._check_logged(envelope.fact, envelope.name, actor, outcome)

    def _check_logged(self, fact: Fact, name: str, actor: str = "", outcome: str = "") -> LoggedEntry:
        """The newest entry about a fact, with this actor (empty for any) and outcome, told once.

        Raises VerificationError.
        """
        entries, newest = self._by.get((fact.action, fact.subject), []), self._newest(fact)
        if newest is None and entries:
            raise VerificationError(
                f"{name}: entry {entries[-1].number} of the audit log tells of another, {entries[-1].digest}"
            )
        if newest is None:
            raise VerificationError(f"{name}: no entry of the audit log tells of it")
        # Verify, 15: told once, by whom it concerns: a second entry about one fact could be about another envelope.
        if (actor and newest.actor != actor) or newest.outcome != outcome or newest.times != 1:
            raise VerificationError(
                f"{name}: entry {newest.number} of the audit log tells of {newest.actor}, {newest.outcome!r}, "
                f"{newest.times} times; expected {actor or newest.actor}, {outcome!r}, once"
            )
        self._recorded.add(newest.number)
        return newest

    def _newest(self, fact: Fact) -> LoggedEntry | None:
        """The newest entry about a fact; None if there is none."""
        entries = self._by.get((fact.action, fact.subject), [])
        return next((entry for entry in reversed(entries) if entry.digest == fact.digest), None)


def read_log(bundle: BundleReader, keys: Keys) -> RunLog:
    """Reads the log of a bundle, and verifies its entries against the signed checkpoints.

    Raises:
        VerificationError: a signature, an entry or a node is wrong.
        BundleError: the file is damaged.
    """
    record = bundle.log()
    federation = bundle.about.federation_id
    try:
        statement = keys.signers.of_coordinator(record.key, LogKeyManifest)
    except Refusal as error:
        raise VerificationError(f"the key of the audit log: {error.message}") from error
    try:
        key = signing_public_key(statement.key)
    except ValueError as error:
        raise VerificationError(f"the key of the audit log: {error}") from None
    checkpoints = [_checkpoint(envelope, key, number) for number, envelope in enumerate(record.checkpoints)]
    # Verify, 15: a log of another federation can be genuine, too.
    if statement.federation_id != federation or any(
        checkpoint.federation_id != federation for checkpoint in checkpoints
    ):
        raise VerificationError("the audit log is of another federation")
    sizes = [checkpoint.size for checkpoint in checkpoints]
    # Verify, 15: growing and not empty: without a checkpoint, nobody has signed the entries.
    if not sizes or sizes != sorted(set(sizes)) or not sizes[0]:
        raise VerificationError(
            f"the checkpoints of the audit log cover {sizes} entries; expected one or more, growing"
        )
    leaves = _leaves(record.entries, sizes[-1])
    nodes = {(number, number + 1): leaf for number, leaf in leaves.items()}
    numbers = list(leaves)
    for node in record.nodes:
        first = bisect_left(numbers, node.start)
        # Verify, the log in the file: a node over a shown entry would take its place, and the root would not depend on
        # the entry.
        if first < bisect_left(numbers, node.stop):
            raise VerificationError(f"the audit log: a node hides entry {numbers[first]}, which is shown")
        _check_hash(node.hash, f"the node of the entries from {node.start} to {node.stop - 1}")
        nodes[node.start, node.stop] = node.hash
    verified = 0
    for checkpoint in checkpoints:
        try:
            root = root_from(nodes, 0, checkpoint.size)
        except LookupError as error:
            defect = f"{error}, below the checkpoint of {checkpoint.size} entries"
            raise VerificationError(f"the audit log: {defect}: the entry, or a node above it, was removed") from None
        # Verify, 15: each checkpoint: members were shown these roots, so a later one must not rewrite an earlier one.
        if root != checkpoint.root:
            raise VerificationError(
                f"the audit log: an entry from {verified} to {checkpoint.size - 1} was changed, removed, inserted or "
                f"moved: the checkpoint of {checkpoint.size} entries was signed over others"
            )
        verified = checkpoint.size
    places = [(node.start, node.stop) for node in record.nodes]
    # Verify, 12: exactly the nodes that the roots need: others are bytes that nobody has signed.
    if places != sorted(ranges_around(numbers, sizes)):
        raise VerificationError(
            "the audit log: its nodes are not those that lead from the entries to the checkpoints, each once"
        )
    log = RunLog(bundle.about.run_id, checkpoints[-1], tuple(record.entries), nodes)
    # Verify, 15: the log tells of its own key, or a second log with another key could be shown to this reader.
    log._check_logged(Fact("key.set", "log key", digest(statement.key)), "the key of the audit log")
    return log


def _checkpoint(envelope: SignedEnvelope, key: Ed25519PublicKey, number: int) -> CheckpointManifest:
    try:
        return verify_known(envelope, CheckpointManifest, key)
    except Refusal as error:
        raise VerificationError(f"checkpoint {number} of the audit log: {error.message}") from error


def _check_hash(data: bytes, holder: str) -> None:
    """Raises VerificationError if a hash has another length: bytes hashed beside it could pass as its own."""
    if len(data) != HASH_BYTES:
        raise VerificationError(f"the audit log: {holder} has a hash of {len(data)} bytes; expected {HASH_BYTES}")


def _leaves(entries: Iterable[LoggedEntry], size: int) -> dict[int, bytes]:
    """The leaves of entries, by number.

    Raises VerificationError if they are out of order, or do not continue each other.
    """
    leaves: dict[int, bytes] = {}
    last = -1
    for entry in entries:
        number = entry.number
        # Verify, 15: in order and below the newest checkpoint: beyond it, an entry is signed by nobody.
        if not last < number < size:
            raise VerificationError(
                f"the audit log: entry {number} comes after entry {last}, under a checkpoint of {size} entries"
            )
        _check_hash(entry.previous, f"entry {number}")
        before = leaves.get(number - 1, FIRST if number == 0 else entry.previous)
        # Verify, 15: each entry continues the one before: one that was removed in between leaves a gap that shows here.
        if entry.previous != before:
            raise VerificationError(
                f"the audit log: entry {number} does not continue the entry before it; one of both was changed"
            )
        try:
            time = EPOCH + timedelta(microseconds=entry.at)
        except OverflowError:
            raise VerificationError(f"the audit log: entry {number} tells of no time, {entry.at}") from None
        texts = {name: getattr(entry, name) for name in _TEXTS}
        logged = LogEntry(number=number, entry_id=entry.entry_id, at=time, times=entry.times, **texts)
        leaves[number] = logged.leaf(entry.previous)
        last = number
    return leaves
