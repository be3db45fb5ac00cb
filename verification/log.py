"""Verifies the audit log of a run: its entries are those that were signed, and the record agrees with them."""

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
from federation.record.log_entries import (
    ACCEPTED,
    DECLINED,
    EPOCH,
    EQUIVOCATED,
    FIRST,
    ISSUED,
    REFUSED,
    SKIPPED,
    STEPPED,
    SUBMITTED,
    Fact,
    LogEntry,
)
from federation.record.merkle import root_from
from federation.record.rounds import OpenedRound
from federation.refusals import Refusal
from federation.trust.envelope import unseal
from federation.trust.key_chain import KeyChain
from federation.trust.proofs import signing_public_key
from federation.v1.common_pb2 import (
    CheckpointManifest,
    ConsentManifest,
    LogKeyManifest,
    ReplyManifest,
    SignedEnvelope,
)
from federation.v1.record_pb2 import LoggedEntry
from verification.errors import Wrong
from verification.holders import Keys

_OF_EXCHANGES = (ISSUED, DECLINED, ACCEPTED, REFUSED, EQUIVOCATED)
_ENDS = {f"run.{state.lower()}": state for state in ("COMPLETED", "FAILED", "STOPPED")}
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
    _stepped: int = -1  # the number of the entry of the newest step

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

    def must_tell_run(self, spec: str, state: str) -> None:
        """Checks the entries of the submission and of the run's end. Raises Wrong."""
        self._must_tell(Fact(SUBMITTED, self.run_id, spec), "the submission of the run")
        ended = "" if self.end is None else _ENDS[self.end.action]
        if ended != (state if state in _ENDS.values() else ""):
            raise Wrong(f"the bundle says that the run is {state}; the audit log tells {ended or 'of no end'}")

    def must_tell_keys(self, keys: Keys) -> None:
        """Checks the entries of all signing keys; call it before `must_tell`. Raises Wrong."""
        own = self._by.get(("key.set", "signing key"), [])
        self._must_tell_keys(keys.coordinator, own, "the coordinator's signing key")
        about: dict[str, list[LoggedEntry]] = {}
        for entry in self.entries:
            about.setdefault(entry.subject, []).append(entry)
        for name, chain in keys.clients.items():
            self._must_tell_keys(chain, about.get(name, []), f"the signing key of {name}")

    def must_tell_consents(self, consents: Iterable[SignedEnvelope], facts: Mapping[str, object], keys: Keys) -> None:
        """Checks that each answer to the run is signed by its client and is the newest one in the log. Raises Wrong."""
        entries = {entry.subject: entry for entry in self.entries if entry.action.startswith("consent.")}
        for envelope in consents:
            try:
                client_id = ConsentManifest.FromString(envelope.manifest).client_id
            except DecodeError:
                raise Wrong("an answer to the run is not a ConsentManifest") from None
            consent = open_consent(envelope, client_id, keys.signers, facts)
            if consent.problem is not None or consent.fact is None:
                raise Wrong(consent.words)
            entry = entries.pop(consent.fact.subject, None)
            if entry is None or Fact(entry.action, entry.subject, entry.digest) != consent.fact:
                raise Wrong(f"{consent.name}: the audit log tells {'of none' if entry is None else 'of another'}")
            self._must_precede(envelope, entry, consent.name)
        for subject, entry in entries.items():
            raise Wrong(
                f"entry {entry.number} of the audit log tells of the answer {subject}, which is not in the record"
            )

    def must_tell(self, opened: OpenedRound) -> None:
        """Checks that the log has an entry for each envelope of a round, in order. The envelopes have been verified.

        Raises:
            Wrong: an envelope has no entry, the entry is about another envelope, or it has the wrong position.
        """
        if opened.skipped is not None:
            self._must_tell(opened.skipped, "the end of the round")
        stepped, named = None, set[str]()
        if opened.step is not None:
            stepped, step = self._must_tell_of(opened.step), opened.step.manifest
            named = {*step.replies, *step.consulted}
            if stepped.number < self._stepped:
                raise Wrong(f"entry {stepped.number} of the audit log tells of the step before that of another round")
            self._stepped = stepped.number
            self._must_precede(opened.step.envelope, stepped, opened.step.name)
            self._must_be_revoked({*step.revoked, *step.forgotten}, stepped.number)
        for exchange in opened.exchanges:
            for reply, entry in self._must_tell_exchange(exchange):
                if stepped is not None and reply.digest in named and entry.number > stepped.number:
                    raise Wrong(f"entry {entry.number} of the audit log tells of {reply.name} after the step")

    def _must_tell_exchange(self, exchange: OpenedExchange) -> Iterator[tuple[Opened[ReplyManifest], LoggedEntry]]:
        """Checks the entries of an exchange; yields its replies with theirs."""
        assignment = exchange.assignment
        issued = self._must_tell_of(assignment)
        self._must_precede(assignment.envelope, issued, assignment.name)
        if exchange.decline is not None:
            self._must_tell_of(exchange.decline)
        for answer in exchange.answers:
            self._must_precede(answer.reply.envelope, issued, assignment.name)
            entry = self._must_tell_of(answer.reply)
            if entry.number < issued.number:
                name = answer.reply.name
                raise Wrong(f"entry {entry.number} of the audit log tells of {name} before its assignment")
            yield answer.reply, entry

    def must_be_all_told(self) -> None:
        """Checks that the record has the facts of all entries about rounds. Raises Wrong."""
        for entry in self.entries:
            kept = entry.action in _OF_EXCHANGES or (
                entry.action in (STEPPED, SKIPPED) and entry.subject.startswith(f"{self.run_id}/")
            )
            if kept and entry.number not in self._recorded:
                raise Wrong(
                    f"entry {entry.number} of the audit log tells {entry.action} of {entry.subject}, which is not in "
                    "the record"
                )

    def _ends(self, entry: LoggedEntry) -> bool:
        return entry.subject == self.run_id and entry.action in _ENDS

    def _must_be_revoked(self, clients: Iterable[str], before: int) -> None:
        for name in sorted(clients):
            if not any(entry.number < before for entry in self._by.get(("client.revoked", name), ())):
                raise Wrong(f"the step leaves {name} out as revoked; no entry of the audit log tells of that before it")

    def _must_tell_keys(self, keys: KeyChain, entries: Sequence[LoggedEntry], holder: str) -> None:
        """Checks that the log has an entry for each key of a holder, in order. Raises Wrong."""
        numbers = {entry.digest: entry.number for entry in reversed(entries)}
        before: bytes | None = None
        for raw in keys.raw:
            number = numbers.get(digest(raw))
            if number is None:
                raise Wrong(f"{holder}: no entry of the audit log tells of it")
            if before is not None:
                self._replaced[before] = number
            before = blake3(raw).digest()

    def _must_precede(self, envelope: SignedEnvelope, entry: LoggedEntry, fact: str) -> None:
        """Checks that the key of an envelope was not replaced before an entry. Raises Wrong."""
        number = self._replaced.get(envelope.key_id)
        if number is not None and number < entry.number:
            raise Wrong(
                f"entry {entry.number} of the audit log tells of {fact}; a key that was replaced by entry {number} "
                "has signed it or its reply"
            )

    def _must_tell_of(self, envelope: Opened[Any]) -> LoggedEntry:
        """The newest entry about an envelope. Raises Wrong; ValueError for an envelope without an entry of its own."""
        if envelope.fact is None:
            raise ValueError(f"{envelope.name} has no entry of its own")
        return self._must_tell(envelope.fact, envelope.name)

    def _must_tell(self, fact: Fact, name: str) -> LoggedEntry:
        """The newest entry about a fact. Raises Wrong."""
        entries = self._by.get((fact.action, fact.subject), [])
        newest = next((entry for entry in reversed(entries) if entry.digest == fact.digest), None)
        if newest is None and entries:
            raise Wrong(f"{name}: entry {entries[-1].number} of the audit log tells of another, {entries[-1].digest}")
        if newest is None:
            raise Wrong(f"{name}: no entry of the audit log tells of it")
        self._recorded.add(newest.number)
        return newest


