"""Makes the bundles in tests/vectors/record, what a verifier must say of them, and the keys that sign edits of them.

    python tests/verification/record_vectors.py

Keys and ids are drawn anew each time. `edits.json` is written by hand, and holds for every such set of bundles.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from google.protobuf.message import Message

import tests.conftest  # noqa: F401 - it requires TLS 1.3, before gRPC is imported
from federation.record.bundle import BundleReader
from federation.v1 import common_pb2
from federation.v1.common_pb2 import SignedEnvelope
from storage.states import RunState
from tests.coordinator.rounds.scene import begin
from tests.paths import VECTORS
from tests.stage import Stage, stage
from tests.verification.scene import exported, log_signed_again, signed_again
from verification.run import OpenedRun

DIRECTORY = VECTORS / "record"
NAMES = ("ann", "ben", "cleo")


def open_run(made: Stage) -> str:
    """Two rounds of averages, weighted by samples."""
    more, samples = 'algorithm.prior = "samples"\nselection.minimum = 3', (10, 20, 30)
    run, players = made.begin(*NAMES, name="open", rounds=2, samples=samples, algorithm="fedavg", more=more)
    made.complete(run, *players)
    return run


def interrupted(made: Stage) -> str:
    """One client is revoked after it has replied, one declines; nobody replies in the second round."""
    more = 'selection.minimum = 2\nselection.pool = "enrolled"\nevaluate.every = 0'
    run, players = made.begin(*NAMES, "dan", "eve", name="interrupted", rounds=2, algorithm="fedavg", more=more)
    orders = {player.name: player.order() for player in players}
    players[4].reply(orders["eve"])
    made.revoke("eve", "left the federation")
    players[3].decline(orders["dan"], "no-data")
    for player in players[:3]:
        player.reply(orders[player.name])
    made.wait_round(run, 0)
    for player in players[:4]:
        player.order()
    made.pass_deadline()
    made.wait_state(run, RunState.COMPLETED)
    return run


def multi_gradient(made: Stage) -> str:
    """Two rounds of FedMGDA+ with momentum. Its bundle has no payloads."""
    more = "server = { optimizer = 'momentum', learning_rate = 0.5 }\nselection.minimum = 3\nevaluate.every = 0"
    run, players = made.begin(*NAMES, name="multi-gradient", rounds=2, more=more)
    made.complete(run, *players)
    return run


def objectives(made: Stage) -> str:
    """Two rounds of FSMGDA: each client sends an update for each objective that it serves."""
    run, players = begin(made, "fsmgda", rounds=2)
    made.complete(run, *players.values())
    return run


RUNS = {  # how each run is played, and whether its bundle has payloads
    "open": (open_run, True),
    "interrupted": (interrupted, True),
    "multi-gradient": (multi_gradient, False),
    "objectives": (objectives, True),
}


def write(made: Stage, name: str, directory: Path) -> Path:
    """Plays a run, and writes its bundle."""
    play, payloads = RUNS[name]
    return exported(made, play(made), directory / f"{name}.fedpareto", payloads=payloads)


def outcome(path: Path) -> dict[str, object]:
    """What a verifier finds in a bundle."""
    with BundleReader(path) as bundle:
        run = OpenedRun.of(bundle)
        rounds = [{"round": one.number, "missing": len(one.missing)} for one in run.verify()]
        return {
            "ca": run.keys.ca_fingerprint,
            "members": sorted(run.keys.clients),
            "rounds": rounds,
            "models": run.models,
            "record": run.log.record,
            "entries": len(run.log.entries),
        }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        database = f"sqlite:///{directory}/coordinator.db"
        with stage(Path(directory) / "coordinator", database) as made:
            outcomes = {name: outcome(write(made, name, DIRECTORY)) for name in RUNS}
            home = made.served.home
            keys = {"coordinator": home.signing_key, "log": home.log_key.key}
            keys |= {name: made.players[name].member.files.signing_key for name in NAMES}
            secret = {name: key.private_bytes_raw().hex() for name, key in keys.items()}
    (DIRECTORY / "outcomes.json").write_text(json.dumps(outcomes, indent=1) + "\n")
    (DIRECTORY / "keys.json").write_text(json.dumps(secret, indent=1) + "\n")


if __name__ == "__main__":
    main()


OUTCOMES = json.loads((DIRECTORY / "outcomes.json").read_text())
KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(bytes.fromhex(raw))
    for name, raw in json.loads((DIRECTORY / "keys.json").read_text()).items()
}


def vector(name: str) -> Path:
    return DIRECTORY / f"{name}.fedpareto"


def change(message: Any, edit: dict[str, Any]) -> None:
    """Makes an edit of a round or of the log; `edits.json` has them."""
    path = edit.get("path", [])
    if "sign" in edit:
        log_signed_again(message, KEYS[edit["sign"]])
    elif "find" in edit:  # the first entry of an action
        entry = next(one for one in message.entries if one.action == edit["find"])
        put(entry, edit.get("set", {}))
        if "exchange_with" in edit:  # all that two entries tell, of the same subject if any, except their places
            others = [one for one in message.entries if one.action == edit["exchange_with"]]
            other = next((one for one in others if one.subject == entry.subject), others[0])
            exchange(entry, other)
            for name in ("number", "entry_id", "at", "previous"):
                value = getattr(entry, name)
                setattr(entry, name, getattr(other, name))
                setattr(other, name, value)
    elif "metrics" in edit:
        for name, value in edit["metrics"].items():
            message.metrics.pop(name, None)
            if value is not None:
                message.metrics[name] = float(value)
    elif "remove" in edit:
        del at(message, path[:-1])[path[-1]]
    elif "double" in edit:
        at(message, path[:-1]).append(at(message, path))
    elif "exchange" in edit:
        exchange(at(message, path), at(message, edit["exchange"]))
    elif "manifest" in edit:
        envelope, kind = at(message, path), getattr(common_pb2, edit["manifest"])
        before = SignedEnvelope(key_id=envelope.key_id, signature=envelope.signature)
        signed_again(envelope, kind, KEYS[edit.get("key", "ann")], lambda found: put(found, edit["set"]))
        if "key" not in edit:
            envelope.key_id, envelope.signature = before.key_id, before.signature
    else:
        put(at(message, path), edit["set"])


def at(message: Any, path: list[str | int]) -> Any:
    """The message at a path of fields and places."""
    for step in path:
        message = getattr(message, step) if isinstance(step, str) else message[step]
    return message


def put(message: Message, values: dict[str, Any]) -> None:
    """Gives fields other values, in protobuf's JSON form; null clears a field."""
    for name, value in values.items():
        message.ClearField(name)  # a field of this type
        if value is not None:
            json_format.ParseDict({name: value}, message)


def exchange(one: Message, other: Message) -> None:
    kept = type(one)()
    kept.CopyFrom(one)
    one.CopyFrom(other)
    other.CopyFrom(kept)
