"""Fetches the model of an answer from the coordinator or its bucket: the whole model with its digest, or nothing.

What has arrived of a download that broke off stays in the worker's directory, and the next one goes on after it.
"""

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

import grpc

from federation.refusals import Refusal
from federation.text import escaped
from federation.transport.proxies import RouteError
from federation.transport.transfer_times import slowest_seconds
from federation.trust.member_files import MemberFiles
from federation.v1.federation_pb2 import FetchBlobRequest, LocateBlobRequest
from federation.vectors import model_layout
from worker.connection.attendance import ANSWER_SECONDS
from worker.connection.backoff import Backoff
from worker.connection.downloads import LEAST_BYTES, BlobUrl, DownloadFailed, download
from worker.connection.file_calls import CHANNEL_OPTIONS, FileCalls
from worker.results.run_model import ModelDisputed, RunModel, RunModelError
from worker.work.cache import ModelCache, ModelMismatch

TRIES = 6  # in a row that bring no byte
LONGEST_WAIT = 60.0  # seconds that the coordinator may ask for before the next one
_AGAIN = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL")


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Holds a worker's directory of fetched models, so that no other command removes the file that this one reads.

    Raises:
        RunModelError: another command holds it.
        OSError: the directory cannot be made or opened.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunModelError("another `worker model` fetches a model for this member: wait until it ends") from None
        yield
    finally:
        os.close(descriptor)


@dataclass
class _Bucket:
    """The bucket of the coordinator, whose hosts the owner allows, until it fails once."""

    member: MemberFiles
    answer: RunModel
    hosts: Collection[str]
    tell: Callable[[str], None]
    works: bool = True

    def pieces(self, files: FileCalls, offset: int) -> Iterator[bytes]:
        """What the bucket gives of the model's bytes from `offset` on: often nothing, and after a fault not all."""
        left = self.answer.manifest.model_bytes - offset
        if not self.works or not self.hosts or left < LEAST_BYTES:
            return
        request = LocateBlobRequest(digest=self.answer.manifest.model, grant=self.answer.envelope)
        try:
            url = files.locate(request, timeout=ANSWER_SECONDS).url
        except grpc.RpcError:  # the coordinator says the same to FetchBlob, or is of a version that takes no grant here
            url = ""
        if not url:
            self.works = False
            return
        try:
            yield from download(
                BlobUrl.parse(url, self.hosts),
                offset=offset,
                size=offset + left,
                proxy=self.member.proxy,
                seconds=ANSWER_SECONDS + slowest_seconds(left),
                stopped=lambda: False,
            )
        except DownloadFailed as error:
            self.failed(str(error))

    def failed(self, problem: str) -> None:
        """Leaves the bucket alone from now on, and says why."""
        self.works = False
        self.tell(f"a download from the bucket failed ({escaped(problem)}): the coordinator sends the bytes")


def fetched_model(
    directory: Path,
    member: MemberFiles,
    answer: RunModel,
    backoff: Backoff,
    tell: Callable[[str], None],
    hosts: Collection[str] = (),
) -> Path:
    """The file of the model in `directory`, which keeps one model.

    A download that breaks off goes on, at another coordinator if the first one is away; `tell` is told of it. `hosts`
    are the addresses "host:port" of buckets that the owner allows.

    Raises:
        RunModelError: the coordinator does not give it, or too many attempts brought nothing.
        ModelDisputed: other bytes came, or they are no model.
        OSError: the model cannot be written.
    """
    manifest = answer.manifest
    size, reached, tries, mixed = manifest.model_bytes, 0, 0, False
    bucket = _Bucket(member, answer, hosts, tell)

    def chunks(offset: int) -> Iterator[bytes | memoryview]:
        nonlocal reached, tries, mixed
        reached = offset
        _, channel = member.serving_channel(CHANNEL_OPTIONS)
        with channel:
            files = FileCalls(channel)
            for part in bucket.pieces(files, offset):
                reached, tries, mixed = reached + len(part), 0, True
                yield part
            if reached == size:
                return
            request = FetchBlobRequest(digest=manifest.model, offset=reached, grant=answer.envelope)
            for piece in files.fetch(request, timeout=ANSWER_SECONDS + slowest_seconds(size - reached)):
                reached, tries = reached + len(piece), 0
                yield piece

    cache = ModelCache(directory, keep=1)
    if size > (free := disk_usage(directory).free):
        raise RunModelError(f"the model has {size:,} bytes, and {directory} has room for {free:,}: make room there")
    while True:
        try:
            path = cache.get(manifest.model, size, chunks)
            model_layout(path)
            return path
        except ModelMismatch as error:
            if mixed:
                mixed = False
                bucket.failed("what was downloaded is not the model of the answer")
                continue
            raise ModelDisputed(f"{error}; nothing was written") from error
        except Refusal as error:
            raise ModelDisputed(f"the bytes that the coordinator has signed are no model ({error})") from error
        except (grpc.RpcError, RouteError) as error:
            tries += 1
            refusal = member.refusal(error) if isinstance(error, grpc.RpcError) else None
            problem = str(error) if refusal is None else refusal.message or refusal.status
            wait = 0.0 if refusal is None else refusal.retry_seconds
            if tries >= TRIES or wait > LONGEST_WAIT or (refusal is not None and refusal.status not in _AGAIN):
                kept = "; what has arrived is kept, and the same command goes on" if reached else ""
                raise RunModelError(f"the model was not fetched: {escaped(problem)}{kept}") from error
            delay = max(backoff.delay(), wait)
            tell(
                f"the download broke off after {reached} of {size} bytes, going on in {delay:.1f} s: {escaped(problem)}"
            )
            time.sleep(delay)
