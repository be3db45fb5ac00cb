"""Joining, what a worker keeps on its disk, and workers of a federation as shipped."""

import os
import queue
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.transport.chunks import Chunk, read_submitted
from federation.trust.envelope import sign, verify
from federation.trust.keys import IdentityError
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, SignedEnvelope
from federation.v1.federation_pb2 import Window
from federation.vectors import read_vector, update_layout
from tests.harness import federation
from tests.scripted import CLIENT, files_in, scripted
from tests.worker.scene import Scene
from worker.connection.backoff import Backoff
from worker.connection.enroll import EnrollmentError, enroll
from worker.home import WorkerHome, WorkerHomeError
from worker.state_file import read_state
from worker.work.cache import ModelCache, ModelMismatch
from worker.work.spool import Spool, SpoolEntry, SpoolError
from worker.work.submitter import _requests

# Joining


def test_joining_makes_a_private_directory_that_a_worker_can_run_from(scene: Scene, tmp_path: Path) -> None:
    home = WorkerHome(tmp_path / "deep" / "member")
    enrolled = enroll(home, scene.coordinator.join(), passphrase=b"secret")
    assert files_in(home.directory.parent) == ["member"]
    for name in ("tls.key", "signing.key"):
        path = home.directory / name
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"ENCRYPTED" in path.read_bytes()
    loaded = MemberFiles.load(home.directory, b"secret")
    assert loaded.certificate == enrolled.member.certificate
    assert loaded.client_id == CLIENT
    with pytest.raises(IdentityError, match="passphrase"):
        MemberFiles.load(home.directory, b"wrong")
    with pytest.raises(EnrollmentError, match="holds a membership already"):
        enroll(home, scene.coordinator.join())


@pytest.mark.parametrize("reason", ["join-string-invalid", "join-string-expired", "join-string-used"])
def test_a_refused_join_string_is_explained_and_leaves_nothing_behind(
    scene: Scene, tmp_path: Path, reason: str
) -> None:
    scene.coordinator.enrollment_refusal = Refusal(reason, "no")
    with pytest.raises(EnrollmentError, match=f"{reason}: .*new one"):
        enroll(WorkerHome(tmp_path / "member"), scene.coordinator.join())
    assert files_in(tmp_path) == []


def test_a_coordinator_with_another_ca_never_sees_the_secret(scene: Scene, tmp_path: Path) -> None:
    with scripted() as impostor:
        join = scene.coordinator.join()
        diverted = type(join)(impostor.join().addresses, join.ca_fingerprint, join.secret, join.client_id)
        impostor.enrollment_refusal = Refusal("join-string-invalid", "seen")
        with pytest.raises(EnrollmentError, match="fingerprint"):
            enroll(WorkerHome(tmp_path / "member"), diverted)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("field", "value"), [("client_id", "hospital-b"), ("federation_id", "another"), ("coordinator_key", b"short")]
)
def test_an_enrollment_that_is_not_what_was_promised_is_refused(
    scene: Scene, tmp_path: Path, field: str, value: Any
) -> None:
    scene.coordinator.change_enrollment = lambda response: setattr(response, field, value)
    with pytest.raises(EnrollmentError, match="not what the join string"):
        enroll(WorkerHome(tmp_path / "member"), scene.coordinator.join())
    assert files_in(tmp_path) == []


