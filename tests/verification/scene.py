"""Bundles that somebody has edited, with or without the keys of those who signed; and what a verifier says of them."""

import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from google.protobuf.message import Message
from typer.testing import CliRunner

from federation.record import bundle
from federation.record.bundle import BundleError, BundleReader
from federation.record.log_entries import EPOCH, LogEntry
from federation.record.merkle import root_from
from federation.trust.envelope import sign
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import CheckpointManifest, SignedEnvelope
from federation.v1.record_pb2 import Bundle, LoggedEntry, LogRecord, RoundRecord
from fedpareto.cli.main import app
from tests.stage import MODEL, Stage
from verification.errors import Verified, Wrong
from verification.run import verify

MOST = 96 << 20  # bytes of memory beyond what the process had before


@dataclass(frozen=True)
class Edited:
    """The entries of a bundle, to be changed and written again."""

    entries: dict[str, bytes]

    @classmethod
    def of(cls, path: Path) -> "Edited":
        with zipfile.ZipFile(path) as archive:
            return cls({name: archive.read(name) for name in archive.namelist()})

    def write(self, path: Path) -> Path:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in self.entries.items():
                archive.writestr(name, data)
        return path

    def having(self, changes: dict[str, bytes | None]) -> "Edited":
        entries = {**self.entries, **changes}
        return Edited({name: data for name, data in entries.items() if data is not None})

    @property
    def about(self) -> Bundle:
        return json_format.Parse(self.entries[bundle.MANIFEST], Bundle())

    def telling(self, change: Callable[[Bundle], object]) -> "Edited":
        about = self.about
        change(about)
        return self.having({bundle.MANIFEST: json_format.MessageToJson(about).encode()})

    def round(self, number: int) -> RoundRecord:
        return RoundRecord.FromString(self.entries[bundle.round_entry(number)])

    def with_round(self, number: int, change: Callable[[RoundRecord], object]) -> "Edited":
        record = self.round(number)
        change(record)
        return self.having({bundle.round_entry(number): record.SerializeToString()})

    @property
    def log(self) -> LogRecord:
        return LogRecord.FromString(self.entries[bundle.LOG])

    def with_log(self, change: Callable[[LogRecord], object]) -> "Edited":
        record = self.log
        change(record)
        return self.having({bundle.LOG: record.SerializeToString()})

    @property
    def blobs(self) -> list[str]:
        return [name for name in self.entries if name.startswith("blobs/")]


def checked(edited: Edited, path: Path) -> list[Verified]:
    """What is verified of the rounds of a bundle, which is written into a directory."""
    with BundleReader(edited.write(path / "edited")) as reader:
        return list(verify(reader))


def refusal(edited: Edited, path: Path) -> str:
    """Why a bundle does not verify. A bundle of which something is absent does not count as refused."""
    with pytest.raises((Wrong, BundleError)) as raised:
        checked(edited, path)
    return str(raised.value)


def command(*arguments: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it says."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    return done.exit_code, done.output + str(done.exception or "")


def peak() -> int:
    """The largest resident memory of this process since `forget_peak`, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def forget_peak() -> int:
    """Begins to measure the peak anew; returns the present memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


Kind = TypeVar("Kind", bound=Message)


def signed_again(
    envelope: SignedEnvelope, kind: type[Kind], key: Ed25519PrivateKey, change: Callable[[Kind], object]
) -> None:
    """Changes a manifest inside its envelope, and signs it with the key."""
    manifest = kind.FromString(envelope.manifest)
    change(manifest)
    envelope.CopyFrom(sign(manifest, key))


def log_signed_again(record: LogRecord, key: Ed25519PrivateKey, *, keep_roots: bool = False) -> None:
    """Signs the checkpoints again, over leaves and roots that are computed anew as far as they follow."""
    nodes = {(node.start, node.stop): node.hash for node in record.nodes}
    for entry in record.entries:
        entry.previous = nodes.get((entry.number - 1, entry.number), entry.previous)
        with suppress(OverflowError):
            nodes[entry.number, entry.number + 1] = leaf(entry)
    for checkpoint in record.checkpoints:
        manifest = CheckpointManifest.FromString(checkpoint.manifest)
        if not keep_roots:
            with suppress(LookupError):
                manifest.root = root_from(nodes, 0, manifest.size)
        checkpoint.CopyFrom(sign(manifest, key))


def leaf(entry: LoggedEntry) -> bytes:
    """The leaf of an entry in the log's tree."""
    texts = {name: getattr(entry, name) for name in ("actor", "action", "subject", "outcome", "detail", "digest")}
    at = EPOCH + timedelta(microseconds=entry.at)
    told = LogEntry(number=entry.number, entry_id=entry.entry_id, at=at, times=entry.times, **texts)
    return told.leaf(entry.previous)


NAMES = ("ann", "ben", "cleo", "dan", "eve")


def played(stage: Stage, algorithm: str, more: str, rounds: int = 3, model: bytes = MODEL) -> str:
    """A run that has ended."""
    more, samples = f"selection.minimum = {len(NAMES)}\n{more}", (10, 20, 30, 40, 50)
    run, players = stage.begin(*NAMES, rounds=rounds, samples=samples, algorithm=algorithm, more=more, model=model)
    for place, player in enumerate(players):
        player.losses.update({"loss": 1.0 + place / 7})
    stage.complete(run, *players)
    return run


def exported(stage: Stage, run: str, path: Path, *, payloads: bool = True) -> Path:
    """The bundle of a run, as an administrator gets it."""
    request = admin.ExportBundleRequest(run=run, payloads=payloads)
    pieces = list(stage._admin.ExportBundle(request, timeout=120))
    assert [piece.end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    path.write_bytes(b"".join(piece.chunk for piece in pieces))
    return path


def verified(stage: Stage, run: str, path: Path) -> list[Verified]:
    """What was verified of each round; everything was."""
    with BundleReader(exported(stage, run, path / "run.fedpareto")) as bundle:
        found = list(verify(bundle))
    assert [(*one.missing, *one.absent) for one in found] == [()] * len(found)
    return found
