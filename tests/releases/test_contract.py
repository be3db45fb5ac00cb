"""What 0.1.0 reads and writes is still read and written so: messages, documents, records and tables only grow."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorSet
from sqlalchemy import JSON

from federation.aggregation.rules.afl import AFL
from storage.columns import Records
from storage.models import Base
from tests.paths import ROOT
from tests.releases.forms import RECORDS, descriptors, fields_of, named, values_of
from tests.releases.versions import RELEASE
from verification.run import expected_state

KEPT = json.loads((RELEASE / "forms.json").read_text())
DOCUMENTS = pytest.mark.parametrize("document", KEPT["documents"], ids=lambda one: one["kind"])


def parts(found: FileDescriptorSet) -> Iterator[str]:
    """Every message, field, value, service and method, with what may not change of it."""

    def of_enum(enum: EnumDescriptorProto, place: str) -> Iterator[str]:
        for value in enum.value:
            yield f"value {place}.{enum.name}.{value.name} = {value.number}"

    def of_message(message: DescriptorProto, place: str) -> Iterator[str]:
        name = f"{place}.{message.name}"
        yield f"message {name}"
        for one in message.field:
            inside = message.oneof_decl[one.oneof_index].name if one.HasField("oneof_index") else ""
            kind = f"{one.type} {one.label} {one.type_name} {inside} {one.proto3_optional}"
            yield f"field {name}.{one.name} = {one.number}: {kind}"
        for enum in message.enum_type:
            yield from of_enum(enum, name)
        for nested in message.nested_type:
            yield from of_message(nested, name)

    for file in found.file:
        for message in file.message_type:
            yield from of_message(message, file.package)
        for enum in file.enum_type:
            yield from of_enum(enum, file.package)
        for service in file.service:
            for method in service.method:
                kind = f"{method.input_type} {method.output_type} {method.client_streaming} {method.server_streaming}"
                yield f"method {file.package}.{service.name}.{method.name}: {kind}"


def lost(now: FileDescriptorSet) -> set[str]:
    """What a contract no longer has of that of 0.1.0."""
    before = FileDescriptorSet.FromString((RELEASE / "wire.binpb").read_bytes())
    return {*parts(before)} - {*parts(now)}


def test_every_part_of_the_wire_contract_is_still_there() -> None:
    assert len([*parts(descriptors())]) > 500
    assert lost(descriptors()) == set()


def message(found: FileDescriptorSet, name: str) -> Any:
    return next(one for file in found.file for one in file.message_type if one.name == name)


def field_of(found: FileDescriptorSet, name: str, one: str) -> Any:
    return next(item for item in message(found, name).field if item.name == one)


def value_goes(found: FileDescriptorSet) -> None:
    next(enum for file in found.file for enum in file.enum_type).value.pop()


def method_goes(found: FileDescriptorSet) -> None:
    next(file for file in found.file if file.name.endswith("admin.proto")).service[0].method.pop()


CHANGES: dict[str, Callable[[FileDescriptorSet], object]] = {
    "message federation.v1.Hello": lambda found: message(found, "Hello").ClearField("name"),
    "field federation.v1.Hello.device": lambda found: field_of(found, "Hello", "device").ClearField("name"),
    "field federation.v1.ReplyManifest.samples": lambda found: field_of(found, "ReplyManifest", "samples").ClearField(
        "number"
    ),
    "field federation.v1.ReplyManifest.software": lambda found: field_of(found, "ReplyManifest", "software").ClearField(
        "type"
    ),
    "field federation.v1.ReplyManifest.rows": lambda found: field_of(found, "ReplyManifest", "rows").ClearField(
        "label"
    ),
    "field federation.v1.AttendResponse.assignment": lambda found: field_of(
        found, "AttendResponse", "assignment"
    ).ClearField("oneof_index"),
    "value federation.v1.": value_goes,
    "method federation.v1.Admin.": method_goes,
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_part_of_the_wire_contract_that_goes_or_changes_is_found(part: str) -> None:
    changed = descriptors()
    CHANGES[part](changed)
    assert any(one.startswith(part) for one in lost(changed))


def test_what_is_added_to_the_wire_contract_is_no_loss() -> None:
    added = descriptors()
    message(added, "Hello").field.add(name="town", number=99, type=9, label=1)
    assert lost(added) == set()


def grown(before: Any, now: Any) -> bool:
    """True if a value has all that it had before; sections may have more keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and grown(value, now[name]) for name, value in before.items())
    return bool(before == now)


