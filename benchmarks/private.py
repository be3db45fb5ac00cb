"""Whole private rounds beside an open round: bytes and CPU seconds of a member and of the coordinator, and direction.

All members are in this process, one after the other, on one thread: real messages, signatures and checks, without
training, disk, TLS and network; `--sizes` are members x parameters. The open round is what a member and a coordinator
compute of it: the digest of the payload and a signature; the Gram matrix and the combined vector. Figures are those of
the member that sends or computes most; `up_ratio` is of an open round. With `lost`, one member is lost at DEAL and one
at MASK. Unit updates agree in part: cosines of about 0.2 between pairs.

Flower's SecAgg+ is measured beside it by `--flower`, the Python of an environment that has Flower (see
docs/operate/benchmarks.md); with `lost`, both of its clients are lost before they send their masked vectors.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Document, cases, least, progress

from federation.aggregation.gram import combine, gram
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import AlgorithmPhase, Asked, PhaseReply, Replies, Step
from federation.aggregation.qp import min_norm
from federation.aggregation.registry import algorithm
from federation.aggregation.streaming import one_thread
from federation.secure.thresholds import Mode, Thresholds
from federation.work.base import Result, payload_layout
from federation.work.registry import encode
from federation.work.secure.terms import SessionStage
from tests.federation.work.scene import Cast, Member, cast, context, document, held

SIZES = " ".join(f"{m}x{d}" for d in (38_000, 800_000, 11_200_000) for m in (10, 20, 50))
FORMS = {
    "full": {"sizes": SIZES, "flower": ""},
    "quick": {"sizes": "10x38000 20x38000"},
    "smallest": {"sizes": "8x1000"},
}
FLOWER = Path(__file__).with_name("flower_secagg.py")


def measure(sizes: str, flower: str) -> Document:
    with one_thread():
        return {"rounds": list(rows(cases(sizes), flower))}


class MeasuredMember(Member):
    """A member that measures what it computes, sends and receives."""

    cpu, up, down = 0.0, 0, 0

    def do(self, work: Any, inputs: Any, **more: Any) -> Result:
        start = time.process_time()
        result = super().do(work, inputs, **more)
        self.cpu += time.process_time() - start
        self.down += len(encode(work)) + sum(map(len, inputs.values()))
        return result


class MeasuredCast(Cast):
    """Members that measure; it measures how long they are asked."""

    asking = 0.0

    def ask(self, phase: AlgorithmPhase) -> Replies:
        start = time.process_time()
        replies = super().ask(phase)
        self.asking += time.process_time() - start
        return replies

    def reply(self, member: Any, phase: AlgorithmPhase, result: Result) -> PhaseReply:
        start = time.process_time()
        reply = super().reply(member, phase, result)
        member.cpu += time.process_time() - start
        rows = phase.work(Asked(member.name, ("loss",), self.spec, 0)).rows(member.shape)
        member.up += len(reply.signed) + (payload_layout(rows).file_bytes if rows else 0)
        return replace(reply, rows=tuple(on_disk(row) for row in reply.rows))


def scene_of(m: int, d: int, **fields: Any) -> MeasuredCast:
    """A new scene of m members with vectors of d numbers."""
    made = cast(m, d, assumed=1).members
    return MeasuredCast({name: MeasuredMember(**vars(member)) for name, member in made.items()}, **fields)


def on_disk(row: Any) -> Any:
    """A row in a file that has no name, as a coordinator has it."""
    with tempfile.TemporaryFile() as file:
        file.write(row.data)
        file.flush()
        return np.memmap(file, row.dtype, "r")


def open_round(scene: MeasuredCast) -> dict[str, float]:
    """What a member and the coordinator compute in an open round of FedMGDA+."""
    member: Any = next(iter(scene.members.values()))
    scene.reply(member, TrainingPhase(), Result({"loss": member.vector}, {}, {}, 100))
    rows = [member.vector for member in scene.members.values()]
    start = time.process_time()
    for _ in direction(rows):
        pass
    return {"member": member.cpu, "coordinator": time.process_time() - start, "up": member.up}


def direction(vectors: Sequence[Any], **bounds: Any) -> Iterator[Any]:
    """The pieces of the exact direction of FedMGDA+."""
    K = gram(vectors)
    scale = 1 / np.sqrt(np.diag(K))
    return combine(min_norm(K * np.outer(scale, scale), **bounds).weights * scale, vectors)


def cosine(scene: Cast, step: Step, mode: Mode) -> float:
    """Between the step and the direction from the exact Gram matrix, with the same bounds and the same members."""
    names = [reply.client_id for reply in step.replies]
    numbers, m = Thresholds(len(scene.members), mode), len(names)
    upper = np.full(m, min(1 / m + 0.5 / m, max(numbers.cap, 1 / m)))
    vectors = [scene.members[name].vector for name in names]
    exact = np.concatenate(list(direction(vectors, lower=np.full(m, 0.5 / m), upper=upper)))
    assert step.combined is not None
    return float(exact @ step.combined / np.linalg.norm(exact) / np.linalg.norm(step.combined))


def measured(m: int, d: int, mode: Mode, *, lost: bool) -> dict[str, float]:
    """One private round of FedMGDA+."""
    gone = {(SessionStage.DEAL.value, 0): ["silo-01"], (SessionStage.MASK.value, 0): ["silo-02"]} if lost else {}
    scene, name = scene_of(m, d, lost=gone), "fedavg-n" if mode is Mode.SUM else "fedmgda+"
    scene.specification = document(mode, name)
    conversation = algorithm(name).round(context(scene, mode))
    start = time.process_time()
    step: Step = held(scene, conversation)
    seconds = time.process_time() - start - scene.asking
    members: list[Any] = list(scene.members.values())
    return {
        "member_seconds": max(one.cpu for one in members),
        "coordinator_seconds": seconds,
        "up": max(one.up for one in members),
        "down": max(one.down for one in members),
        "cosine": cosine(scene, step, mode) if mode is not Mode.SUM else 1.0,
    }


def secagg(python: str, m: int, d: int, *, lost: bool) -> dict[str, Any]:
    """One round of Flower's SecAgg+."""
    command = [python, str(FLOWER), str(m), str(d), "2" if lost else "0"]
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=quiet).stdout)
    return found


def rows(sizes: Sequence[tuple[int, ...]], python: str) -> Iterator[dict[str, Any]]:
    """One row for each size, mode and loss of members."""
    for m, d in sizes:
        progress(f"{m} members, {d:,} parameters")
        repeats = 3 if m * d < 10**6 else 1
        plain = least([open_round(scene_of(m, d)) for _ in range(repeats)])
        for mode in [*(mode.value for mode in Mode), "SecAgg+"]:
            for lost in (False, True) if m >= 10 else (False,):
                row: dict[str, Any] = {"m": m, "d": d, "mode": mode, "lost": lost}
                if mode != "SecAgg+":
                    row |= least([measured(m, d, Mode(mode), lost=lost) for _ in range(repeats)])
                elif python:
                    row |= least([secagg(python, m, d, lost=lost) for _ in range(repeats)])
                row |= {"member_open_seconds": plain["member"], "coordinator_open_seconds": plain["coordinator"]}
                yield row | {"up_ratio": row["up"] / plain["up"] if "up" in row else None}