def read_log(bundle: BundleReader, keys: Keys) -> RunLog:
    """Reads the log of a bundle, and verifies its entries against the signed checkpoints.

    Raises:
        Wrong: a signature, an entry or a node is wrong.
        BundleError: the file is damaged.
    """
    record = bundle.log()
    federation = bundle.about.federation_id
    try:
        statement = keys.coordinator.unseal(record.key, LogKeyManifest)
    except Refusal as error:
        raise Wrong(f"the key of the audit log: {error.message}") from error
    try:
        key = signing_public_key(statement.key)
    except ValueError as error:
        raise Wrong(f"the key of the audit log: {error}") from None
    checkpoints = [_checkpoint(envelope, key, number) for number, envelope in enumerate(record.checkpoints)]
    if statement.federation_id != federation or any(
        checkpoint.federation_id != federation for checkpoint in checkpoints
    ):
        raise Wrong("the audit log is of another federation")
    sizes = [checkpoint.size for checkpoint in checkpoints]
    if not sizes or sizes != sorted(set(sizes)) or not sizes[0]:
        raise Wrong(f"the checkpoints of the audit log cover {sizes} entries; expected one or more, growing")
    leaves = _leaves(record.entries, sizes[-1])
    nodes = {(number, number + 1): leaf for number, leaf in leaves.items()}
    numbers = list(leaves)
    for node in record.nodes:
        first = bisect_left(numbers, node.start)
        if first < bisect_left(numbers, node.stop):
            raise Wrong(f"the audit log: a node hides entry {numbers[first]}, which is shown")
        nodes[node.start, node.stop] = node.hash
    verified = 0
    for checkpoint in checkpoints:
        try:
            root = root_from(nodes, 0, checkpoint.size)
        except LookupError as error:
            defect = f"{error}, below the checkpoint of {checkpoint.size} entries"
            raise Wrong(f"the audit log: {defect}: the entry, or a node above it, was removed") from None
        if root != checkpoint.root:
            raise Wrong(
                f"the audit log: an entry from {verified} to {checkpoint.size - 1} was changed, removed, inserted or "
                f"moved: the checkpoint of {checkpoint.size} entries was signed over others"
            )
        verified = checkpoint.size
    log = RunLog(bundle.about.run_id, checkpoints[-1], tuple(record.entries), nodes)
    log._must_tell(Fact("key.set", "log key", digest(statement.key)), "the key of the audit log")
    return log


