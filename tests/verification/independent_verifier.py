"""A verifier that was written from docs/reference/verify.md: NumPy, `cryptography`, BLAKE3, and stubs made from proto/.

It imports nothing else of fedpareto. It knows the algorithm `fedavg`, the optimizer `sgd`, open rounds, results that
describe data, and models that are filled from them (`independent_statistics`); of other runs it says what it did not
verify.
"""

import hashlib
import io
import json
import re
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from federation.v1 import common_pb2, record_pb2, secure_pb2
from tests.verification import independent_statistics, independent_sums

LABELS = {
    "AssignmentManifest": "assignment",
    "ReplyManifest": "reply",
    "DeclineManifest": "decline",
    "ReceiptManifest": "receipt",
    "StepManifest": "step",
    "ResultManifest": "result",
    "LogKeyManifest": "log-key",
    "CheckpointManifest": "checkpoint",
    "WithdrawalManifest": "withdrawal",
}

MOST_COMPARED = 200  # rows of a K that no rule reads
READ_LESS = "afl fedavg fedavg-n fedfa median norm-clipping q-fedavg scalarised trimmed-mean"  # than K


class Wrong(Exception):
    """Something does not follow from what was signed."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


def blake(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def name_of(envelope: Any) -> str:
    return blake(envelope.SerializeToString(deterministic=True))


def drawn_rows(run: dict[str, Any], step: Any, count: int) -> list[int]:
    """The rows of which K is, if it is not of all: those with the least numbers, the first 63 bits of a digest."""
    if not step.gram_rows:
        must(not step.squared_norms, "squared lengths beside a whole K")
        return []
    must(count > MOST_COMPARED and len(step.squared_norms) == count, "a K of some rows alone")
    must(
        run["algorithm"]["name"] in READ_LESS.split() and run.get("server", {}).get("learning_rate") != "auto",
        "a part of K",
    )
    must("nnm" not in run["algorithm"].get("pre", ()), "a part of K, all of which a stage reads")

    def order(row: int) -> tuple[int, int]:
        data = blake3(f"gram-rows {run.get('seed', 0)} {step.round} {row}".encode()).digest()
        return int.from_bytes(data[:8], "little") // 2, row

    rows = sorted(sorted(range(count), key=order)[:MOST_COMPARED])
    must(rows == [*step.gram_rows], "K is of other rows than those that are drawn")
    return rows


def parsed(kind: Any, data: bytes) -> Any:
    """A message, all of whose fields are known."""
    try:
        message, known = kind.FromString(data), kind.FromString(data)
    except DecodeError:
        raise Wrong(f"a {kind.__name__} cannot be read") from None
    known.DiscardUnknownFields()
    must(known.ByteSize() == message.ByteSize(), f"a field of a {kind.__name__} is not known")
    return message


def opened(envelope: Any, kind: str, key: bytes, what: str) -> Any:
    """The manifest in an envelope that this key has signed."""
    data = f"fedpareto/v1/{LABELS[kind]}".encode() + b"\0" + envelope.manifest
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(envelope.signature, data)
    except (InvalidSignature, ValueError):
        raise Wrong(f"the signature of {what}") from None
    must(envelope.key_id == blake3(key).digest(), f"the key id of {what}")
    return parsed(getattr(common_pb2, kind), envelope.manifest)


@dataclass
class Found:
    """What was verified: rounds, models to use, what is missing by round, and the digest of the record."""

    rounds: int = 0
    models: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    record: str = ""


class File:
    """The entries of a bundle."""

    def __init__(self, path: Path) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                self.entries = {name: archive.read(name) for name in archive.namelist()}
            self.about = json_format.Parse(self.entries["bundle.json"], record_pb2.Bundle())
            rounds = [self.entries[f"rounds/{number:06d}.pb"] for number in range(self.about.rounds)]
            self.rounds = [parsed(record_pb2.RoundRecord, data) for data in rounds]
            self.log = parsed(record_pb2.LogRecord, self.entries["log.pb"])
            self.spec = self.entries["specification.toml"]
            self.run = tomllib.loads(self.spec.decode())
        except Exception as error:
            raise Wrong(f"the file: {error!r}") from error
        must(
            all(self.entries.get(name, b"x") for name in ("consents.pb", "rotations.pb", "withdrawals.pb")),
            "an empty entry",
        )
        filled = self.entries.get("statistics.pb")
        must(filled != b"", "an empty entry")
        self.filled = None if filled is None else parsed(record_pb2.DescribedData, filled)
        self.named: set[str] = set()
        self.objectives = list(self.about.objectives)
        must(self.about.name == self.run["name"], "the name of the run")
        must(len(set(self.objectives)) == len(self.objectives), "the objectives")
        names = [name for name in self.entries if name.startswith("rounds/")]
        must(len(names) == self.about.rounds and self.about.format == 1, "the number of rounds")

    def blob(self, digest: str) -> bytes | None:
        data = self.entries.get(f"blobs/{digest.replace(':', '-')}")
        must(data is None or blake(data) == digest, f"the digest of the blob {digest}")
        return data

    def rows(self, digest: str) -> list[np.ndarray] | None:
        """The float32 tensors of a safetensors file, flat, in the order of their data."""
        tensors = self.tensors(digest)
        return None if tensors is None else [*tensors.values()]

    def answer(self, digest: str, said: Any, order: Any) -> independent_sums.Answer:
        """A reply to a phase of a private session, by its digest, its manifest and its assignment."""
        data, stage = self.blob(said.payload) if said.payload else None, order.kind.removeprefix("secure-")
        must(stage in independent_sums.STAGES, f"{order.kind} is no phase of a private session")
        work = parsed(getattr(secure_pb2, f"Secure{stage.title()}Work"), order.work)
        parsed(secure_pb2.SecureStatement, said.statement)
        raw = None if data is None else np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], np.uint8)
        return independent_sums.Answer(
            name=said.client_id,
            stage=stage,
            digest=digest,
            work=work.SerializeToString(),
            statement=said.statement,
            payload=raw,
            payload_digest=said.payload,
        )

    def tensors(self, digest: str) -> dict[str, np.ndarray] | None:
        """As `rows`, by name."""
        data = self.blob(digest)
        if data is None:
            return None
        begin = 8 + int.from_bytes(data[:8], "little")
        tensors = sorted((entry["data_offsets"], name) for name, entry in json.loads(data[8:begin]).items())
        return {name: np.frombuffer(data[begin + i : begin + j], "<f4").astype(float) for (i, j), name in tensors}


def read_keys(file: File, fingerprint: str) -> dict[str, bytes]:
    """The raw signing keys, by "coordinator" and "client/NAME"."""
    ca = x509.load_der_x509_certificate(file.entries["certificates/ca.der"])
    found = hashlib.sha256(file.entries["certificates/ca.der"]).hexdigest()
    must(fingerprint in ("", found), "the fingerprint of the CA")
    keys: dict[str, bytes] = {}
    for name, data in file.entries.items():
        if not name.startswith("certificates/") or name.endswith("/ca.der"):
            continue
        try:
            certificate = x509.load_der_x509_certificate(data)
            certificate.verify_directly_issued_by(ca)
            extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, InvalidSignature, x509.ExtensionNotFound) as error:
            raise Wrong(f"{name}: {error!r}") from error
        must(name == f"certificates/{certificate.serial_number:x}.der", f"the name of {name}")
        prefix = f"fedpareto://{file.about.federation_id}/"
        names = [uri.removeprefix(prefix) for uri in extension.get_values_for_type(x509.UniformResourceIdentifier)]
        keyed = [bytes.fromhex(one.removeprefix("signing-key/")) for one in names if one.startswith("signing-key/")]
        holders = [one for one in names if one == "coordinator" or one.startswith("client/")]
        must(len(keyed) == len(holders) == 1, f"{name} names no signing key of a member")
        must(keys.setdefault(holders[0], keyed[0]) == keyed[0], f"{name} names another key")
    must("coordinator" in keys, "no certificate of the coordinator")
    return keys


# --- the audit log


def leaf(entry: Any) -> bytes:
    data = b"fedpareto/v1/entry\0" + entry.previous
    for number in (entry.number, entry.entry_id):
        data += number.to_bytes(8, "big")
    data += entry.at.to_bytes(8, "big", signed=True) + entry.times.to_bytes(8, "big")
    for text in (entry.actor, entry.action, entry.subject, entry.outcome, entry.detail, entry.digest):
        data += len(text.encode()).to_bytes(4, "big") + text.encode()
    return hashlib.sha256(b"\0" + data).digest()


class Log:
    """The entries of the log, under its checkpoints."""

    def __init__(self, file: File, keys: dict[str, bytes]) -> None:
        record, federation = file.log, file.about.federation_id
        key = opened(record.key, "LogKeyManifest", keys["coordinator"], "the log key")
        signed = [opened(one, "CheckpointManifest", key.key, "a checkpoint") for one in record.checkpoints]
        must(all(one.federation_id == federation for one in (key, *signed)), "the federation of the log")
        sizes, numbers = [one.size for one in signed], [entry.number for entry in record.entries]
        must(sizes and sizes == sorted(set(sizes)) and sizes[0] > 0, "the sizes of the checkpoints")
        must(numbers == sorted(set(numbers)) and (not numbers or numbers[-1] < sizes[-1]), "the order of the entries")
        self.nodes = {(entry.number, entry.number + 1): leaf(entry) for entry in record.entries}
        for entry in record.entries:
            before = self.nodes.get((entry.number - 1, entry.number), bytes(32) if not entry.number else entry.previous)
            must(entry.previous == before, f"entry {entry.number} does not continue the one before")
        for node in record.nodes:
            must(not any(node.start <= number < node.stop for number in numbers), "a node hides an entry")
            self.nodes[node.start, node.stop] = node.hash
        for one in signed:
            must(self.root(0, one.size) == one.root, f"the root of {one.size} entries")
        places = [(node.start, node.stop) for node in record.nodes]
        needed = {place for size in sizes for place in self.around(set(numbers), 0, size)}
        must(places == sorted(needed), "the nodes")
        self.entries = list(record.entries)
        self.told: set[int] = set()
        self.find("key.set", "log key", blake(key.key))
        self.find("key.set", "signing key", blake(keys["coordinator"]))
        submitted = self.entries[self.find("run.submitted", file.about.run_id, blake(file.spec), place=True)]
        must(submitted.detail.endswith(f", model {file.about.initial_model}"), "the initial model")
        self.submitted_by = submitted.actor.rpartition("/")[2]
        for name, raw in keys.items():
            subject = name.removeprefix("client/")
            known = any(
                entry.subject == subject and entry.digest == blake(raw) and entry.action in ("Enroll", "key.rotated")
                for entry in self.entries
            )
            must(known or name == "coordinator", f"the log does not know the key of {subject}")
        self.file = file

    def withdrawals(self, keys: dict[str, bytes]) -> None:
        """Each client that has left has signed it, in the joining in which it was; it has sent nothing afterwards."""
        data = self.file.entries.get("withdrawals.pb", b"")
        signed = {name_of(one): one for one in parsed(record_pb2.Withdrawals, data).withdrawals}
        joining: dict[str, set[str]] = {}
        gone: set[str] = set()
        for entry in self.entries:
            name = entry.subject
            if entry.action in ("Enroll", "client.joined-again"):
                joining[name] = set()
                gone.discard(name)
            if entry.action in ("Enroll", "client.joined-again", "Renew", "key.rotated"):
                joining.setdefault(name, set()).update(re.findall(r"certificate ([0-9a-f]+)", entry.detail))
            if entry.action == "reply.accepted":
                must(entry.actor.rpartition("/")[2] not in gone, f"a reply of {entry.actor}, which has left")
            if entry.action == "client.left":
                must(entry.digest in signed, f"the withdrawal of {name}")
                said = opened(signed.pop(entry.digest), "WithdrawalManifest", keys[f"client/{name}"], "a withdrawal")
                must((said.federation_id, said.client_id) == (self.file.about.federation_id, name), "a withdrawal")
                must(said.certificate in joining.get(name, ()), f"the joining from which {name} withdraws")
                gone.add(name)
        must(not signed, "a withdrawal of which the log does not tell")

    def root(self, start: int, stop: int) -> bytes:
        if (start, stop) in self.nodes:
            return self.nodes[start, stop]
        must(stop - start > 1, f"nothing is known of leaf {start}")
        half = start + (1 << (stop - start - 1).bit_length() - 1)
        return hashlib.sha256(b"\1" + self.root(start, half) + self.root(half, stop)).digest()

    def around(self, shown: set[int], start: int, stop: int) -> set[tuple[int, int]]:
        """The ranges without an entry of the file that are needed for the root over a range."""
        if not any(start <= number < stop for number in shown):
            return {(start, stop)}
        if stop - start == 1:
            return set()
        half = start + (1 << (stop - start - 1).bit_length() - 1)
        return self.around(shown, start, half) | self.around(shown, half, stop)

    def find(
        self, action: str, subject: str, digest: str, *, by: str = "", outcome: str = "", place: bool = False
    ) -> int:
        """The number of the newest entry that tells of a fact, or its place in the file."""
        for at, entry in reversed([*enumerate(self.entries)]):
            if (entry.action, entry.subject, entry.digest) == (action, subject, digest):
                must(by in ("", entry.actor), f"who did {action} of {subject}")
                must(entry.outcome == outcome and entry.times == 1, f"the outcome of {action} of {subject}")
                self.told.add(entry.number)
                return at if place else int(entry.number)
        raise Wrong(f"no entry of the log tells {action} of {subject} with this digest")

    def end(self) -> str:
        """Checks that nothing else is told of, and returns the digest of the record."""
        run = self.file.about.run_id
        checked = ("assignment.", "reply.accepted", "reply.refused", "round.")
        for entry in self.entries:
            must(entry.number in self.told or not entry.action.startswith(checked), f"entry {entry.number} has no fact")
        ends = [entry for entry in self.entries if entry.subject == run and entry.action in ENDS]
        must(bool(ends) == (f"run.{self.file.about.state.lower()}" in ENDS), "the end of the run")
        if not ends:
            return ""
        must(ends[-1].action == f"run.{self.file.about.state.lower()}", "the state of the run")
        return f"sha256:{self.root(0, ends[-1].number + 1).hex()}"


ENDS = ("run.completed", "run.failed", "run.stopped")


# --- a round


class Run:
    """Verifies the rounds of a run one after the other."""

    def __init__(self, file: File, keys: dict[str, bytes], log: Log) -> None:
        self.file, self.keys, self.log = file, keys, log
        self.model, self.previous, self.state = file.about.initial_model, "", b"{}"
        self.facts = {"federation_id": file.about.federation_id, "run_id": file.about.run_id}
        measures = file.run.get("kind") == "evaluate"
        self.describes = file.run.get("kind") == "statistics"
        # One for each round that makes no step.
        self.models: list[str] | None = file.run["models"] if measures else [self.model] if self.describes else None
        self.private = file.run.get("privacy", {}).get("secure", "off") != "off"
        must(not self.models or self.models[0] == self.model, "the first model")
        self.parameters = file.run.get("parameters", {})
        self.assignments: set[str] = set()
        self.orders: dict[str, Any] = {}
        self.asked: list[Any] = []  # the assignments of a phase
        self.sent = [0, 0]  # bytes of all payloads of a round, and of the refused ones

    def same(self, message: Any, what: str, **expected: Any) -> None:
        for name, value in expected.items():
            must(getattr(message, name) == value, f"the {name} of {what}")

    def exchange(self, record: Any, phase: Any, exchange: Any) -> Any:
        """The accepted reply to an assignment, as (digest, manifest, entry), if there is one."""
        order = opened(exchange.assignment, "AssignmentManifest", self.keys["coordinator"], "an assignment")
        what = f"the assignment of {order.client_id}"
        self.same(order, what, **self.facts, round=record.number, phase=phase.number, attempt=phase.attempt)
        self.same(order, what, kind=phase.kind, spec=blake(self.file.spec), task=self.file.run["task"])
        if phase.decides:
            self.same(order, what, base_model=self.model, previous_step=self.previous)
        must(order.assignment_id not in self.assignments, f"{what} is there twice")
        self.assignments.add(order.assignment_id)
        self.orders[order.assignment_id] = order
        self.same(order, what, seed=self.file.run.get("seed", 0), submitted_by=self.log.submitted_by)
        unshared = {name: self.parameters.get(name, []) for name in ("personal", "frozen", "fixed")}
        must({name: list(getattr(order.unshared, name)) for name in unshared} == unshared, f"what {what} leaves out")
        self.same(order.unshared, what, **{name: self.parameters.get(name, "") for name in ("buffers", "statistics")})
        self.same(order, what, members=len(phase.exchanges))
        model = self.file.blob(order.base_model)
        must(model is None or order.base_model_bytes == len(model), f"the size of the model of {what}")
        served = list(order.objectives)
        must(served and served == [one for one in self.file.objectives if one in served], f"the objectives of {what}")
        self.asked.append(order)
        issued = self.log.find("assignment.issued", order.assignment_id, name_of(exchange.assignment), by="coordinator")
        uri = f"fedpareto://{order.federation_id}/client/{order.client_id}"
        must(f"client/{order.client_id}" in self.keys, f"the key of {order.client_id}")
        key, found = self.keys[f"client/{order.client_id}"], []
        if exchange.HasField("decline"):
            decline = opened(exchange.decline, "DeclineManifest", key, f"the decline of {order.client_id}")
            self.same(decline, "a decline", client_id=order.client_id, assignment_id=order.assignment_id)
            self.log.find("assignment.declined", order.assignment_id, name_of(exchange.decline), by=uri)
        for answer in exchange.answers:
            digest, what = name_of(answer.reply), f"the reply of {order.client_id}"
            said = opened(answer.reply, "ReplyManifest", key, what)
            copied = ("federation_id", "run_id", "round", "phase", "assignment_id", "client_id", "base_model")
            self.same(said, what, **{name: getattr(order, name) for name in (*copied, "attempt", "spec", "task")})
            must(list(said.rows) == list(order.rows), f"the rows of {what}")
            if not answer.HasField("receipt"):
                self.log.find("reply.equivocation", order.assignment_id, digest, by=uri)
                continue
            receipt = opened(answer.receipt, "ReceiptManifest", self.keys["coordinator"], "a receipt")
            self.same(receipt, "a receipt", envelope=digest, assignment_id=order.assignment_id)
            action = "reply.accepted" if receipt.accepted else "reply.refused"
            told = self.log.find(action, order.assignment_id, digest, by=uri, outcome=receipt.reason)
            must(told > issued, f"{what} is told of before its assignment")
            self.same(receipt, "a receipt", **{name: getattr(said, name) for name in (*copied, "payload")})
            self.file.named.add(said.payload)
            self.sent[0] += said.payload_bytes
            self.sent[1] += 0 if receipt.accepted else said.payload_bytes
            if receipt.accepted:
                must(bool(order.rows) == bool(said.payload) == bool(said.payload_bytes), f"the payload of {what}")
                payload = self.file.blob(said.payload) if said.payload else None
                must(payload is None or said.payload_bytes == len(payload), f"the size of the payload of {what}")
                must(said.payload_bytes <= order.max_payload_bytes, f"the size of the payload of {what}")
                must(not said.statement or self.private, f"the statement of {what}")
                must(
                    said.samples <= self.file.run.get("limits", {}).get("samples", 10_000_000), f"the samples of {what}"
                )
                found.append((digest, said, told))
        must(len(found) <= 1, f"{order.client_id} has two accepted replies")
        return found[0] if found else None

    def round(self, record: Any, number: int) -> list[str]:
        """Verifies a round, and returns what could not be."""
        must(record.number == number, "the number of the round")
        measures = self.models is not None and record.state == "COMPLETED"
        ends = "COMPLETED" if record.HasField("step") or measures else "SKIPPED"
        must(record.state == ends and not (self.models and record.HasField("step")), "the state of the round")
        has_result = record.HasField("result") or bool(record.document)
        must(not has_result or (self.describes and measures), "a result of a round that describes no data")
        model = self.models[number] if self.models else None
        deciding, evaluations, crowd = {}, [], 0
        self.sent = [0, 0]
        attempts = [phase.attempt for phase in record.phases]
        must(attempts == sorted(attempts) and all(one <= record.attempt for one in attempts), "the attempts")
        for place, phase in enumerate(record.phases):
            must(phase.number == place, "the number of a phase")
            must(phase.decides != bool(self.models) if not record.HasField("step") else True, "an evaluation, or none")
            self.asked = []
            for exchange in phase.exchanges:
                reply = self.exchange(record, phase, exchange)
                if reply is not None and phase.decides and phase.attempt == record.attempt:
                    deciding[reply[0]] = reply
                elif reply is not None and not phase.decides:
                    evaluations.append(reply)
            self.phase(record, phase)
            must(not model or all(order.base_model == model for order in self.asked), "another model was measured")
            first = (phase.decides or model) and phase.attempt == record.attempt and not crowd
            crowd = len(self.asked) if first else crowd
        subject = f"{self.file.about.run_id}/{number}"
        if measures:
            return self.measured(record, evaluations, crowd, str(model), subject)
        if not record.HasField("step"):
            must(record.state in ("SKIPPED", "OPEN"), "a round without a step")
            must(not record.state_after, "a state without a step")
            must({*record.metrics} <= {"required/missing", "bytes/up", "bytes/refused", "bytes/down"}, "the metrics")
            entry = self.log.entries[self.log.find("round.skipped", subject, "", by="coordinator", place=True)]
            must(record.reason[:399] == entry.detail[:399], "why the round was skipped")
            return []
        selection = self.file.run.get("selection", {})
        if selection.get("method", "all") == "all" and len(self.file.objectives) == 1:
            must(crowd >= selection.get("minimum", 1), "the number of clients that were asked")
        step = opened(record.step, "StepManifest", self.keys["coordinator"], "the step")
        stepped = self.log.find("round.stepped", subject, name_of(record.step), by="coordinator")
        self.file.named |= {step.base_model, step.result_model, step.gram, step.combined, step.noise}
        self.same(step, "the step", **self.facts, round=number, base_model=self.model)
        self.same(step, "the step", algorithm=self.file.run["algorithm"]["name"], state_before=blake(self.state))
        state = record.state_after.encode()
        must(step.state_after == blake(state), "the state after the step")
        memory = json.loads(state)
        must(state == json.dumps(memory, sort_keys=True, separators=(",", ":")).encode(), "the form of the state")
        self.file.named |= {*memory.get("vectors", {}).values()}
        must(
            {"blobs", "rule", "vectors"} <= memory.keys() <= {"averaged", "blobs", "rule", "vectors"},
            "the state's keys",
        )
        if self.file.run["algorithm"]["name"] == "fedavg":
            must(memory["rule"] == {} and memory["blobs"] == sorted({*memory["vectors"].values()}), "the state's blobs")
        absent = {reply[1].client_id for digest, reply in deciding.items() if digest not in step.replies}
        must(absent == {*step.revoked}, "a reply that the step leaves out")
        told = {entry.subject: entry.number for entry in self.log.entries if entry.action == "client.revoked"}
        must(
            all(told.get(name, stepped) < stepped for name in step.revoked),
            "a revocation that the log does not tell of",
        )
        must(all(digest in deciding for digest in step.replies), "a reply of the step that is not on record")
        replies = [deciding[digest] for digest in step.replies]
        must(all(told < stepped for _, _, told in replies), "a reply that the log tells of after the step")
        missing = self.step(step, [said for _, said, _ in replies])
        measured = [said for _, said, _ in evaluations]
        self.metrics(record, measured, [said for _, said, _ in deciding.values()], step.result_model)
        self.model, self.previous, self.state = step.result_model, name_of(record.step), state
        return missing

    def measured(self, record: Any, replies: list[Any], crowd: int, model: str, subject: str) -> list[str]:
        """A round that measures a model and makes no step. The sums of a private one: `independent_evaluation`."""
        must(not record.state_after and record.attempt == 0, "a state, or a second attempt, without a step")
        must(crowd >= self.file.run.get("selection", {}).get("minimum", 1), "the number of clients that were asked")
        if self.private:
            kinds = [phase.kind for phase in record.phases]
            must(
                kinds == [f"secure-{name}" for name in independent_sums.STAGES], "the phases of one private measurement"
            )
            if self.describes:
                return self.described_privately(record, replies, subject)
            self.log.find("round.measured", subject, model, by="coordinator")
            return []
        must(1 <= len(record.phases) <= 2, "one question to each member, and one more to those that were away")
        must(len({said.client_id for _, said, _ in replies}) == len(replies), "two replies of one member")
        if self.describes:
            return self.described(record, replies, subject)
        self.log.find("round.measured", subject, model, by="coordinator")
        self.metrics(record, [said for _, said, _ in replies], [], model)
        return []

    def result(self, record: Any, subject: str) -> tuple[Any, int]:
        """The signed result of a round that describes data, and the number of its entry in the log."""
        sent = {"bytes/up": self.sent[0], "bytes/refused": self.sent[1]}
        must({name: record.metrics.get(name) for name in sent} == sent, "the bytes of the replies")
        must({*record.metrics} == {*sent, "bytes/down"}, "the metrics")
        result = opened(record.result, "ResultManifest", self.keys["coordinator"], "the result")
        at = self.log.find("round.described", subject, name_of(record.result), by="coordinator")
        self.same(result, "the result", **self.facts, round=record.number, spec=blake(self.file.spec))
        must((result.document, result.document_bytes) == (blake(record.document), len(record.document)), "the document")
        return result, at

    def described_privately(self, record: Any, replies: list[Any], subject: str) -> list[str]:
        """As `described`: the document follows from the sum of a session."""
        result, _ = self.result(record, subject)
        must(not any(order.previous_step for order in self.orders.values()), "an order that names a step")
        answers = [self.file.answer(digest, said, self.orders[said.assignment_id]) for digest, said, _ in replies]
        try:
            found = independent_sums.unmasked(answers, "<u8", lambda count: 1)
            self.terms(found, record.number)
            made = independent_statistics.private_document(self.file.run, found.total.tolist(), found.members)
        except LookupError:
            return ["the result: a blob is missing"]
        except (independent_sums.NoSum, independent_statistics.NoData) as error:
            raise Wrong(f"no result follows: {error}") from error
        must(list(result.replies) == found.replies and not result.left_out, "the replies that the result names")
        must(made == record.document, "the document that follows from the sum")
        return []

    def terms(self, found: independent_sums.Sum, number: int) -> None:
        """The terms of a session that describes data."""
        run, terms = self.file.run, parsed(secure_pb2.SecureTerms, found.terms)
        self.same(terms, "the terms", **self.facts, round=number, spec=blake(self.file.spec), base_model=self.model)
        self.same(terms, "the terms", mode=run["privacy"]["secure"], task=run["task"], seed=run.get("seed", 0))
        self.same(terms, "the terms", clip=0.0, blur=0.0, length=len(found.total))
        must(len(terms.nonce) == 16 and not terms.disclose, "the nonce, or numbers that are disclosed")
        must(terms.unshared == common_pb2.UnsharedParameters(), "what the terms leave out")
        must(terms.WhichOneof("work") == "statistics", "the work of the session")
        self.columns(terms.statistics)
        must({*found.ready} <= {one.client_id for one in terms.invited}, "the members that are invited")

    def described(self, record: Any, replies: list[Any], subject: str) -> list[str]:
        """A round that describes data: its signed result, and the document, which follows from the replies."""
        result, at = self.result(record, subject)
        by_name = {said.client_id: (digest, said, told) for digest, said, told in replies}
        names = {digest: name for name, (digest, _, _) in by_name.items()}
        must(len({*result.replies}) == len(result.replies) and {*result.replies} <= names.keys(), "the named replies")
        used, left_out = [names[digest] for digest in result.replies], list(result.left_out)
        must({*left_out} <= by_name.keys() - {*used}, "a client that is left out")
        revoked = {
            entry.subject
            for entry in self.log.entries
            if entry.action == "client.revoked" and entry.subject in by_name
            if by_name[entry.subject][2] < entry.number < at
        }
        must(by_name.keys() - {*used, *left_out} <= revoked, "a reply that the result leaves out")
        payloads = {name: self.file.blob(by_name[name][1].payload) for name in (*used, *left_out)}
        there = {name: data for name, data in payloads.items() if data is not None}
        if len(there) < len(payloads):
            return ["the result: a blob is missing"]
        try:
            made = independent_statistics.document(self.file.run, there)
        except independent_statistics.NoData as error:
            raise Wrong(f"no result follows: {error}") from error
        must(made == (record.document, used, left_out), "the document that follows from the replies")
        return []

    def phase(self, record: Any, phase: Any) -> None:
        """Who was asked in a phase, and for which evaluation."""
        selection, evaluate = self.file.run.get("selection", {}), self.file.run.get("evaluate", {})
        for order in self.asked:
            must(order.client_id not in selection.get("exclude", ()), f"{order.client_id} is excluded")
            must(order.client_id in selection.get("members", [order.client_id]), f"{order.client_id} is no member")
            if phase.decides or (self.private and self.models):
                continue
            if self.describes:
                self.describing(phase, order)
                continue
            work = parsed(common_pb2.EvaluateWork, order.work)
            splits = evaluate.get("splits", ["train", "validation", "test"])
            must(phase.kind == "evaluate" and list(work.splits) == splits, "the work of an evaluation")
            must(
                not order.inputs and order.previous_step == ("" if self.models else name_of(record.step)),
                "another step",
            )

    def describing(self, phase: Any, order: Any) -> None:
        """The work of an assignment that describes data: the columns of the specification, on its splits."""
        must(phase.kind == "statistics" and not order.inputs and not order.previous_step, "an order to describe data")
        wanted = self.columns(parsed(common_pb2.StatisticsWork, order.work))
        size = 8 * (1 + sum(4 + 6 * (not one.classes) + one.counts for one in wanted))
        must([(row.name, row.dtype, row.length) for row in order.rows] == [("statistics", "U8", size)], "the rows")
        header = b'{"statistics":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
        must(order.max_payload_bytes == 8 + -len(header) % 8 + len(header) + size, "the size of a payload")

    def columns(self, work: Any) -> list[independent_statistics.Asked]:
        """The columns of a work that describes data, which are those of the specification."""
        run = self.file.run
        columns = [
            (one.name, (one.low, one.high) if one.HasField("low") and one.HasField("high") else None, one.classes)
            for one in work.columns
        ]
        must(all(one.HasField("low") == one.HasField("high") for one in work.columns), "half of a range")
        wanted = independent_statistics.asked(run)
        must(columns == [(one.name, one.ends, one.classes) for one in wanted], "the columns")
        must(
            (work.bins, list(work.splits)) == (independent_statistics.bins(run), independent_statistics.splits(run)),
            "the splits",
        )
        return wanted

    def step(self, step: Any, replies: list[Any]) -> list[str]:
        """Coefficients, K and the model; what could not be verified."""
        missing, c = [], np.array(step.coefficients)
        run, server = self.file.run, self.file.run.get("server", {})
        rows = [row for said in replies for row in said.rows if row.name != "buffers"]
        must(len(c) == len(rows), "the number of coefficients")
        if run["algorithm"]["name"] == "fedavg":
            must(
                [said.client_id for said in replies] == sorted(said.client_id for said in replies), "the order of rows"
            )
            samples = np.array([said.samples for said in replies], float)
            weights = samples if run["algorithm"].get("prior") == "samples" else np.ones(len(c))
            must(np.allclose(c, weights / weights.sum(), rtol=1e-9, atol=0), "the coefficients")
        else:
            missing.append("the coefficients: the algorithm is not known here")
        if not server.get("decay"):
            must(step.rate == server.get("learning_rate", 1.0), "the rate")
        payloads, gram = [self.file.rows(said.payload) for said in replies], self.file.blob(step.gram)
        base, result = self.file.rows(step.base_model), self.file.rows(step.result_model)
        if gram is None or base is None or result is None or any(payload is None for payload in payloads):
            return [*missing, "K and the model: a blob is missing"]
        U = np.array([row for payload in payloads for row in payload or ()])
        K, lengths = np.load(io.BytesIO(gram), allow_pickle=False), np.linalg.norm(U, axis=1)
        some = drawn_rows(run, step, len(U)) or [*range(len(U))]
        if step.gram_rows:
            must(np.allclose(np.array(step.squared_norms), lengths**2, rtol=1e-10, atol=0), "the squared lengths")
        near = 1e-10 * np.outer(lengths[some], lengths[some])
        must(K.shape == (len(some), len(some)) and (abs(K - U[some] @ U[some].T) <= near).all(), "K")
        if server.get("optimizer", "sgd") != "sgd" or self.parameters.keys() - {"fixed", "statistics"}:
            return [*missing, "the model: the optimiser is not known here"]
        old, new = ({**(self.file.tensors(name) or {})} for name in (step.base_model, step.result_model))
        must([*old] == [*new], "the tensors of the model")
        for name in self.fixed(old):
            must(np.array_equal(old.pop(name), new.pop(name)), f"the fixed tensors: {name}")
        before, after = (np.concatenate([*tensors.values()]) for tensors in (old, new))
        value = before - step.rate * (c @ U)
        error = 1e-12 * (abs(before) + abs(step.rate) * (abs(c) @ abs(U)))
        low, high = ((value + sign * error).astype(np.float32) for sign in (-1, 1))
        must(((low <= after) & (after <= high)).all(), "the model")
        return missing

    def fixed(self, names: Iterable[str]) -> list[str]:
        """The names of the fixed tensors of a model: those that a pattern matches, the last ones."""
        patterns = [re.escape(one).replace(r"\*", ".*") for one in self.parameters.get("fixed", ())]
        are = [(name, any(re.fullmatch(one, name) for one in patterns)) for name in names]
        must([is_fixed for _, is_fixed in are] == sorted(is_fixed for _, is_fixed in are), "the order of fixed tensors")
        return [name for name, is_fixed in are if is_fixed]

    def filled(self) -> list[str]:
        """The statistics that the model is filled from; returns what could not be verified."""
        name, told = self.parameters.get("statistics", ""), self.file.filled
        must(bool(name) == (told is not None), "statistics of which the specification does not tell, or none")
        if told is None:
            return []
        must(name_of(told.result) == name, "the result that the specification names")
        result = opened(told.result, "ResultManifest", self.keys["coordinator"], "the result of statistics")
        self.same(result, "the result of statistics", federation_id=self.facts["federation_id"])
        must((result.document, result.document_bytes) == (blake(told.document), len(told.document)), "its document")
        missing = []
        for digest in self.models or [self.model]:
            model = self.file.tensors(digest)
            if model is None:
                missing.append(f"the scale of {digest}: a blob is missing")
                continue
            fixed = self.fixed(model)
            layers = [one.removesuffix(".mean") for one in fixed if one.endswith(".mean")]
            layers = [layer for layer in layers if f"{layer}.deviation" in fixed]
            must(len(layers) == 1, "the layer that is filled")
            names = [f"{layers[0]}.{one}" for one in ("mean", "deviation")]
            try:
                scale = independent_statistics.scale(told.document, len(model[names[0]]))
            except independent_statistics.NoData as error:
                raise Wrong(f"no scale follows: {error}") from error
            for one, numbers in zip(names, scale, strict=True):
                must(np.array_equal(model[one], np.array(numbers, np.float32)), f"{one} of the model")
        return missing

    def metrics(self, record: Any, evaluations: list[Any], before: list[Any], model: str) -> None:
        """Those of the model: of accuracies (means, worst, worst 5 %), of losses, and the share that improved."""
        must(all(said.base_model == model for said in evaluations), "an evaluation of another model")
        numbers = [
            value for said in (*evaluations, *before) for value in (*said.metrics.values(), *said.losses.values())
        ]
        must(np.isfinite(numbers).all(), "a reply with a number that is not finite was accepted")
        expected: dict[str, float] = {"evaluated": len(evaluations)} if evaluations else {}
        for split in ("train", "validation", "test"):  # the last one counts
            losses = [said.metrics[f"{split}/loss"] for said in evaluations if f"{split}/loss" in said.metrics]
            if losses:
                expected[f"loss/{split}"] = np.mean(losses)
            told = sorted(said.metrics.get(f"{split}/accuracy", -1.0) for said in evaluations)
            shares = [share for share in told if 0 <= share <= 1]
            if shares:
                lowest = shares[: max(1, len(shares) // 20)]
                expected |= {"accuracy/mean": np.mean(shares), "accuracy/worst": shares[0]}
                expected["accuracy/worst5"] = np.mean(lowest)
        old = {said.client_id: said.metrics["train/loss"] for said in before if "train/loss" in said.metrics}
        measured = [
            said for said in evaluations if "train/loss" in said.metrics or said.metrics.get("train/samples", 0)
        ]
        new = {said.client_id: said.metrics.get("train/loss", np.inf) for said in measured}
        both = [name for name in old if name in new]
        if both:
            expected["improved"] = np.mean([new[name] <= old[name] for name in both])
        for name, value in expected.items():
            recorded = record.metrics.get(name, np.nan)
            must(np.isclose(recorded, value, rtol=1e-9, atol=1e-12), f"{name} is {recorded}, not {value}")
        for name in record.metrics:
            ours = name.startswith("loss/") and name.count("/") == 1 and name not in ("loss/worst", "loss/jain")
            ours |= name in ("accuracy/mean", "accuracy/worst", "accuracy/worst5", "improved", "evaluated")
            must(not ours or name in expected, f"{name} is on record, and nothing gives it")


def step_of(record: Any) -> Any:
    return common_pb2.StepManifest.FromString(record.step.manifest)


def verify(path: Path, fingerprint: str = "") -> Found:
    """Verifies a bundle. Raises Wrong."""
    file = File(path)
    keys = read_keys(file, fingerprint)
    log = Log(file, keys)
    run, found = Run(file, keys, log), Found(rounds=len(file.rounds), models=[file.about.initial_model])
    found.missing += run.filled()
    for number, record in enumerate(file.rounds):
        found.missing += [f"round {number}: {why}" for why in run.round(record, number)]
        found.models.append(run.model)
    must(file.about.model == run.model, "the newest model")
    rounds = len(run.models) if run.models else file.run["rounds"]
    must(len(file.rounds) <= rounds, "more rounds than the specification has")
    ended = file.about.state != "COMPLETED" or file.run.get("stop") or len(file.rounds) == rounds
    must(ended, "rounds are missing")
    grams = {step_of(record).gram for record in file.rounds if record.HasField("step")}
    for name in file.entries:
        digest = name.removeprefix("blobs/").replace("-", ":", 1)
        wanted = {file.about.initial_model, *(run.models or ()), *file.named} if file.about.payloads else grams
        must(not name.startswith("blobs/") or digest in wanted, f"the blob {digest}")
        must(not name.startswith("blobs/") or file.blob(digest) is not None, "a blob")
    log.withdrawals(keys)
    found.record = log.end()
    return found
