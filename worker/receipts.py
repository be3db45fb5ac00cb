"""The receipts of a member: the coordinator's signed assignments and answers, one JSON object a line.

Two members compare them to find out if the coordinator told both the same.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from federation.durable_files import sync_directory
from federation.errors import Error
from federation.record import bound_fields
from federation.record.bound_fields import difference, repeated
from federation.refusals import Refusal
from federation.text_files import read_text
from federation.trust.envelope import envelope_digest, from_text, to_text
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope

Occasion = tuple[str, int, int]
"""A run's id, the round and the phase."""


class ReceiptsError(Error, ValueError):
    """A file of receipts that cannot be read; the message names the line."""


@dataclass(frozen=True)
class Receipt:
    """One line, with the coordinator's signatures verified. An occasion is a run, round and phase.

    `base_model` is the digest of the model that the work started from, and `previous_step` that of the signed step
    which made it; empty before the run's first step. `asked` is when the assignment was made, in ISO 8601. `reason`
    says why a reply does not count. `assignment`, `reply` and `receipt` are the digests of the envelopes;
    `payload_bytes` is what the member sent, and nobody signed it.
    """

    client_id: str
    occasion: Occasion
    assignment_id: str
    base_model: str
    base_model_bytes: int
    previous_step: str
    spec: str
    asked: str
    accepted: bool
    reason: str
    task: str
    kind: str
    payload_bytes: int
    assignment: str
    reply: str
    receipt: str


def receipt_line(
    reply: SignedEnvelope, assignment: SignedEnvelope, receipt: SignedEnvelope, manifest: ReceiptManifest
) -> str:
    """The line that records a receipt for a reply; the assignment names the step that the work builds on."""
    line = {
        **repeated(manifest, (*bound_fields.RECEIPT, "accepted", "reason")),
        "created": _when(manifest),
        "previous_step": AssignmentManifest.FromString(assignment.manifest).previous_step,
        "envelope": envelope_digest(reply),
        "payload_bytes": ReplyManifest.FromString(reply.manifest).payload_bytes,
        "assignment": to_text(assignment),
        "receipt": to_text(receipt),
    }
    return json.dumps(line) + "\n"


def stands(path: Path, line: str) -> bool:
    """True if a file has this line. Raises OSError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return line.encode() in file
    except FileNotFoundError:
        return False


def append(path: Path, text: str) -> None:
    """Appends whole lines durably, or nothing, after completing a last line that was cut short. Raises OSError."""
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        cut_short = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        try:
            data = b"\n" * cut_short + text.encode()
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
            if not end:  # the file may be new
                sync_directory(path.parent)
        except OSError:
            file.truncate(end)
            raise


def receipt_lines(path: Path) -> list[str]:
    """The lines of a `receipts.jsonl` as they are now. Raises ReceiptsError if the file cannot be read."""
    try:
        return read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ReceiptsError(f"{path} cannot be read: {error}") from None


def read_receipts(path: Path, coordinator: KeyChain) -> list[Receipt]:
    """The receipts in a `receipts.jsonl`. Raises ReceiptsError, also if the file cannot be read."""
    return verified_receipts(receipt_lines(path), path, coordinator)


def verified_receipts(lines: Sequence[str], path: Path, coordinator: KeyChain, *, about: str = "") -> list[Receipt]:
    """Verifies that a key of the `coordinator` signed every assignment and receipt in lines of the file `path`.

    A line that stands there twice is one receipt. With `about`, lines that do not have this text are left out.

    Raises:
        ReceiptsError: a line is damaged or not signed by its key of that time.
    """
    receipts: dict[tuple[str, str], Receipt] = {}
    for number, line in enumerate(lines, 1):
        if about not in line:
            continue
        try:
            receipt = _verified(json.loads(line), coordinator)
        except (KeyError, TypeError, ValueError, DecodeError, Refusal, RecursionError) as error:
            hint = "; a loss of power can cut a line short: delete it then" if number == len(lines) else ""
            raise ReceiptsError(f"{path}, line {number} proves nothing: {error}{hint}") from None
        receipts.setdefault((receipt.assignment, receipt.receipt), receipt)
    return list(receipts.values())


def disagreements(ours: Iterable[Receipt], theirs: Iterable[Receipt]) -> list[tuple[Receipt, Receipt]]:
    """The pairs of receipts, ours and theirs, in which two members got different models or steps on one occasion.

    If there are several for one occasion, after a restored backup, the last receipt of each member counts.
    """
    mine, others = ({receipt.occasion: receipt for receipt in receipts} for receipts in (ours, theirs))
    return [
        (mine[occasion], others[occasion])
        for occasion in sorted(mine.keys() & others.keys())
        if (mine[occasion].base_model, mine[occasion].previous_step)
        != (others[occasion].base_model, others[occasion].previous_step)
    ]


def _verified(line: Mapping[str, Any], coordinator: KeyChain) -> Receipt:
    assignment = coordinator.verify(from_text(line["assignment"]), AssignmentManifest)
    receipt = coordinator.verify(from_text(line["receipt"]), ReceiptManifest)
    if field := difference(assignment, receipt, bound_fields.PLACE):
        raise ValueError(f"its assignment and its receipt differ in {field}")
    return Receipt(
        client_id=receipt.client_id,
        occasion=(receipt.run_id, receipt.round, receipt.phase),
        assignment_id=receipt.assignment_id,
        base_model=receipt.base_model,
        base_model_bytes=assignment.base_model_bytes,
        previous_step=assignment.previous_step,
        spec=assignment.spec,
        asked=_when(assignment),
        accepted=receipt.accepted,
        reason=receipt.reason,
        task=assignment.task,
        kind=assignment.kind,
        payload_bytes=int(line["payload_bytes"]),
        assignment=envelope_digest(from_text(line["assignment"])),
        reply=receipt.envelope,
        receipt=envelope_digest(from_text(line["receipt"])),
    )


def _when(manifest: AssignmentManifest | ReceiptManifest) -> str:
    try:
        return str(manifest.created.ToJsonString())
    except ValueError:  # a time that does not exist; the signed bytes have it
        return ""
