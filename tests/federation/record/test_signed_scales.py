"""The results that a member compares the scale of a model with, in lanes that work at the same time."""

import sys
from types import FrameType
from typing import Any

from federation.digests import digest
from federation.record.signed_scales import SignedScales
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope


def test_lanes_whose_runs_are_filled_from_different_results_each_get_the_document_of_their_own() -> None:
    """Others ask in turn for two more documents, one before each line of this lane, unless this lane has the lock."""
    blobs, results = {digest(text): text for text in (b"first", b"second", b"third")}, list[str]()
    for name in tuple(blobs):
        manifest = ResultManifest(federation_id="f", document=name).SerializeToString()
        envelope = SignedEnvelope(manifest=manifest).SerializeToString()
        results.append(digest(envelope))
        blobs[digest(envelope)] = envelope
    scales = SignedScales("f", lambda envelope: ResultManifest.FromString(envelope.manifest))
    others: list[bytes] = []

    def document(result: str) -> bytes:
        return scales._document(result, lambda name, most: blobs[name])

    def others_ask(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not SignedScales._document.__code__:
            return None
        if event == "line" and not scales._lock.locked():
            others.append(document(results[1 + len(others) % 2]))
        return others_ask

    before = sys.gettrace()
    document(results[0])
    sys.settrace(others_ask)
    try:
        found = [document(results[0]), document(results[0])]
    finally:
        sys.settrace(before)
    assert found == [b"first", b"first"]
    assert set(others) == {b"second", b"third"}
