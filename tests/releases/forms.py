"""What a version reads and writes, from the version that runs this program: `python forms.py DIRECTORY`.

It writes `wire.binpb`, the descriptors of the wire contract, and `forms.json`: of each kind of document that people
write, one with the fewest keys, one with all, and their values; and the fields of the records that are kept as JSON.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import tomli_w
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from pydantic import BaseModel

_RUN = 'name = "run"\ntask = "digits"\nrounds = 2\n'
_OPTIONS = """\
algorithm = { name = "afl", gamma_lambda = 0.2 }
server.optimizer = "adam"
train = { optimizer = "adamw", round_schedule = "decay", step_schedule = "cosine" }
privacy = { secure = "sum", disclose = ["loss"] }
"""
# Each kind of document, and one with the fewest keys.
DOCUMENTS = (
    ("RunSpec", _RUN),
    ("RunSpec", _RUN + _OPTIONS),
    ("Settings", 'federation_id = "federation"\n'),
    ("Policy", "[privacy.digits]\nnoise = 1.0\nepsilon = 1.0\n[secure.tasks.digits]\n"),
    ("WorkerConfig", "format = 1\n"),
)
# What is kept as JSON: in columns of the database, and in a worker's memory of a private round.
RECORDS = (
    *("MetricKind", "RunMemory", "VoidRecord", "ConversationFacts", "ObjectivesRecord", "NoiseBudget"),
    *("SamplePrivacy", "WorkBounds", "Origin", "Unshared"),
)
# The modules of these classes, which may move.
PLACES = {
    "RunSpec": "federation.spec.run_spec",
    "Settings": "coordinator.settings",
    "Policy": "worker.site.policy_file",
    "WorkerConfig": "worker.config",
    "MetricKind": "federation.spec.task_metrics",
    "RunMemory": "storage.records",
    "VoidRecord": "storage.records",
    "ConversationFacts": "storage.records",
    "ObjectivesRecord": "storage.records",
    "NoiseBudget": "federation.spec.accounting",
    "SamplePrivacy": "federation.spec.accounting",
    "WorkBounds": "federation.work.work_bounds",
    "Origin": "federation.work.base",
    "Unshared": "federation.spec.sharing",
}


def named(name: str) -> Any:
    """The class of a name."""
    return getattr(import_module(PLACES[name]), name)


def taken(section: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section without the keys that have no effect beside the others, and are refused."""
    unused = {key for key, (option, allowed) in getattr(section, "takers", {}).items() if values[option] not in allowed}
    chosen = {key: value for key, value in values.items() if key not in unused}
    for key, value in chosen.items():
        kind = section.model_fields[key].annotation if key in section.model_fields else None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            chosen[key] = taken(kind, value)
    return chosen


def values_of(name: str, text: str) -> dict[str, Any]:
    """The values of a document, as the version that runs this reads it."""
    found: dict[str, Any] = named(name).model_validate(tomllib.loads(text)).model_dump(mode="json", exclude_none=True)
    return found


def fields_of(kind: Any) -> dict[str, bool]:
    """The fields of a record, and whether each has a default."""
    return {field.name: field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind)}


def descriptors() -> FileDescriptorSet:
    """The descriptors of the wire contract."""
    import federation.v1

    found = FileDescriptorSet()
    for path in sorted(Path(federation.v1.__file__).parent.glob("*_pb2.py")):
        import_module(f"federation.v1.{path.stem}").DESCRIPTOR.CopyToProto(found.file.add())
    return found


def main(directory: Path) -> None:
    documents = []
    for name, fewest in DOCUMENTS:
        values = values_of(name, fewest)
        every = tomli_w.dumps(taken(named(name), values))
        assert values_of(name, every) == values, name
        documents.append({"kind": name, "fewest": fewest, "every": every, "values": values})
    kept = {"documents": documents, "records": {name: list(fields_of(named(name))) for name in RECORDS}}
    (directory / "forms.json").write_text(json.dumps(kept, indent=1) + "\n")
    (directory / "wire.binpb").write_bytes(descriptors().SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
