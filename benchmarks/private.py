"""Whole private rounds beside an open round: bytes and CPU seconds of a member and of the coordinator, and direction.

    python benchmarks/private.py [--flower PYTHON] [--size M D] [--quick] [--json]

All members are in this process, one after the other, on one thread: real messages, signatures and checks, without
training, disk, TLS and network. The open round is what a member and a coordinator compute of it: the digest of the
payload and a signature; the Gram matrix and the combined vector. With `lost`, one member is lost at DEAL and one at
MASK. Unit updates agree in part: cosines of about 0.2 between pairs. Flower's SecAgg+ is measured beside it; with
`lost`, both of its clients are lost before they send their masked vectors.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

for pool in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(pool, "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np  # noqa: E402
from secure_cast import Cast, cast, context, document  # noqa: E402

from coordinator.aggregation.gram import combine, gram  # noqa: E402
from coordinator.aggregation.phase_kinds import TrainingPhase  # noqa: E402
from coordinator.aggregation.phases import AlgorithmPhase, Asked, PhaseReply, Replies, Step  # noqa: E402
from coordinator.aggregation.qp import min_norm  # noqa: E402
from coordinator.aggregation.registry import algorithm  # noqa: E402
from federation.secure.thresholds import Mode, Thresholds  # noqa: E402
from federation.work.base import Result, payload_layout  # noqa: E402
from federation.work.registry import encode  # noqa: E402
from federation.work.secure.terms import SessionStage  # noqa: E402

SECONDS = ("member_seconds", "member_open_seconds", "coordinator_seconds", "coordinator_open_seconds")


FLOWER = Path(__file__).with_name("flower_secagg.py")


class Measured(Cast):
    """A cast that measures what each member sends, receives and computes."""

    def ask(self, phase: AlgorithmPhase) -> Replies:
        for name in phase.clients or ():
            member: Any = self.members[name]
            if not hasattr(member, "cpu"):
                measure(member)
        return super().ask(phase)

    def reply(self, member: Any, phase: AlgorithmPhase, result: Result) -> PhaseReply:
        start = time.process_time()
        reply = super().reply(member, phase, result)
        member.cpu += time.process_time() - start
        rows = phase.work(Asked(member.name, ("loss",), self.spec, 0)).rows(member.shape)
        member.up += len(reply.signed) + (payload_layout(rows).file_bytes if rows else 0)
        return replace(reply, rows=tuple(on_disk(row) for row in reply.rows))


def on_disk(row: Any) -> Any:
    """A row in a file that has no name, as a coordinator has it."""
    with tempfile.TemporaryFile() as file:
        file.write(row.data)
        file.flush()
        return np.memmap(file, row.dtype, "r")


def measure(member: Any) -> None:
    """Makes a member count."""
    member.cpu, member.up, member.down = 0.0, 0, 0
    answer = member.do

    def do(work: Any, inputs: Any, **more: Any) -> Any:
        start = time.process_time()
        result = answer(work, inputs, **more)
        member.cpu += time.process_time() - start
        member.down += len(encode(work)) + sum(len(content) for content in inputs.values())
        return result

    member.do = do


def open_round(scene: Measured) -> dict[str, float]:
    """What a member and the coordinator compute in an open round of FedMGDA+."""
    member: Any = next(iter(scene.members.values()))
    measure(member)
    scene.reply(member, TrainingPhase(), Result({"loss": member.vector}, {}, {}, 100))
    rows = [member.vector for member in scene.members.values()]
    start = time.process_time()
    K = gram(rows)
    scale = 1 / np.sqrt(np.diag(K))
    weights = min_norm(K * np.outer(scale, scale)).weights
    for _ in combine(weights * scale, rows):
        pass
    return {"member": member.cpu, "coordinator": time.process_time() - start, "up": member.up}


def private_round(scene: Cast, mode: Mode) -> tuple[Step, float]:
    """One private round of FedMGDA+, and the coordinator's CPU seconds."""
    name = "fedavg-n" if mode is Mode.SUM else "fedmgda+"
    scene.specification = document(mode, name)
    conversation = algorithm(name).round(context(scene, mode))
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


