"""Writes docs/schemas/output.json, with a JSON schema of the output of each command with --json.

    python tools/schemas.py [--check]

A schema is made from the class or the protobuf message of the document; for other documents it is written below, once.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor as Cpp
from google.protobuf.message import Message

from coordinator.backups.inventory import Content
from federation.attacks.catalogue import ListedAttack
from federation.findings import Finding
from federation.v1 import admin_pb2 as v1
from federation.work.site import FailedSession
from fedpareto.cli.document import MANIFESTS
from fedpareto.cli.reasons.known_reasons import KnownReason
from fedpareto.cli.research.explain import Key
from fedpareto.demo.demo_results import DemoResult, Ended, Served
from fedpareto.demo.outsider import Verification
from fedpareto.demo.private_act import PrivateResult
from fedpareto.experiments.comparison_tables import Table
from fedpareto.sinks.target_threads import Delivered
from verification.counterfactual import Replayed
from verification.own_replies import ReplyOutcome
from worker.ledgers.left_ledger import LeftState
from worker.ledgers.left_reading import LeftReply
from worker.receipts import Receipt
from worker.site.model_origin import ModelOrigin
from worker.site.privacy import PrivacyAccount
from worker.site.roster import Changes
from worker.site.run_requests import RunRequest, Verdict
from worker.work.trial import TrialRound

FILE = Path(__file__).resolve().parent.parent / "docs" / "schemas" / "output.json"
_NAMES: dict[Any, Any] = dict.fromkeys((str, bytes, datetime), "string") | dict.fromkeys((None, NoneType), "null")
_NAMES |= {bool: "boolean", int: "integer", float: ["number", "null"]}  # NaN is null
_CPP_TYPES: dict[int, type] = dict.fromkeys((Cpp.CPPTYPE_STRING, Cpp.CPPTYPE_ENUM, Cpp.CPPTYPE_MESSAGE), str)
_CPP_TYPES |= {Cpp.CPPTYPE_BOOL: bool, Cpp.CPPTYPE_DOUBLE: float, Cpp.CPPTYPE_FLOAT: float}


class Open(dict[str, Any]):
    """An object that may have further keys."""


class Either(tuple[Any, ...]):
    """One of several documents."""


JOINED = {"federation_id": str, "client_id": str}
ROSTER = {"federation_id": str, "digest": str, "members": [{"client_id": str, "key": str}]}
SESSIONS = dict.fromkeys(("sessions", "sessions_allowed", "evaluations", "evaluations_allowed"), int)
ASKED = {**get_type_hints(RunRequest), **get_type_hints(Verdict)}
del ASKED["statistics"]  # of what the model is filled from
VERIFIED = {"round": int, "words": str, "missing": [str], "metrics_not_verified": [str]}
HYPERPARAMETER = {"name": str, "default?": object, "help": str}
RULE = {"name": str, "summary": str, "package?": str, "hyperparameters": [HYPERPARAMETER]}
EXPERIMENT = {
    **dict.fromkeys(("name", "title", "source"), str), "methods": [str], "conditions": [str], "seeds": [int],
    **dict.fromkeys(("rounds", "runs", "quick_runs"), int), "core_seconds": float | None,
    "quick_core_seconds": float | None, "data": [str], "data_there": bool | None, "package?": str,
}  # fmt: skip
RESULTS = {
    "experiment": str, "directory": str, "results": [Open(method=str, condition=str, seed=int)], "tables": [Table],
    "figures": [str], "failed": Mapping[str, str],
}  # fmt: skip
COUNT = Either((int, str))  # or why it is not shown
DESCRIBED = {
    "name": str, "bins?": int, "classes?": int, "range?": [float], "values": int,
    **dict.fromkeys(("missing", "outside", "count"), COUNT), **dict.fromkeys(("mean", "deviation"), float | None),
    "edges": [float], "counts": [COUNT], "quantiles": Mapping[str, float],
}  # fmt: skip
COMPARED = {
    **dict.fromkeys(("run", "name", "task", "algorithm", "state", "reason", "model"), str), "rounds": int,
    "evaluated_round": int | None, "metrics": Mapping[str, float], "undisclosed": [str],
    **dict.fromkeys(("bytes_up", "bytes_down", "seconds"), float),
}  # fmt: skip
BACKUP = {name: kind for name, kind in get_type_hints(Content).items() if name not in ("ca", "server", "restored")}
BACKUP |= {"ca_fingerprint": str}
PERSONAL = {"run": str, "round": int, "file": str, "tensors": [str], "parameters": int}
SQUARE = list[list[float]]
TWO_OFFICERS = v1.RequestActionResponse
RESULT = {"outcome": str, "reason": str, "message": str}  # of one of several members or requests
CLOSING = Either((None, {"paused": bool, "until": str | None}))
NEED = {"sentence": str, "command": str}

# The document of each command that has --json; of a command that prints several, each of them.
DOCUMENTS: dict[str, Any] = {
    "demo": {
        **dict.fromkeys(("directory", "admin_home", "attacker", "attack"), str), "hospitals": [str],
        "other_scanner": [str], "rounds": int, "seed": int, "runs": [DemoResult], "objectives": [Served],
        "private": Either((PrivateResult, None)), "verification": Either((Verification, None)), "sentences": [str],
        "page": str | None, "seconds": Mapping[str, float],
    },
    "new": {"directory": str, "kind": str, "task": str, "files": [str], "commands": [str]},
    "local": {
        **dict.fromkeys(("directory", "admin_home", "split", "measure"), str), "run": Ended,
        "values": Mapping[str, float], "failures": [str],
    },
    "simulate": {
        "run_id": str, "state": str, "reason": str, "seconds": float, "attackers": [str], "warnings": [str],
        "rounds": [Open(round=int, state=str, reason=str, seconds=float | None)],
        "clients": [Open(round=int, client=str, split=str, samples=int)],
        "replies": [Open(round=int, client=str, accepted=bool, reason=str, message=str)],
        "members": [Open(client=str, asked=int, replied=int)],
        "objectives": [Open(round=int, objective=str)], "home": str,
    },
    "console": {"url": str, "address": str, "federation": str},
    "report": {"file": str, "run": str, "rounds": int, "clients": int, "beside": [str]},
    "aggregate": Either((
        {
            "algorithm": str, "coefficients": list[float] | None, "weights": [float], "dropped": [int],
            "diagnostics": Mapping[str, float], "state": Mapping[str, object] | None,
        },
        {"algorithms": [RULE], "stages": [RULE], "common": [HYPERPARAMETER]},
    )),
    "verify": {
        "file": str, "run": str, "verified": bool, "wrong": str, "rounds": [VERIFIED], "members?": Mapping[str, str],
        "log?": {"entries": int, "checkpoint": int, "signed": str}, "record?": str,
        "model?": {"words": str, "missing": str},
    },
    "explain": [KnownReason],
    "coordinator init": {
        **dict.fromkeys(("federation_id", "home", "settings", "admin", "ca", "ca_fingerprint"), str), "hosts": [str]
    },
    "coordinator serve": {
        "federation_id": str, "home": str, "pid": int, "ports": {"federation": int, "enrollment": int}
    },
    "coordinator check": [Finding],
    "coordinator admin": {"name": str, "home": str, "certificate_expires": str, "roles": [str]},
    "coordinator restored": {"restored": str, "runs": Mapping[str, int]},
    "coordinator backup": {**BACKUP, "lost": [str]},
    "coordinator restore": Either(
        (BACKUP, {"made": str, "blobs": int, "runs": Mapping[str, int], "aside": str | None})
    ),
    "coordinator copy-keys": {
        **dict.fromkeys(("federation_id", "source", "home", "settings", "ca_fingerprint"), str), "hosts": [str]
    },
    "coordinator rotate-key": {"federation_id": str, "key": str, "rotations": int},
    "worker join": {**JOINED, "addresses": [str], "home": str, "certificate_expires": str, "approval_pending": bool,
        "key_id": str,
    },
    "worker config": {
        "file": str | None,
        "settings": [{"key": str, "value": Any, "source": str, "meaning": str}],
    },
    "worker run": Either((Open(event=str, time=str, message=str), TrialRound)),
    "worker restored": {
        "pending": Either((None, {"restored": str, "runs": Mapping[str, list[int]]})), "accepted": bool
    },
    "worker privacy": [PrivacyAccount],
    "worker failures": [{"tasks": [str], "failures": [FailedSession], "failing": bool, "reset": bool}],
    "worker attacks": [ListedAttack],
    "worker doctor": [Finding],
    "worker renew": {"client_id": str, "certificate_expires": str},
    "worker rotate-key": {"client_id": str, "key": str, "old_key_until": str},
    "worker export": PERSONAL,
    "worker model": {
        **dict.fromkeys(("file", "run", "name", "task", "state", "step", "digest"), str), "round": int, "size": int,
        "compared": {"round": int | None, "words": str}, "members": int,
        "shares": [{"round": int, "weight": float, "coefficient": float}],
        "scores": [{"split": str, "metric": str, "own": float, "members": int, "mean": float, "worst": float}],
        "numbers": Mapping[str, float], "personal": Either((None, PERSONAL)), "card": str | None,
    },
    "worker runs": [{
        **ASKED, "origin": ModelOrigin | None,
        "statistics": Either((None, {"problem": str, "samples": int, "private": bool, "columns": [DESCRIBED]})),
    }],
    "worker console": {"url": str, "address": str, "home": str},
    "worker status": {
        "sentence": str, "runs": bool, "last_sign": str | None, "closing": CLOSING, "approval": str,
        "leaving": bool, "left": str | None,
        "connection": Either((None, {"connected": bool, "since": str, "problem": str})),
        "work": [{"assignment_id": str, "run_id": str, "round": int, "doing": str, "since": str}],
    },
    "worker pause": {"closing": CLOSING},
    "worker leave": {"left": str | None, "now": bool, "forget": bool},
    "worker resume": {"was_paused": bool},
    "worker copied": {"refused_since": str | None, "set_aside": bool, "goes_on": bool},
    "worker approve": ASKED,
    "worker refuse": ASKED,
    "worker receipts": Either(([Receipt], {"compared": int, "disagreements": [{"ours": Receipt, "theirs": Receipt}]})),
    "worker left": {
        "rows": [{
            "number": int, "private": bool, "work": str, "bytes": int, "numbers": int, "state": LeftState,
            "reason": str, "coefficient": float | None, "replies": [LeftReply],
        }],
        "before": int | None, "earlier": bool,
    },
    "worker log": [
        {"run": str, "task": str, "kind": str, "rounds": int, "accepted": int, "refused": int, "bytes": int}
    ],
    "worker verify": {
        "file": str, "run": str, "client_id": str, "receipts": int, "replies": [ReplyOutcome], "problems": [str],
        "missing": [str], "verified": bool,
    },
    "worker roster card": {**JOINED, "key": str, "card": str},
    "worker roster pin": {**ROSTER, "changes": Changes},
    "worker roster show": {"roster": Either((None, ROSTER)), "tasks": {str: SESSIONS}},
    "admin status": {
        "federation_id": str, "live": bool, "sentence": str, "counts": str, "alerts": [v1.Alert], "needs": [NEED],
        "own_requests": [NEED],
        "running": [{
            **dict.fromkeys(("run_id", "name", "state", "progress", "left", "waits", "verdict"), str),
            "rounds_done": int, "rounds_total": int,
        }],
        "members": [{"client_id": str, "state": str, "since": str}], "ended": [v1.Run], "notices": [v1.Alert],
    },
    "admin alerts": v1.ListAlertsResponse,
    "admin notify": Either((
        {"event": str, "time": str, "message": str, "target?": str, "id?": str, "kind?": str, "state?": str,
         "dropped?": int},
        {"targets": [{"target": str, "taken": bool, "problem": str}]},
    )),
    "admin login": {"name": str, "federation_id": str, "roles": [str], "certificate_expires": str},
    "admin join-string": Either((
        v1.CreateJoinStringResponse,
        {
            "directory": str,
            "results": [{"client_id": str, **RESULT, "file?": str, "expires?": str, "replaced?": int}],
        },
    )),
    "admin join-strings": v1.ListJoinStringsResponse,
    "admin cancel-join-string": v1.CancelJoinStringsResponse,
    "admin clients": v1.ListClientsResponse,
    "admin client": v1.Client,
    "admin tag": v1.TagClientResponse,
    "admin coordinators": v1.ListCoordinatorsResponse,
    "admin admins": v1.ListAdministratorsResponse,
    "admin approve": {
        "results": [
            {"client_id": str, **RESULT, "key_id?": str, "client?": v1.Client, "request?": v1.ActionRequest}
        ],
    },
    "admin revoke": Either((v1.RevokeClientResponse, TWO_OFFICERS)),
    "admin forget": Either((v1.ForgetClientResponse, TWO_OFFICERS)),
    "admin revoke-admin": Either((v1.RevokeAdministratorResponse, TWO_OFFICERS)),
    "admin requests": v1.ListRequestsResponse,
    "admin consent": {"results": [{"request_id": str, **RESULT, "request?": v1.ActionRequest}]},
    "admin withdraw": v1.DecideRequestResponse,
    "admin disk": v1.GetDiskResponse,
    "admin submit": Either((v1.SubmitRunResponse, v1.WatchRunResponse, [Key])),
    "admin runs": v1.ListRunsResponse,
    "admin run": v1.GetRunResponse,
    "admin pause": v1.PauseRunResponse,
    "admin resume": v1.ResumeRunResponse,
    "admin stop": v1.StopRunResponse,
    "admin watch": v1.WatchRunResponse,
    "admin follow": {**dict.fromkeys(("run_id", "name", "state", "reason"), str), "targets": [Delivered]},
    "admin rounds": v1.ListRoundsResponse,
    "admin compare": {"runs": [COMPARED]},
    "admin round": (
        v1.GetRoundResponse, {"cosines": SQUARE, "objectives": Either(((v1.Objectives, {"cosines": SQUARE}), None))}
    ),
    "admin statistics": {
        "format": int, "members": [str], "left_out": [str], "samples": int, "splits": [str], "fewest": int,
        "private?": bool, "columns": [DESCRIBED],
    },
    "admin replies": v1.ListRepliesResponse,
    "admin export": {
        "file": str,
        "digest": str,
        "size": int,
        "initial": bool,
        "round?": int,
        "value?": float,
        "equals?": int,
        "card?": str,
    },
    "admin bundle": {"file": str, "record": str, "size": int, "rounds": int},
    "admin replay": {"run": str, "algorithm": str, "hyperparameters": Mapping[str, object], "rounds": [Replayed]},
    "admin audit": v1.AuditEntry,
    "experiment list": {"experiments": [EXPERIMENT], "unusable": [{"name": str, "error": str, "package?": str}]},
    "experiment run": RESULTS,
    "experiment compare": RESULTS,
    "privacy plan": {
        "protects": str, "noise": float, "epsilon": float, "bound?": float, "delta": float, "rounds": int,
        "steps?": int, "rate?": float, "members?": int, "deviation?": float,
    },
    "data show": {
        "task": str, "partition": str, "sizes": str, "seed": int, "samples": int, "heterogeneity": float | None,
        "groups": bool | None, "stratified": bool,
        "clients": [
            {"client": str, "owner?": str, **dict.fromkeys(("train", "validation", "test"), int),
             "classes": Mapping[str, int], "lacking": Mapping[str, list[str]]}
        ],
    },
    "admin audit verify": {
        "entries": int, "rounds": int, "blobs": int, "problems": [str],
        "checkpoint": {"size": int, "root": str, "created": str},
    },
}  # fmt: skip


class Schemas:
    """Schemas of documents; those of messages are definitions, which each is made once."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}

    def of(self, shape: Any) -> dict[str, Any]:
        """The schema of a class, a message, or a document of `DOCUMENTS`."""
        arguments, origin = get_args(shape), get_origin(shape)
        kind = origin if isinstance(origin, type) else type(shape)
        if shape is object or shape is Any:
            return {}
        if isinstance(shape, Either) or origin in (Union, UnionType):
            return {"anyOf": [self.of(part) for part in arguments or shape]}
        if isinstance(shape, type | NoneType) and shape in _NAMES:
            return {"type": _NAMES[shape]}
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is tuple and Ellipsis not in arguments:
            return {"type": "array", "prefixItems": [self.of(part) for part in arguments]}
        if isinstance(shape, tuple):
            message, changes = shape
            changed = {name: self.of(change) for name, change in changes.items()}
            return self._object(self._fields(message.DESCRIPTOR) | changed)
        if issubclass(kind, Sequence):
            return {"type": "array", "items": self.of((arguments or shape)[0])}
        if issubclass(kind, Mapping) and (arguments or str in shape):
            return {"type": "object", "additionalProperties": self.of(arguments[1] if arguments else shape[str])}
        if isinstance(shape, dict):
            return self._object({name: self.of(part) for name, part in shape.items()}, further=isinstance(shape, Open))
        if issubclass(shape, Message):
            return self._message(shape.DESCRIPTOR)
        if issubclass(shape, Enum):
            return {"enum": [member.value for member in shape]}
        if is_dataclass(shape):
            return self.of(get_type_hints(shape))
        raise TypeError(f"{shape} has no schema")

    def _object(self, properties: Mapping[str, Any], *, further: bool = False) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name.removesuffix("?"): schema for name, schema in properties.items()},
            "required": [name for name in properties if not name.endswith("?")],
            **({} if further else {"additionalProperties": False}),
        }

    def _message(self, descriptor: Any) -> dict[str, Any]:
        name = descriptor.name
        if name not in self.definitions:
            self.definitions[name] = {}  # while its fields are made, which may name it
            self.definitions[name] = self._object(self._fields(descriptor))
        return {"$ref": f"#/$defs/{name}"}

    def _fields(self, descriptor: Any) -> dict[str, Any]:
        return {field.name: self._field(field) for field in descriptor.fields}

    def _field(self, field: Any) -> dict[str, Any]:
        value = self._value(field)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return {"type": "object", "additionalProperties": self._value(field.message_type.fields_by_name["value"])}
        if field.is_repeated:
            return {"type": "array", "items": value}
        return {"anyOf": [value, {"type": "null"}]} if field.has_presence else value

    def _value(self, field: Any) -> dict[str, Any]:
        if field.full_name in MANIFESTS:
            envelope, manifest = self._fields(field.message_type), self._message(MANIFESTS[field.full_name].DESCRIPTOR)
            return self._object({**envelope, "decoded": {"anyOf": [manifest, {"type": "null"}]}})
        if field.message_type is not None and field.message_type.full_name != "google.protobuf.Timestamp":
            return self._message(field.message_type)
        return self.of(_CPP_TYPES.get(field.cpp_type, int))


def text() -> str:
    """The file, with a line for each definition: those of messages, and one of each command by its name."""
    made = Schemas()
    of_commands = {name: made.of(shape) for name, shape in DOCUMENTS.items()}
    definitions = {**dict(sorted(made.definitions.items())), **of_commands}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in definitions.items())
    return f'{{"$schema": "https://json-schema.org/draft/2020-12/schema",\n"$defs": {{\n{lines}\n}}}}\n'


def main() -> None:
    """Writes or compares the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare the file")
    if parser.parse_args().check:
        sys.exit(f"{FILE} is old: python tools/schemas.py" if FILE.read_text() != text() else 0)
    FILE.write_text(text())


if __name__ == "__main__":
    main()