def test_joining_does_not_touch_a_directory_that_holds_something_else(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(EnrollmentError, match="not empty"):
        enroll(WorkerHome(tmp_path), scene.coordinator.join())
    assert files_in(tmp_path) == ["diary.txt"]


def test_nobody_at_the_address_is_said_so(scene: Scene, tmp_path: Path) -> None:
    scene.coordinator.stop()
    with pytest.raises(EnrollmentError, match="no coordinator answers at 127"):
        enroll(WorkerHome(tmp_path / "member"), scene.coordinator.join())
    assert files_in(tmp_path) == []


# Parts


KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
ASSIGNMENT = sign(AssignmentManifest(previous_step="blake3:1"), KEY)


def _reply(name: str, payload: str = "", size: int = 0) -> ReplyManifest:
    return ReplyManifest(assignment_id=name, payload=payload, payload_bytes=size)


def test_a_small_window_takes_four_chunks_and_a_large_one_chunks_that_grow_and_none_goes_beyond_it() -> None:
    payload, windows = bytes(4 << 20), queue.SimpleQueue[Window | None]()
    entry = SpoolEntry(SignedEnvelope(), _reply("a", "blake3:", len(payload)), ASSIGNMENT, payload)
    windows.put(Window(offset=0, limit=1 << 20))
    windows.put(Window(offset=1 << 19, limit=(5 << 20) // 2))
    windows.put(Window(offset=2 << 20, limit=8 << 20))
    _, *chunks = map(read_submitted, _requests(entry, windows, 0, b""))
    sizes = [len(chunk.data) for chunk in chunks if isinstance(chunk, Chunk)]
    assert sizes == [1 << 18] * 4 + [1 << 19] * 3 + [1 << 20, 1 << 19]


def test_the_spool_holds_what_was_added_and_nothing_half_made(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    spool = Spool(WorkerHome(tmp_path), KEY, Events())
    layout = update_layout([("loss", 5)])
    vector = np.arange(5, dtype=np.float32)
    spool.add(_reply("../a"), layout, {"loss": vector}, ASSIGNMENT)
    spool.add(_reply("b"), None, {}, ASSIGNMENT)
    spool.add(_reply("unwanted"), layout, {"loss": vector}, ASSIGNMENT, lambda: False)
    assert len(files_in(directory)) == 5
    # A process that dies at the worst moments leaves these.
    (directory / "half.envelope.tmp").write_bytes(b"half an envelope")
    (directory / "orphan.payload").write_bytes(b"no envelope")
    (directory / "lonely.envelope").write_bytes(sign(_reply("d", digest(b"no payload"), 10), KEY).SerializeToString())
    (directory / "lonely.assignment").write_bytes(ASSIGNMENT.SerializeToString())
    (directory / "unasked.envelope").write_bytes(sign(_reply("e"), KEY).SerializeToString())

    again = Spool(WorkerHome(tmp_path), KEY, Events())
    assert [entry.assignment_id for entry in again.entries()] == ["../a", "b"]
    first = again.entries()[0]
    assert (first.envelope, first.assignment) == (spool.entries()[0].envelope, ASSIGNMENT)
    assert verify(first.envelope, ReplyManifest, KEY.public_key()) == first.manifest
    assert isinstance(first.payload, Path)
    assert digest(first.payload.read_bytes()) == first.manifest.payload
    np.testing.assert_array_equal(read_vector(first.payload)[1], vector)
    assert len(files_in(directory)) == 5
    again.settle(first)
    assert len(files_in(directory)) == 2
    assert again.renew("../a")
    assert len(files_in(directory)) == 5
    assert not again.renew("b")
    again.remove("../a")
    again.remove("b")
    assert not again.renew("../a")
    assert files_in(directory) == []


def test_a_settled_reply_whose_payload_somebody_has_deleted_is_no_longer_available(tmp_path: Path) -> None:
    home = WorkerHome(tmp_path)
    spool = Spool(home, KEY, Events())
    spool.add(_reply("a"), update_layout([("loss", 2)]), {"loss": np.ones(2, dtype=np.float32)}, ASSIGNMENT)
    spool.settle(spool.entries()[0])
    shutil.rmtree(home.handed_in)
    assert not spool.renew("a")
    assert spool.entries() == []


def test_a_reply_whose_files_cannot_be_removed_has_left_the_spool_until_the_next_start(tmp_path: Path) -> None:
    spool = Spool(WorkerHome(tmp_path), KEY, Events())
    spool.add(_reply("a"), None, {}, ASSIGNMENT)
    [entry] = spool.entries()
    envelope = next((tmp_path / "spool").glob("*.envelope"))
    envelope.rename(tmp_path / "aside")
    envelope.mkdir()  # to remove it is an error of the system
    spool.settle(entry)
    assert spool.entries() == []
    envelope.rmdir()
    (tmp_path / "aside").rename(envelope)
    assert [entry.assignment_id for entry in Spool(WorkerHome(tmp_path), KEY, Events()).entries()] == ["a"]


def test_a_damaged_spool_is_named(tmp_path: Path) -> None:
    spool = Spool(WorkerHome(tmp_path), KEY, Events())
    spool.add(_reply("a"), update_layout([("loss", 2)]), {"loss": np.ones(2, dtype=np.float32)}, ASSIGNMENT)
    [entry] = spool.entries()
    assert isinstance(entry.payload, Path)
    entry.payload.write_bytes(b"1234")
    with pytest.raises(SpoolError, match="move the file away"):
        Spool(WorkerHome(tmp_path), KEY, Events())


def test_finished_work_that_cannot_be_read_for_now_is_neither_called_damaged_nor_dropped(tmp_path: Path) -> None:
    spool = Spool(WorkerHome(tmp_path), KEY, Events())
    spool.add(_reply("a"), update_layout([("loss", 2)]), {"loss": np.ones(2, dtype=np.float32)}, ASSIGNMENT)
    [entry] = spool.entries()
    assert isinstance(entry.payload, Path)
    entry.payload.rename(tmp_path / "aside")
    assert not entry.intact()
    entry.payload.mkdir()  # to read it is an error of the system
    assert entry.intact()
    entry.payload.rmdir()
    (tmp_path / "aside").rename(entry.payload)
    envelope = entry.payload.with_suffix(".envelope")
    envelope.unlink()
    envelope.mkdir()
    with pytest.raises(SpoolError, match="cannot be read", check=lambda error: "move" not in str(error)):
        Spool(WorkerHome(tmp_path), KEY, Events())


def test_a_state_file_that_cannot_be_read_for_now_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(WorkerHomeError, match="cannot be read", check=lambda error: "move" not in str(error)):
        read_state(tmp_path, dict, "it is lost")


def test_a_state_file_of_another_format_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"format": 2}')
    both = "state.json: this version of fedpareto reads format 1; got 2: use the version that wrote it, or move it away"
    with pytest.raises(WorkerHomeError, match=re.escape(both)):
        read_state(tmp_path / "state.json", dict, "it is lost")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(WorkerHomeError, match="is damaged"):
        read_state(tmp_path / "state.json", dict, "it is lost")


def test_delays_grow_to_a_ceiling_with_full_jitter_and_start_again_after_success() -> None:
    ceilings = Backoff(lambda low, high: high)
    assert [ceilings.delay() for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    ceilings.reset()
    assert ceilings.delay() == 0.2
    jittered = Backoff(random.Random(1).uniform)
    drawn = [jittered.delay() for _ in range(2000)]
    assert all(0 <= delay <= 30 for delay in drawn)
    assert min(drawn[10:]) < 1
    assert max(drawn) > 29


def test_the_cache_keeps_the_last_models_and_checks_what_an_earlier_process_left(tmp_path: Path) -> None:
    models = [bytes([number]) * 100 for number in range(5)]
    cache = ModelCache(tmp_path, keep=2)

    def served(data: bytes) -> Callable[[int], Iterator[bytes]]:
        return lambda offset: iter([data[offset:]])

    for data in models:
        assert cache.get(digest(data), 100, served(data)).read_bytes() == data
    assert len(files_in(tmp_path)) == 2
    path = cache.get(digest(models[4]), 100, lambda offset: iter([]))
    path.write_bytes(b"rotten" * 20)
    fresh = ModelCache(tmp_path, keep=2)
    assert fresh.get(digest(models[4]), 100, served(models[4])).read_bytes() == models[4]


def test_a_cache_that_is_emptied_or_changed_under_a_running_worker_is_filled_again(tmp_path: Path) -> None:
    data, directory = bytes(range(100)), tmp_path / "cache"
    cache = ModelCache(directory)
    fetched: list[int] = []

    def fetch(offset: int) -> Iterator[bytes]:
        fetched.append(offset)
        yield data[offset:]

    for harm in (Path.unlink, lambda path: path.write_bytes(b""), lambda path: shutil.rmtree(directory)):
        path = cache.get(digest(data), 100, fetch)
        assert cache.get(digest(data), 100, fetch) == path
        harm(path)
        assert cache.get(digest(data), 100, fetch).read_bytes() == data
    assert fetched == [0] * 4


def test_the_cache_keeps_the_file_that_was_just_fetched_after_a_clock_was_set_back(tmp_path: Path) -> None:
    models = [bytes([number]) * 100 for number in range(4)]
    later = time.time() + 7200

    def got(cache: ModelCache, data: bytes) -> Path:
        return cache.get(digest(data), 100, lambda _: iter([data]))

    for data in models[:3]:
        os.utime(got(ModelCache(tmp_path), data), (later, later))
    cache = ModelCache(tmp_path)
    for data in (models[3], models[0]):
        assert got(cache, data).read_bytes() == data
    assert cache.get(digest(models[3]), 100, lambda _: iter([])).read_bytes() == models[3]
    assert len(files_in(tmp_path)) == 3


def test_the_cache_starts_over_when_the_rest_does_not_fit_and_bounds_what_it_takes(tmp_path: Path) -> None:
    data = bytes(range(100))
    cache = ModelCache(tmp_path)
    algorithm, _, value = digest(data).partition(":")
    (tmp_path / f"{algorithm}-{value}.part").write_bytes(b"something else")
    offsets: list[int] = []

    def fetch(offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        yield data[offset:]

    assert cache.get(digest(data), 100, fetch).read_bytes() == data
    assert offsets == [14, 0]

    def endless(offset: int) -> Iterator[bytes]:
        while True:
            yield bytes(1000)

    with pytest.raises(ModelMismatch, match="more than the 100 bytes"):
        cache.get(digest(b"another"), 100, endless)


# With the coordinator as shipped


@pytest.mark.full
def test_attackers_of_a_real_federation_collude_or_are_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    together = ["--set", "attack=alie:z=1", "--set", f"accomplices={tmp_path / 'shared'}"]
    options = {"a": together, "b": together, "c": ["--set", "attack=nan"]}
    with federation(tmp_path) as made:
        made.serve()
        for number, (name, more) in enumerate(options.items(), 1):
            made.join(name)
            made.work(name, "--set", f"part={number}/3", *more)
        made.completed("attacked", 'task = "digits"\nrounds = 2\n[selection]\nminimum = 3\n')
        for name in options:
            assert "REHEARSAL OF AN ATTACK" in made.workers[name].text
        found = made.query("select client_id, accepted, reason, payload from replies where payload_bytes > 0")
        for client_id, accepted, reason, _ in found:
            assert (bool(accepted), reason) == ((False, "non-finite") if client_id == "c" else (True, ""))
        digests = {name: {row.payload for row in found if row.client_id == name} for name in "ab"}
        assert len(digests["a"]) == 2
        assert digests["a"] == digests["b"]
        for name in "ab":
            assert made.workers[name].stop() == 0
        assert list((tmp_path / "shared").iterdir()) == []
