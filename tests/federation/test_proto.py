"""The wire contract: the checked-in stubs are what proto/ says, and proto/ explains itself."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2 as descriptors
from grpc_tools import protoc

from tests.paths import ROOT

PROTO = ROOT / "proto"
SOURCES = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))

# Field numbers in descriptor.proto, which make up the path of a source location.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE = 2
SERVICE_METHOD = 2

Place = tuple[tuple[int, ...], str]


def stubs(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / "federation/v1").glob("*_pb2*.py*")}


def test_the_stubs_in_the_tree_are_the_ones_that_proto_generates(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROTO / "generate.py"), str(tmp_path)], check=True)
    fresh, kept = stubs(tmp_path), stubs(ROOT)
    assert sorted(fresh) == sorted(kept)
    stale = [name for name in sorted(fresh) if fresh[name] != kept[name]]
    assert not stale, f"run `make proto`: {stale} differ"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptors.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set"
    include = Path(protoc.__file__).parent / "_proto"
    options = [f"-I{PROTO}", f"-I{include}", "--include_source_info", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *options, *SOURCES]) == 0
    return sorted(descriptors.FileDescriptorSet.FromString(out.read_bytes()).file, key=lambda file: file.name)


def of_enum(enum: descriptors.EnumDescriptorProto, path: tuple[int, ...], name: str) -> Iterator[Place]:
    yield path, name
    for i, value in enumerate(enum.value):
        yield (*path, ENUM_VALUE, i), f"{name}.{value.name}"


def of_message(message: descriptors.DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[Place]:
    if message.options.map_entry:
        return
    yield path, name
    for i, field in enumerate(message.field):
        yield (*path, MESSAGE_FIELD, i), f"{name}.{field.name}"
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            yield (*path, MESSAGE_ONEOF, i), f"{name}.{oneof.name}"
    for i, enum in enumerate(message.enum_type):
        yield from of_enum(enum, (*path, MESSAGE_ENUM, i), f"{name}.{enum.name}")
    for i, nested in enumerate(message.nested_type):
        yield from of_message(nested, (*path, MESSAGE_NESTED, i), f"{name}.{nested.name}")


def of_service(service: descriptors.ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[Place]:
    yield path, service.name
    for i, method in enumerate(service.method):
        yield (*path, SERVICE_METHOD, i), f"{service.name}.{method.name}"


def places(file: descriptors.FileDescriptorProto) -> Iterator[Place]:
    for i, message in enumerate(file.message_type):
        yield from of_message(message, (FILE_MESSAGE, i), message.name)
    for i, enum in enumerate(file.enum_type):
        yield from of_enum(enum, (FILE_ENUM, i), enum.name)
    for i, service in enumerate(file.service):
        yield from of_service(service, (FILE_SERVICE, i))


def test_everything_in_the_contract_has_a_comment(files: list[descriptors.FileDescriptorProto]) -> None:
    assert [file.name for file in files] == SOURCES
    silent = []
    for file in files:
        comments = {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}
        silent += [f"{file.name}: {name}" for path, name in places(file) if not comments.get(path)]
    assert not silent


def test_the_contract_is_one_package_in_proto3_whose_enums_start_unspecified(
    files: list[descriptors.FileDescriptorProto],
) -> None:
    for file in files:
        assert (file.syntax, file.package) == ("proto3", "federation.v1"), file.name
        for enum in file.enum_type:
            assert enum.value[0].name.endswith("_UNSPECIFIED"), enum.name


def test_the_services_are_enrollment_federation_and_admin(files: list[descriptors.FileDescriptorProto]) -> None:
    assert sorted(service.name for file in files for service in file.service) == ["Admin", "Enrollment", "Federation"]