def cosine(scene: Cast, step: Step, mode: Mode) -> float:
    """Between the step and the direction from the exact Gram matrix, with the same bounds and the same members."""
    names = [reply.client_id for reply in step.replies]
    vectors = [scene.members[name].vector for name in names]
    K = gram(vectors)
    scale = 1 / np.sqrt(np.diag(K))
    numbers, m = Thresholds(len(scene.members), mode), len(names)
    bounds = np.full(m, max(0.0, 1 / m - 0.5 / m)), np.full(m, min(1 / m + 0.5 / m, max(numbers.cap, 1 / m)))
    weights = min_norm(K * np.outer(scale, scale), lower=bounds[0], upper=bounds[1]).weights
    exact = np.concatenate(list(combine(weights * scale, vectors)))
    assert step.combined is not None
    return float(exact @ step.combined / np.linalg.norm(exact) / np.linalg.norm(step.combined))


def measured(m: int, d: int, mode: Mode, *, lost: bool) -> dict[str, float]:
    """One private round."""
    gc.collect()  # a member refers to itself
    gone = {(SessionStage.DEAL.value, 0): ["silo-01"], (SessionStage.MASK.value, 0): ["silo-02"]} if lost else {}
    scene = Measured(cast(m, d, assumed=1).members, lost=gone)
    step, seconds = private_round(scene, mode)
    members: list[Any] = list(scene.members.values())
    return {
        "member_seconds": max(one.cpu for one in members),
        "coordinator_seconds": seconds,
        "up": max(one.up for one in members),
        "down": max(one.down for one in members),
        "cosine": cosine(scene, step, mode) if mode is not Mode.SUM else 1.0,
    }


def flower(python: str, m: int, d: int, *, lost: bool) -> dict[str, Any]:
    """One round of Flower's SecAgg+."""
    command = [python, str(FLOWER), str(m), str(d), "2" if lost else "0"]
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=quiet).stdout)
    return found


def best(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The least of each number: of seconds, what the machine allows; of cosines, the worst."""
    return {name: min(run[name] for run in runs) for name in runs[0]}


def rows(sizes: Sequence[tuple[int, int]], python: str | None) -> Iterator[dict[str, Any]]:
    """One row for each size, mode and loss of members."""
    for m, d in sizes:
        repeats = 3 if m * d < 10**6 else 1
        plain = best([open_round(Measured(cast(m, d).members)) for _ in range(repeats)])
        for mode in [*(mode.value for mode in Mode), "SecAgg+"]:
            for lost in (False, True) if m >= 10 else (False,):
                row: dict[str, Any] = {"m": m, "d": d, "mode": mode, "lost": lost}
                if mode != "SecAgg+":
                    row |= best([measured(m, d, Mode(mode), lost=lost) for _ in range(repeats)])
                elif python is not None:
                    row |= best([flower(python, m, d, lost=lost) for _ in range(repeats)])
                else:
                    yield row
                    continue
                yield row | {
                    "member_open_seconds": plain["member"],
                    "coordinator_open_seconds": plain["coordinator"],
                    "up_ratio": row["up"] / plain["up"],
                }


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    begin = f"{row['m']:>3} {row['d']:>11,} {row['mode']:<9} {'two' if row['lost'] else '-':<4} "
    if "up" not in row:
        return begin + "not measured"
    seconds = " ".join(f"{row[name]:>7.3f}" for name in SECONDS)
    direction = f"cosine {row['cosine']:.4f}" if row.get("cosine", 1.0) < 1 else ""
    return begin + f"{seconds}  up {row['up']:>11,} x {row['up_ratio']:.3f}  down {row['down']:>9,}  {direction}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flower", metavar="PYTHON", help="of an environment with Flower; see docs/benchmarks.md")
    parser.add_argument("--size", type=int, nargs=2, action="append", metavar=("M", "D"), help="members, parameters")
    parser.add_argument("--quick", action="store_true", help="m = 10 and 20, d = 38 thousand")
    parser.add_argument("--smallest", action="store_true", help="m = 8, d = 1000")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    sizes = [(m, d) for d in (38_000, 800_000, 11_200_000) for m in (10, 20, 50)]
    if options.quick:
        sizes = [(10, 38_000), (20, 38_000)]
    if options.smallest:
        sizes = [(8, 1_000)]
    sizes = options.size or sizes
    if options.json:
        json.dump({"rounds": list(rows(sizes, options.flower))}, sys.stdout)
        print()
        return
    print("CPU seconds and bytes of the dearest member and of the coordinator, without training; x: of an open round")
    print(f"{'m':>3} {'d':>11} {'mode':<9} {'lost':<4} {'member':>7} {'open':>7} {'coord.':>7} {'open':>7}")
    for row in rows(sizes, options.flower):
        print(shown(row), flush=True)


if __name__ == "__main__":
    main()
