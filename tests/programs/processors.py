"""Makes and verifies private rounds in a process of its own, whose arithmetic is that of another processor.

    python -m tests.programs.processors make FILE RULES SEEDS   rounds of so many rules, with their evidence
    python -m tests.programs.processors verify FILE             a line for each that is refused, then the architecture

OpenBLAS reads OPENBLAS_CORETYPE when it is loaded, so a fork of a process that has imported NumPy will not do.
"""

import pickle
import sys
from pathlib import Path

from threadpoolctl import threadpool_info

from federation.aggregation.registry import algorithm
from federation.aggregation.secure.repetition import SecureEvidence, UnverifiedSession, verify_secure_step
from federation.secure.thresholds import Mode
from tests.federation.work.scene import Cast, cast, context, document, round_of

RULES = [
    (Mode.PRIVATE, "fedmgda+", 8),
    (Mode.PRIVATE, "fedmgda+", 16),
    (Mode.PRIVATE, "fedmgda+", 32),
    (Mode.PRIVATE, "fedmgda", 16),
    (Mode.PRIVATE, "fedmgda+auto", 10),
    (Mode.PRIVATE, "dual-cone", 10),
    (Mode.PRIVATE, "multi-krum", 10),
    (Mode.PRIVATE, "geometric-median", 10),
    (Mode.VERIFIED, "fedmgda+", 8),
    (Mode.SUM, "fedavg-n", 6),
]


def scene(m: int, seed: int) -> Cast:
    return cast(m, d=100, seed=seed, assumed=1)


def make(file: Path, rules: int, seeds: int) -> None:
    made = []
    for mode, name, m in RULES[:rules]:
        for seed in range(seeds):
            members = scene(m, seed)
            step = round_of(members, mode, name)
            assert step.combined is not None
            replies = (*step.consulted, *step.replies)
            evidence = SecureEvidence(step.sessions, replies, members.asked, step.combined, step.combination.weights)
            made.append((mode, name, m, seed, evidence))
    file.write_bytes(pickle.dumps(made))


def verify(file: Path) -> None:
    for mode, name, m, seed, evidence in pickle.loads(file.read_bytes()):
        members = scene(m, seed)
        members.specification = document(mode, name)
        try:
            verify_secure_step(algorithm(name), members.spec, context(members, mode), evidence)
        except UnverifiedSession as error:
            print(f"{mode} {name} {m} {seed}: {error}")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        verify(Path(sys.argv[2]))
    print(*{info["architecture"] for info in threadpool_info() if info["internal_api"] == "openblas"})
