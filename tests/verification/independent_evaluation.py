"""The means of a private evaluation, computed from docs/reference/private-protocol.md, sections 2a and 2b.

The sums are those of the members' masked vectors, less the masks that the members' shares give.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.v1 import secure_pb2
from tests.verification.independent_verifier import File, must

Numbers = dict[str, float]
SPLITS = ("test", "validation", "train")  # a round is judged by the first that was measured
PRIME = 2**61 - 1


def hashed(*parts: bytes) -> bytes:
    return blake3(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def words(key: bytes, count: int) -> np.ndarray:
    """A stream: AES-256-CTR from a zero counter block, as 4-byte words."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * count)), "<u4")


def secret(shares: Mapping[int, Sequence[int]], needed: int) -> bytes:
    """The secret of five elements of F_q, from the shares of the first members, by their points."""
    points, value = sorted(shares)[:needed], []
    for place in range(5):
        total = 0
        for x in points:
            weight = 1
            for other in points:
                if other != x:
                    weight = weight * other * pow(other - x, -1, PRIME) % PRIME
            total += weight * shares[x][place]
        value.append(total % PRIME)
    return b"".join(one.to_bytes(8, "little") for one in value)


def of_private_model(file: File, replies: Sequence[Any], split_order: Sequence[str]) -> Numbers:
    """The metrics of a private evaluation in which all members stayed to the end."""
    by_stage: dict[str, dict[str, Any]] = {}
    for reply in replies:
        by_stage.setdefault(reply.order.kind, {})[reply.name] = reply
    members = sorted(by_stage["secure-mask"])
    must(members == sorted(by_stage["secure-ready"]) == sorted(by_stage["secure-unmask"]), "a member was lost")
    statements = {
        stage: {name: secure_pb2.SecureStatement.FromString(reply.said.statement) for name, reply in sent.items()}
        for stage, sent in by_stage.items()
    }
    payloads = {
        stage: {name: raw(file, sent[name].said.payload) for name in members}
        for stage, sent in by_stage.items()
        if stage in ("secure-mask", "secure-unmask")
    }
    m = len(members)
    total = np.array([payload.view("<u4") for payload in payloads["secure-mask"].values()]).sum(axis=0)
    t, needed = (m - 1) // 3, 2 * m // 3 + 1
    view = statements["secure-mask"][members[0]].view
    info = b"fedpareto/v1/secure/self-mask\0" + hashed(view)
    for place, name in enumerate(members):
        shares = {
            point: payloads["secure-unmask"][sender].view("<u8")[5 * place : 5 * place + 5].tolist()
            for point, sender in enumerate(members, 1)
        }
        sigma = secret(shares, needed)
        must(blake3(b"fedpareto/v1/secure/commit" + sigma).digest() == committed(statements, name), "a mask secret")
        total = total - words(HKDF(SHA256(), 32, None, info).derive(sigma), len(total))
    sigma_noise = file.run["privacy"].get("evaluation_noise", 0.1)
    clip = math.sqrt(len(total)) * (1 + 3 * sigma_noise)
    a = math.floor(2**32 / m) * 2.0**-32
    means = total.astype(np.uint32).view(np.int32) * 2.0**-28 / a * clip / m
    measured = np.min([[*statements["secure-ready"][name].measured] for name in members], axis=0)
    found: Numbers = {"evaluated": m}
    if sigma_noise:
        found["evaluation/noise"] = sigma_noise / math.sqrt((needed - t) * m)
    by_key = dict(zip(entries(file, split_order), zip(means, measured, strict=True), strict=True))
    known = {key: min(max(mean, 0.0), 1.0) * most for (key, most), (mean, there) in by_key.items() if there}
    found |= {f"loss/{key.replace('/loss', '')}": value for key, value in known.items() if key.split("/")[1] == "loss"}
    of_first = {"accuracy": "accuracy/mean"} | {one.name: f"metric/{one.name}/mean" for one in file.about.metrics}
    of_first |= {f"accuracy/{name}": f"accuracy/objective/{name}" for name in file.objectives}
    for name, target in of_first.items():
        values = [known[f"{split}/{name}"] for split in SPLITS if f"{split}/{name}" in known]
        found |= {target: values[0]} if values else {}
    return found


def raw(file: File, digest: str) -> np.ndarray:
    """The bytes of the tensors of a payload."""
    data = file.blob(digest)
    must(data is not None, f"the payload {digest} is absent")
    data = data or b""
    return np.frombuffer(data[8 + int.from_bytes(data[:8], "little") :], np.uint8)


def committed(statements: Mapping[str, Mapping[str, Any]], name: str) -> bytes:
    return bytes(statements["secure-deal"][name].commitment)


def entries(file: File, splits: Iterable[str]) -> Iterator[tuple[str, float]]:
    """The coordinates of the vector of a private evaluation, with the largest value of each."""
    suffixes = ["", *(f"/{name}" for name in file.objectives if len(file.objectives) > 1)]
    for split in splits:
        for suffix in suffixes:
            yield f"{split}/loss{suffix}", 10.0
            yield f"{split}/accuracy{suffix}", 1.0
        yield from ((f"{split}/{metric.name}", metric.largest) for metric in file.about.metrics)