@DOCUMENTS
@pytest.mark.parametrize("form", ["fewest", "every"])
def test_a_document_of_the_release_has_the_same_values_for_all_keys_that_it_had(
    document: dict[str, Any], form: str
) -> None:
    assert grown(document["values"], values_of(document["kind"], document[form]))


@pytest.mark.parametrize(
    ("kind", "file"),
    [("Settings", "coordinator.toml"), ("WorkerConfig", "worker.toml"), ("Policy", "policy.toml")],
)
def test_the_settings_that_the_release_does_not_know_are_named_where_one_goes_back_to_it(kind: str, file: str) -> None:
    [document] = [one for one in KEPT["documents"] if one["kind"] == kind]
    page = (ROOT / "docs/operate/upgrading.md").read_text().partition("\n## Going back\n")[2]
    [cells] = [line.split("|")[2] for line in page.splitlines() if line.startswith(f"| `{file}` |")]
    added = set(values_of(kind, document["fewest"])) - set(document["values"])
    assert set(re.findall(r"`\[?(\w+)\]?`", cells)) == added
    assert len(added) > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("seed"),
        lambda values: values["train"].pop("epochs"),
        lambda values: values["evaluate"].update(every=2),
    ],
    ids=["a key", "a key of a section", "a default"],
)
def test_a_key_that_goes_and_a_default_that_changes_are_found(change: Callable[[dict[str, Any]], object]) -> None:
    before = KEPT["documents"][0]["values"]
    now = json.loads(json.dumps(before))
    assert grown(before, now | {"town": ""})
    change(now)
    assert not grown(before, now)


def test_a_key_without_a_default_is_found() -> None:
    (document,) = (one for one in KEPT["documents"] if one["kind"] == "Settings")
    changed: Any = type("Changed", (named("Settings"),), {"__annotations__": {"town": str}})
    with pytest.raises(ValueError, match=r"town\n  Field required"):
        changed.model_validate(tomllib.loads(document["fewest"]))


def unread(before: list[str], now: dict[str, bool]) -> set[str]:
    """The fields of a record that a row of 0.1.0 has and that are gone, and those that it lacks without a default."""
    return {name for name in before if name not in now} | {
        name for name, has_default in now.items() if name not in before and not has_default
    }


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_kept_as_json_reads_what_the_release_has_written(name: str) -> None:
    assert unread(KEPT["records"][name], fields_of(named(name))) == set()


@dataclass(frozen=True)
class Grown:
    """A record with more fields."""

    name: str
    town: str
    street: str = ""
    houses: list[str] = field(default_factory=list)


def test_a_field_of_a_record_that_goes_or_has_no_default_is_found() -> None:
    assert unread(["name", "gone"], fields_of(Grown)) == {"gone", "town"}


def test_every_record_in_a_column_is_compared() -> None:
    kinds = {
        column.type.kind
        for table in Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, Records)
    }
    assert kinds
    assert kinds <= {named(name) for name in RECORDS}
    assert any(isinstance(column.type, JSON) for table in Base.metadata.tables.values() for column in table.columns)


class Counting(AFL):
    """AFL of a later version, whose state has one more key."""

    added_state = frozenset({"rounds"})


def test_a_key_that_a_later_version_adds_to_the_state_of_a_rule_may_be_absent_until_it_was_there() -> None:
    older, newer = {"lambda": {"ann": 1.0}}, {"lambda": {"ann": 1.0}, "rounds": 2}
    for before in ({}, older):
        assert expected_state(Counting(), newer, before, older) == older
        assert expected_state(Counting(), newer, before, newer) == newer
    assert expected_state(Counting(), newer, newer, older) == newer
    assert expected_state(AFL(), newer, older, older) == newer
    assert expected_state(Counting(), newer, older, "no state") == older
