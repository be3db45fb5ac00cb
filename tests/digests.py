"""Compares what small runs compute with a record of what they computed before: for changes that must not alter results.

    python -m tests.digests record   # writes tests/digests.json
    python -m tests.digests check    # computes everything again and names the first difference of each run

Twelve specifications run on simulated clients ("loop", "stacked", one of them "compiled"), and some of them on a real
federation ("remote": a coordinator and three workers, processes that talk TLS on loopback). Together they contain every
kind of work. Of every round the record has the digests of the model, of the deployed model, of the Gram matrix and of
the clients' scores. A remote run and the simulation by "loop" of the same specification must agree in all of them.

The private run is simulated only. There the members' secrets, the coordinator's keys and the nonces of sessions follow
from the run's seed, so each sketch, share, mask and model is the same each time. Real members draw their secrets at
random, and so does a coordinator its key, because nobody else may know them. Training and the estimate of K are seeded
by these secrets, so the model of a real private run differs each time by design.

The bytes hold for one kind of processor and one version of PyTorch, NumPy and SciPy only, so pytest does not collect
this file. It keeps one record for each; on a machine without one, make it before the change.
"""

import hashlib
import json
import os
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from federation.line.tls import require_tls13

RECORD = Path(__file__).with_suffix(".json")
CLIENTS = ("client-000", "client-001", "client-002")  # of the real federation; a simulation uses the same names

Rounds = list[dict[str, str | None]]
Runs = dict[str, dict[str, Rounds]]  # by specification and fleet

# Of a specification that also runs on the real federation, every client must answer: otherwise the result would
# depend on which client is the fastest.
EVERYBODY = """
rounds = 3
seed = 5
train = { steps = 8, batch_size = 20, learning_rate = 0.1, momentum = 0.5 }
jacobian.quorum = 1.0
simulation = { clients = 3, partition = "dirichlet:2" }
evaluate.splits = ["train", "test"]
"""
ALL_THREE = 'selection = { pool = "enrolled", minimum = 3, quorum = 1.0 }\n'
TWO_OF_THREE = 'selection = { method = "count", count = 2, pool = "enrolled", minimum = 3, quorum = 1.0 }\n'
MORE_CLIENTS = """
rounds = 3
seed = 7
train = { epochs = 1, batch_size = 20, learning_rate = 0.1, proximal_mu = 0.01, weight_decay = 0.001 }
evaluate.every = 2
"""
DIGITS, TWO_DIGITS = 'task = "digits"\n', 'task = "two-digits"\n'

