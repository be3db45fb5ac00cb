"""The provenance of an exported model: metadata in the header of its safetensors file.

A model on record has no metadata, so that equal models are equal files. The export adds the metadata. Without them, the
file is the one that the signed step names.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from federation import digests
from federation.refusals import Refusal
from federation.vectors import FOREIGN_DTYPES, LENGTH_BYTES, MAX_EXPORTED_BYTES, METADATA, header_entries, header_length

_PREFIX = "fedpareto."
_PIECE = 1 << 20  # bytes that are hashed at once


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The origin of a model. All values are texts, as metadata of safetensors files are.

    Attributes:
        federation: its name.
        run: the id of the run.
        round: the number of the round that made the model; empty for the model that the run began with.
        record: the digest of the run's record, see `docs/reference/verify.md`; empty if there is none.
        entries: the number of entries of the audit log that this digest covers.
    """

    federation: str
    run: str
    round: str
    record: str
    entries: str


def with_provenance(header: bytes, provenance: Provenance) -> bytes:
    """Adds the provenance to the metadata of a header of a safetensors file, which begins with its length.

    Raises:
        Refusal: `layout`: it is not the header of a safetensors file, or is too long with the metadata.
    """
    document = _parsed(header)
    added = {f"{_PREFIX}{field.name}": getattr(provenance, field.name) for field in fields(Provenance)}
    return _written({METADATA: document.pop(METADATA, {}) | added, **document})


def read_exported(path: Path, algorithm: str) -> tuple[str, Provenance | None]:
    """The digest of an exported model without its provenance, by an algorithm of `federation.digests`; the provenance.

    Raises:
        Refusal: `layout`: it is not a safetensors file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        prefix = file.read(LENGTH_BYTES)
        header = prefix + file.read(header_length(prefix, MAX_EXPORTED_BYTES))
        document = _parsed(header)
        metadata = document.get(METADATA, {})
        values = {field.name: metadata.pop(f"{_PREFIX}{field.name}", None) for field in fields(Provenance)}
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        provenance = None
        if texts.keys() == values.keys():
            if not metadata:
                del document[METADATA]
            header, provenance = _written(document), Provenance(**texts)
        state = digests.hasher(algorithm)
        state.update(header)
        while piece := file.read(_PIECE):
            state.update(piece)
    return f"{algorithm}:{state.hexdigest()}", provenance


def _parsed(header: bytes) -> dict[str, dict[str, object]]:
    return {name: entry for name, entry, _ in header_entries(header[LENGTH_BYTES:], FOREIGN_DTYPES)}


def _written(document: dict[str, dict[str, object]]) -> bytes:
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        raise Refusal("layout", "the header of a safetensors file is Unicode text; this one is not") from None
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_EXPORTED_BYTES:
        raise Refusal(
            "layout", f"the header takes {len(text)} bytes; at most {MAX_EXPORTED_BYTES} are accepted anywhere"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
