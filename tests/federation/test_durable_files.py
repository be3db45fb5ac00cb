"""What is said to be on the disk is there after a loss of power: each user syncs the directory, too."""

import ast
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.audit import checkpoints
from coordinator.backups.making import back_up
from coordinator.home import CoordinatorHome
from federation.monitoring.events import Events
from federation.training.own import KeptState
from federation.trust.keys import replace_private, replace_together, write_private
from federation.trust.member_files import save_renewal
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.vectors import update_layout
from fedpareto.cli.whole_file import whole_file
from storage.blob_directory import DirectoryStore
from tests.federation.trust.scene import NOW
from tests.paths import ROOT
from tests.power_cut import power_cut
from tests.running import made_home
from tests.scripted import scripted
from worker import rotation
from worker.connection.enroll import enroll
from worker.home import WorkerHome
from worker.ledgers.privacy_ledger import Ledger
from worker.site.refused_orders import RefusedOrders
from worker.state_file import StateFile
from worker.work.spool import Spool

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def _enrolled(at: Path) -> None:
    with scripted() as coordinator:
        enroll(WorkerHome(at / "deep" / "member"), coordinator.join())


def _renewed(at: Path) -> None:
    with scripted() as coordinator:
        member = coordinator.member()
    member.save(at / "member")
    save_renewal(at / "member", member.tls_key, member.certificate)
    rotation._begin(WorkerHome(at / "member"), member, None, NOW)


def _federation(at: Path) -> CoordinatorHome:
    home = made_home(at / "deep" / "fed", now=NOW)
    home.note_ports(1, 2)
    checkpoints.note(home.directory, b"checkpoint")
    return home


def _backed_up(at: Path) -> None:
    back_up(_federation(at), at / "backup", now=NOW, progress=lambda *_: None)


def _worked(at: Path) -> None:
    events, home = Events(), WorkerHome(at)
    with closing(Ledger(home.privacy)):
        pass
    spool = Spool(home, KEY, events)
    layout, rows = update_layout([("loss", 2)]), {"loss": np.ones(2, dtype=np.float32)}
    spool.add(ReplyManifest(assignment_id="a"), layout, rows, SignedEnvelope(), state=b"state")
    [entry] = spool.entries()
    spool.record(entry, SignedEnvelope(), ReceiptManifest())
    KeptState(home.kept / "run").keep(0, b"state")
    StateFile(home.progress, "the time", events).write({})
    RefusedOrders(home.evidence, events).alert(
        SignedEnvelope(manifest=AssignmentManifest(run_id="r").SerializeToString()), "cover", "message"
    )


def _blob(at: Path) -> None:
    DirectoryStore(at / "blobs").put(b"content")


def _file(at: Path) -> None:
    with whole_file(at / "run.fedpareto") as file:
        file.write(b"bundle")


USERS: list[Callable[[Path], object]] = [
    lambda at: write_private(at / "key", b"key"),
    lambda at: replace_private(at / "key", b"key"),
    lambda at: replace_together(at, {"a": "1", "b": "2"}),
    _enrolled,
    _renewed,
    _federation,
    _backed_up,
    _worked,
    _blob,
    _file,
]
NAMES = [
    "a new file", "a replaced file", "several files", "enrollment", "renewal and rotation", "coordinator init",
    "backup", "work", "blob", "export",
]  # fmt: skip
# Files that may be lost: they are made again, or hold nothing.
MAY_BE_LOST = ("worker.lock", "lock", ".lock", "handed-in", "tmp", "partial", "coordinator.db", "database-", "cache")


@pytest.mark.parametrize("user", USERS, ids=NAMES)
def test_nothing_that_a_user_has_written_is_lost_with_the_power(tmp_path: Path, user: Callable[[Path], object]) -> None:
    with power_cut() as cut:
        user(tmp_path)
        lost = [name for name in cut.lost(tmp_path) if not name.rpartition("/")[2].startswith(MAY_BE_LOST)]
    assert lost == []


# Renames outside of `rename_durably`, and why they need not be durable at once.
RENAMED = {
    "federation/durable_files.py": "it is the helper",
    "storage/blob_directory.py": "it syncs the directory if the store is durable",
    "coordinator/backups/restoring.py": "the old database goes aside, before the durable rename of the new one",
    "worker/work/cache.py": "the models are fetched again",
    "worker/work/accomplices.py": "of a rehearsal",
    "worker/work/spool.py": "it syncs the directory once for all files of a reply",
    "federation/training/own.py": "of a simulation, which is not durable",
    "fedpareto/experiments/result_store.py": "runs of an experiment can be made again",
}


def test_files_are_renamed_by_the_durable_helper() -> None:
    sources = {path: path.read_text() for path in _product()}
    suspects = {path: text for path, text in sources.items() if "rename" in text or "replace" in text}
    renaming = {str(path.relative_to(ROOT)) for path, text in suspects.items() if any(_renames(ast.parse(text)))}
    assert renaming == RENAMED.keys()


def _product() -> Iterator[Path]:
    for package in ("coordinator", "federation", "fedpareto", "storage", "worker"):
        yield from (ROOT / package).rglob("*.py")


def _renames(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls of rename, and of replace as of a path: texts take two arguments there, and times none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            of_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            if node.func.attr == "rename" or of_path or (owner, node.func.attr) == ("os", "replace"):
                yield node