def _checkpoint(envelope: SignedEnvelope, key: Ed25519PublicKey, number: int) -> CheckpointManifest:
    try:
        return unseal(envelope, CheckpointManifest, key)
    except Refusal as error:
        raise Wrong(f"checkpoint {number} of the audit log: {error.message}") from error


def _leaves(entries: Iterable[LoggedEntry], size: int) -> dict[int, bytes]:
    """The leaves of entries, by number. Raises Wrong if they are out of order, or do not continue each other."""
    leaves: dict[int, bytes] = {}
    last = -1
    for entry in entries:
        number = entry.number
        if not last < number < size:
            raise Wrong(f"the audit log: entry {number} comes after entry {last}, under a checkpoint of {size} entries")
        before = leaves.get(number - 1, FIRST if number == 0 else entry.previous)
        if entry.previous != before:
            raise Wrong(f"the audit log: entry {number} does not continue the entry before it; one of both was changed")
        try:
            time = EPOCH + timedelta(microseconds=entry.at)
        except OverflowError:
            raise Wrong(f"the audit log: entry {number} tells of no time, {entry.at}") from None
        texts = {name: getattr(entry, name) for name in _TEXTS}
        logged = LogEntry(number=number, entry_id=entry.entry_id, at=time, times=entry.times, **texts)
        leaves[number] = logged.leaf(entry.previous)
        last = number
    return leaves
