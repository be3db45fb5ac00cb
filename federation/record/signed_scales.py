"""What a member compares the scale of a model with: the signed result of a run that described the members' data."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from federation.digests import parse
from federation.refusals import Refusal
from federation.statistics.scale import ScaleError, ScaleLayer, check_scale
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope

MAX_RESULT_BYTES = 1 << 20  # of a signed result, which names the replies
MAX_DOCUMENT_BYTES = 64 << 20  # of 10,000 columns with 64 bins each
Fetch = Callable[[str, int], bytes]
"""Fetches a document by its digest, of at most this number of bytes; what it returns has this digest."""


@dataclass(eq=False)
class SignedScales:
    """Checks the models of runs that are filled from statistics. The document of one result is kept in memory.

    Any thread may call: the lanes of a worker share it.

    Attributes:
        federation_id: of the federation.
        opened: verifies an envelope of the coordinator; raises a Refusal.
    """

    federation_id: str
    opened: Callable[[SignedEnvelope], ResultManifest]
    _kept: tuple[str, bytes] = field(default=("", b""), init=False)  # the digest of a result, and its document
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # of `_kept`; not held while one fetches

    def check(
        self, result: str, tensors: Mapping[str, NDArray[np.float32]], layer: ScaleLayer | None, fetch: Fetch
    ) -> None:
        """Checks the fixed tensors of a model against a result; `layer` is the layer Standardise of the task's model.

        Raises:
            ScaleError: the coordinator has not signed this result, or the model has other numbers.
        """
        if layer is None:
            raise ScaleError("the model of this task has no layer Standardise")
        check_scale(tensors, self._document(result, fetch), layer)

    def _document(self, result: str, fetch: Fetch) -> bytes:
        with self._lock:
            name, document = self._kept
        if name == result:
            return document
        try:
            parse(result)
            # The coordinator's word is its signature: what it sends under this digest is not.
            manifest = self.opened(SignedEnvelope.FromString(fetch(result, MAX_RESULT_BYTES)))
            parse(manifest.document)
        except (Refusal, ValueError, DecodeError) as error:
            raise ScaleError(f"{result[:80]!r} is no result that the coordinator has signed: {error}") from None
        if manifest.federation_id != self.federation_id:
            raise ScaleError(f"the result {result} is of another federation")
        document = fetch(manifest.document, MAX_DOCUMENT_BYTES)
        with self._lock:
            self._kept = (result, document)
        return document
