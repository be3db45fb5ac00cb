"""A round of a large model, up to its step: its time, and the coordinator's peak memory, CPU time and disk.

A coordinator, and `--members` in processes of their own, with TLS 1.3 and signatures. A member downloads the model, and
compares its digest, but keeps nothing of it; its update is generated while it is sent. So the disk has to hold the
coordinator's blobs alone: the model, one update of each member, the combined vector and the new model.
"""

import multiprocessing
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from itertools import repeat
from pathlib import Path

import numpy as np
from measuring import Document, cpu_seconds, lone_coordinator, peak_memory, progress, submitted, temporary_federation

from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.line.channels import CHUNK_BYTES
from federation.trust.envelope import verify
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest
from federation.v1.federation_pb2 import AttendRequest, FetchBlobRequest, Heartbeat, SubmitRequest, Window
from federation.vectors import Layout, update_layout
from tests.harness import Federation, Member, wait_for

FORMS = {
    "full": {"members": 6, "parameters": 400_000_000},
    "quick": {"members": 3, "parameters": 20_000_000},
    "smallest": {"members": 1, "parameters": 1_000},
}
BEAT_SECONDS = 2.0
LONGEST_SECONDS = 1800.0


def measure(members: int, parameters: int) -> Document:
    needed, parent = 4 * parameters * (members + 3), tempfile.gettempdir()
    if (free := shutil.disk_usage(parent).free) < 1.1 * needed:
        raise SystemExit(f"{needed / 1e9:.0f} GB of disk are needed in {parent}; {free / 1e9:.0f} are free")
    with temporary_federation() as fed:
        return one_round(fed, members, parameters)


def pieces(layout: Layout, seed: int) -> Iterator[bytes]:
    """An update, in pieces: the same random numbers again and again, other ones for each seed."""
    block = np.random.default_rng(seed).standard_normal(CHUNK_BYTES // 4, dtype=np.float32).tobytes()
    yield layout.header
    whole, rest = divmod(layout.data_bytes, CHUNK_BYTES)
    yield from repeat(block, whole)
    yield block[:rest]


def download(member: Member, order: AssignmentManifest) -> None:
    """Downloads the model; raises if it has another digest."""
    state = hasher()
    for response in member.stub.FetchBlob(FetchBlobRequest(digest=order.base_model), timeout=LONGEST_SECONDS):
        state.update(response.chunk)
    if f"{DEFAULT_ALGORITHM}:{state.hexdigest()}" != order.base_model:
        raise RuntimeError("another model was served")


def upload(member: Member, order: AssignmentManifest, seed: int) -> None:
    """Hands in an update; raises if it is not accepted."""
    layout, state = update_layout([(row.name, row.length) for row in order.rows]), hasher()
    for piece in pieces(layout, seed):
        state.update(piece)
    manifest = member.manifest(order)
    manifest.payload, manifest.payload_bytes = f"{DEFAULT_ALGORITHM}:{state.hexdigest()}", layout.file_bytes
    windows: queue.SimpleQueue[Window] = queue.SimpleQueue()

    def requests() -> Iterator[SubmitRequest]:
        yield SubmitRequest(reply=member.sign(manifest))
        place, limit = 0, windows.get().limit
        for piece in pieces(layout, seed):
            while place + len(piece) > limit:
                limit = windows.get().limit
            yield SubmitRequest(chunk=piece, offset=place)
            place += len(piece)

    for answer in member.stub.Submit(requests(), timeout=LONGEST_SECONDS):
        if answer.WhichOneof("message") == "window":
            windows.put(answer.window)
        elif verify(answer.receipt, ReceiptManifest, member.files.coordinator.chain.present).accepted:
            return
    raise RuntimeError("the update was not accepted")


def play(home: Path, seed: int) -> None:
    """One member, for one assignment."""
    member = Member(MemberFiles.load(home))
    attending = member.attend(nothing=10)

    def beat() -> None:
        while True:
            time.sleep(BEAT_SECONDS)  # a worker tells the coordinator as often that it is there
            attending.say(AttendRequest(heartbeat=Heartbeat()))

    threading.Thread(target=beat, daemon=True).start()
    order = member.open(attending.assignment())
    download(member, order)
    upload(member, order, seed)


def one_round(fed: Federation, members: int, parameters: int) -> Document:
    """One round of members who train nothing."""
    coordinator = lone_coordinator(fed)
    homes = [fed.join(f"member-{i:02}") for i in range(members)]
    run, size = submitted(fed, "large", parameters, clients=members)
    pid = coordinator.popen.pid
    cpu = cpu_seconds(pid)
    progress(f"{members} members download the model and send an update of {size / 1e6:,.0f} MB")
    with ProcessPoolExecutor(members, multiprocessing.get_context("spawn")) as pool:  # a process for each member
        try:
            list(pool.map(play, homes, range(members), timeout=LONGEST_SECONDS))
        except Exception as error:
            raise RuntimeError(f"a member failed: {error}\n{coordinator.text[-3000:]}") from error

    times = "select started, stepped from rounds where run_id = :run and stepped is not null"
    (found,) = wait_for(lambda: fed.query(times, run=run), "the step", LONGEST_SECONDS)
    started, ended = map(datetime.fromisoformat, found)
    last = datetime.fromisoformat(fed.query("select max(received) from replies")[0][0])
    return {
        "members": members,
        "parameters": parameters,
        "round_seconds": (ended - started).total_seconds(),
        "transfer_seconds": (last - started).total_seconds(),
        "step_seconds": (ended - last).total_seconds(),
        "coordinator_cpu_seconds": cpu_seconds(pid) - cpu,
        "coordinator_peak_mb": peak_memory(pid) / 1e6,
        "disk_bytes": sum(path.stat().st_size for path in (fed.home / "blobs").rglob("*") if path.is_file()),
    }
