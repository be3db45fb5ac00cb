"""Whole private rounds beside an open round: bytes and CPU seconds of a member and of the coordinator, and direction.

All members are in this process, one after the other, on one thread: real messages, signatures and checks, without
training, disk, TLS and network. The open round is what a member and a coordinator compute of it: the digest of the
payload and a signature; the Gram matrix and the combined vector. With `lost`, one member is lost at DEAL and one at
MASK. Unit updates agree in part: cosines of about 0.3 between pairs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(pool, "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np  # noqa: E402
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402
from secure_cast import Cast, Member, cast, context  # noqa: E402

from coordinator.aggregation.gram import combine, gram  # noqa: E402
from coordinator.aggregation.phases import Phase, Replies, Step  # noqa: E402
from coordinator.aggregation.qp import min_norm  # noqa: E402
from coordinator.aggregation.registry import algorithm  # noqa: E402
from federation.digests import digest  # noqa: E402
from federation.secure.thresholds import Mode, Thresholds  # noqa: E402
from federation.vectors import payload_bytes, update_layout  # noqa: E402
from federation.work.secure.terms import Stage  # noqa: E402

SECONDS = ("member_seconds", "member_open_seconds", "coordinator_seconds", "coordinator_open_seconds")


class Measured(Cast):
    """A cast that measures what each member sends, receives and computes."""

    def ask(self, phase: Phase) -> Replies:
        for name in phase.clients or ():
            member: Member = self.members[name]
            if not hasattr(member, "cpu"):
                measure(member)
        return super().ask(phase)


def measure(member: Any) -> None:
    """Makes a member count."""
    member.cpu, member.up, member.down = 0.0, 0, 0
    answer = member.do

    def do(work: Any, inputs: Any, **more: Any) -> Any:
        start = time.process_time()
        result = answer(work, inputs, **more)
        if work.name != Stage.READY:
            member.up += sum(row.nbytes for row in result.rows.values())
        member.cpu += time.process_time() - start
        member.down += sum(len(content) for content in inputs.values())
        return result

    member.do = do


def open_round(scene: Cast) -> dict[str, float]:
    """What a member and the coordinator compute in an open round of FedMGDA+."""
    rows = [member.vector for member in scene.members.values()]
    layout, key = update_layout([("loss", len(rows[0]))]), Ed25519PrivateKey.generate()
    start = time.process_time()
    key.sign(digest(b"".join(payload_bytes(layout, {"loss": rows[0]}))).encode())
    member = time.process_time() - start
    start = time.process_time()
    K = gram(rows)
    scale = 1 / np.sqrt(np.diag(K))
    weights = min_norm(K * np.outer(scale, scale)).weights
    for _ in combine(weights * scale, rows):
        pass
    return {"member": member, "coordinator": time.process_time() - start, "up": float(layout.file_bytes)}


def private_round(scene: Cast, mode: Mode) -> tuple[Step, float]:
    """One private round of FedMGDA+, and the coordinator's CPU seconds."""
    conversation = algorithm("fedavg-n" if mode is Mode.SUM else "fedmgda+").round(context(scene, mode))
    replies: Any = None
    seconds = 0.0
    while True:
        start = time.process_time()
        try:
            phase = conversation.send(replies)
        except StopIteration as end:
            return end.value, seconds + time.process_time() - start
        seconds += time.process_time() - start
        replies = scene.ask(phase)


def cosine(scene: Cast, step: Step) -> float:
    """Between the step and the direction from the exact Gram matrix, with the same bounds and the same members."""
    names = [reply.client_id for reply in step.replies]
    U = np.stack([scene.members[name].vector for name in names]).astype(np.float64)
    U /= np.linalg.norm(U, axis=1, keepdims=True)
    numbers, m = Thresholds(len(scene.members), Mode.PRIVATE), len(names)
    bounds = np.full(m, max(0.0, 1 / m - 0.5 / m)), np.full(m, min(1 / m + 0.5 / m, max(numbers.cap, 1 / m)))
    exact = min_norm(U @ U.T, lower=bounds[0], upper=bounds[1]).weights @ U
    assert step.combined is not None
    return float(exact @ step.combined / np.linalg.norm(exact) / np.linalg.norm(step.combined))


def rows(sizes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """One row for each size, mode and loss of members."""
    for m, d in sizes:
        plain = open_round(cast(m, d))
        for mode in Mode:
            for lost in (False, True) if m >= 10 and mode is not Mode.VERIFIED else (False,):
                gone = {(Stage.DEAL.value, 0): ["silo-01"], (Stage.MASK.value, 0): ["silo-02"]} if lost else {}
                made = cast(m, d, assumed=1)
                scene = Measured(made.members, lost=gone)
                step, coordinator = private_round(scene, mode)
                members: list[Any] = list(scene.members.values())
                yield {
                    "m": m,
                    "d": d,
                    "mode": mode.value,
                    "lost": lost,
                    "member_seconds": max(one.cpu for one in members),
                    "member_open_seconds": plain["member"],
                    "coordinator_seconds": coordinator,
                    "coordinator_open_seconds": plain["coordinator"],
                    "up": max(one.up for one in members),
                    "up_ratio": max(one.up for one in members) / plain["up"],
                    "down": max(one.down for one in members),
                    "cosine": cosine(scene, step) if mode is not Mode.SUM else 1.0,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="m = 10 and 20, d = 38 thousand")
    parser.add_argument("--smallest", action="store_true", help="m = 8, d = 1000")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    sizes = [(m, d) for d in (38_000, 800_000) for m in (10, 20, 50)] + [(10, 11_200_000), (20, 11_200_000)]
    if options.quick:
        sizes = [(10, 38_000), (20, 38_000)]
    if options.smallest:
        sizes = [(8, 1_000)]
    if options.json:
        json.dump({"rounds": list(rows(sizes))}, sys.stdout)
        print()
        return
    print("CPU seconds and bytes of the dearest member and of the coordinator, without training; x: of an open round")
    print(f"{'m':>3} {'d':>11} {'mode':<9} {'lost':<4} {'member':>7} {'open':>7} {'coord.':>7} {'open':>7}")
    for row in rows(sizes):
        seconds = [f"{row[name]:>7.3f}" for name in SECONDS]
        print(
            f"{row['m']:>3} {row['d']:>11,} {row['mode']:<9} {'two' if row['lost'] else '-':<4} {' '.join(seconds)}  "
            f"up {row['up']:>11,} x {row['up_ratio']:.3f}  down {row['down']:>9,}  cosine {row['cosine']:.4f}"
        )


if __name__ == "__main__":
    main()