# The fleets of each specification, and its text without the name.
SPECIFICATIONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "fedavg-momentum": (
        ("loop", "stacked", "compiled", "remote"),
        DIGITS
        + EVERYBODY
        + ALL_THREE
        + 'algorithm = { name = "fedavg", prior = "samples" }\nserver.optimiser = "momentum"\n',
    ),
    "fedmgda-plus-attacked": (
        ("loop", "stacked"),
        DIGITS
        + MORE_CLIENTS
        + 'algorithm.name = "fedmgda+"\n'
        + 'selection = { method = "fraction", fraction = 0.5, over_selection = 1.5 }\n'
        + 'simulation = { clients = 8, partition = "shards:2", attackers = 3, attack = "scale=10,bias=5" }\n',
    ),
    "q-fedavg": (
        ("loop", "stacked"),
        DIGITS
        + MORE_CLIENTS
        + 'algorithm.name = "q-fedavg"\nsimulation = { clients = 5, partition = "iid", sizes = "lognormal:0.5" }\n',
    ),
    "median": (
        ("loop", "stacked"),
        DIGITS + MORE_CLIENTS + 'algorithm.name = "median"\nserver.optimiser = "adam"\nserver.learning_rate = 0.01\n',
    ),
    "afl": (("loop", "stacked", "remote"), DIGITS + EVERYBODY + ALL_THREE + 'algorithm.name = "afl"\n'),
    "fedfv": (
        ("loop", "stacked", "remote"),
        DIGITS
        + EVERYBODY.replace("rounds = 3", "rounds = 4")
        + TWO_OF_THREE
        + 'algorithm = { name = "fedfv", tau = 2 }\n',
    ),
    "fedmdfg": (
        ("loop", "stacked", "remote"),
        DIGITS
        + EVERYBODY.replace("rounds = 3", "rounds = 4")
        + TWO_OF_THREE
        + 'algorithm = { name = "fedmdfg", s = 1, tau = 1 }\n',
    ),
    "fsmgda": (("loop", "stacked", "remote"), TWO_DIGITS + EVERYBODY + ALL_THREE + 'algorithm.name = "fsmgda"\n'),
    "fedcmoo-svd-two-way": (
        ("loop", "stacked", "remote"),
        TWO_DIGITS + EVERYBODY + ALL_THREE + 'algorithm = { name = "fedcmoo", sketch = "svd-two-way", budget = 0.5 }\n',
    ),
    "fedmgda-plus-verified": (
        ("loop", "stacked"),
        DIGITS
        + MORE_CLIENTS.replace("epochs = 1", "steps = 4")
        + 'algorithm = { name = "fedmgda+", epsilon = 0.1 }\n'
        + 'selection = { minimum = 8, pool = "enrolled" }\n'
        + 'privacy = { secure = "verified", disclose = ["evaluation"] }\n'
        + 'simulation = { clients = 8, partition = "iid" }\n',
    ),
    "fedcmoo-pref": (
        ("loop", "stacked"),
        TWO_DIGITS
        + MORE_CLIENTS
        + 'algorithm = { name = "fedcmoo-pref", preference = [4.0, 1.0] }\n'
        + 'simulation = { clients = 5, objectives = "cycle:1" }\n',
    ),
    "fedcmoo-count-unbiased": (
        ("loop", "stacked", "remote"),
        TWO_DIGITS + EVERYBODY + TWO_OF_THREE + 'algorithm = { name = "fedcmoo", budget = 0.4, unbiased = true }\n',
    ),
}


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 for a difference, 2 for a call that makes no sense."""
    if arguments not in (["record"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    here = machine()
    records = json.loads(RECORD.read_text()) if RECORD.exists() else []
    before = next((record for record in records if record["machine"] == here), None)
    if arguments == ["check"] and before is None:
        print(f"{RECORD.name} has no record of {here}: make one with the code before the change")
        return 2
    found = all_runs()
    differences = disagreements(found)
    if before is not None and arguments == ["check"]:
        differences += changes(before["runs"], found)
    elif not differences:
        records = [record for record in records if record["machine"] != here] + [{"machine": here, "runs": found}]
        RECORD.write_text(json.dumps(records, indent=1) + "\n")
    count = sum(len(fleets) for fleets in found.values())
    print("\n".join(differences) or f"{count} runs of {len(found)} specifications: {arguments[0]}ed, no difference")
    return 1 if differences else 0


def machine() -> dict[str, str]:
    """What the bytes depend on besides the code."""
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    import torch

    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **{package: version(package) for package in ("torch", "numpy", "scipy")},
    }


def all_runs() -> Runs:
    """Runs every specification on each of its fleets."""
    found: Runs = {name: {} for name in SPECIFICATIONS}
    with tempfile.TemporaryDirectory() as directory:
        for name, (fleets, text) in SPECIFICATIONS.items():
            for fleet in fleets:
                if fleet != "remote":
                    found[name][fleet] = simulated(name, text, fleet, Path(directory) / f"{name}-{fleet}")
        with real_federation(Path(directory)) as federation:
            for name, (fleets, text) in SPECIFICATIONS.items():
                if "remote" in fleets:
                    run = federation.submit(name, text)
                    federation.wait_completed(run)
                    found[name]["remote"] = rounds_of(federation.home, name)
    return found


def simulated(name: str, text: str, backend: str, home: Path) -> Rounds:
    """What each round of a simulation comes to."""
    import fedpareto

    history = fedpareto.simulate(
        f'name = "{name}"\n{text}', backend=backend, device="cpu", threads=1, home=home, progress=lambda _: None
    )
    if history.state != "COMPLETED":
        raise SystemExit(f"{name} ({backend}) ended {history.state}: {history.reason}")
    return rounds_of(home, name)


@contextmanager
def real_federation(directory: Path) -> Iterator[Any]:
    """A coordinator and three workers that hold the parts of the simulated clients."""
    from tests.harness import federation

    with federation(directory) as made:
        made.serve()
        for number, client in enumerate(CLIENTS, 1):
            made.join(client)
            tasks = ("--task", "two-digits", "--partition", "dirichlet:2", "--part", f"{number}/{len(CLIENTS)}")
            made.work(client, *tasks)
        yield made


def rounds_of(home: Path, name: str) -> Rounds:
    """The digests of each round of a run, from the record that its coordinator keeps."""
    with closing(sqlite3.connect(f"file:{home / 'coordinator.db'}?mode=ro", uri=True)) as database:
        rounds = database.execute(
            "select round_id, result_model, deployed_model, gram from rounds join runs using (run_id) "
            "where runs.name = ? order by number",
            (name,),
        ).fetchall()
        scores = {
            round_id: database.execute(
                "select client_id, split, loss, accuracy, others, samples from evaluations "
                "where round_id = ? order by client_id, split",
                (round_id,),
            ).fetchall()
            for round_id, *_ in rounds
        }
    return [
        {
            "model": model,
            "deployed": deployed,
            "gram": gram,
            "scores": hashlib.sha256(json.dumps(scores[round_id]).encode()).hexdigest() if scores[round_id] else None,
        }
        for round_id, model, deployed, gram in rounds
    ]


def disagreements(found: Runs) -> list[str]:
    """Where a remote run and its simulation differ, in words."""
    return [
        difference
        for name, fleets in found.items()
        if "remote" in fleets
        for difference in first_difference(f"{name}, remote beside loop", fleets["loop"], fleets["remote"])
    ]


def changes(before: Runs, found: Runs) -> list[str]:
    """The first difference of each run from the record, in words."""
    differences = [f"{name}: only in one of record and script" for name in sorted(before.keys() ^ found.keys())]
    for name in (name for name in found if name in before):
        fleets = before[name].keys() & found[name].keys()
        differences += [
            f"{name}, {fleet}: only in one of record and script" for fleet in before[name].keys() ^ found[name].keys()
        ]
        for fleet in sorted(fleets):
            differences += first_difference(f"{name}, {fleet}", before[name][fleet], found[name][fleet])
    return differences


def first_difference(what: str, expected: Rounds, found: Rounds) -> list[str]:
    """The first difference between the rounds of two runs, in words; nothing where they are the same."""
    if len(expected) != len(found):
        return [f"{what}: {len(found)} rounds, not {len(expected)}"]
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for key, value in one.items():
            if value != other[key]:
                return [f"{what}: round {number}: {key} {other[key]}, not {value}"]
    return []


def prepare() -> None:
    """Sets the environment of this process and its children to one thread. NumPy, PyTorch and gRPC read it once."""
    for pool in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{pool}_NUM_THREADS"] = "1"
    os.environ |= {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}  # as in tests/conftest.py
    require_tls13()


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
