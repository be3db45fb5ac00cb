"""The wire contract: the checked-in stubs are what proto/ says, and proto/ explains itself."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2 as descriptors
from google.protobuf.message import Message
from grpc_tools import protoc

from tests.paths import ROOT

PROTO = ROOT / "proto"
SOURCES = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))

# The fields of descriptor.proto that hold the parts of a file, of a message, of an enum and of a service.
PARTS = {"message_type", "enum_type", "service", "field", "nested_type", "oneof_decl", "value", "method"}


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


def made(part: Message) -> bool:
    """True for what nobody writes: the messages of maps, and the oneofs of optional fields."""
    options = isinstance(part, descriptors.DescriptorProto) and part.options.map_entry
    return options or (isinstance(part, descriptors.OneofDescriptorProto) and part.name.startswith("_"))


def places(part: Any, path: tuple[int, ...] = (), name: str = "") -> Iterator[tuple[tuple[int, ...], str]]:
    """The paths and names of all parts, as the locations of the source name them."""
    for kind, parts in part.ListFields():
        for place, inner in enumerate(parts if kind.name in PARTS else ()):
            if not made(inner):
                at = (*path, kind.number, place)
                yield at, f"{name}.{inner.name}"
                yield from places(inner, at, f"{name}.{inner.name}")


def test_everything_in_the_contract_has_a_comment(files: list[descriptors.FileDescriptorProto]) -> None:
    assert [file.name for file in files] == SOURCES
    for file in files:
        comments = {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}
        assert [name for path, name in places(file) if not comments.get(path)] == [], file.name


def test_the_contract_is_one_package_in_proto3_whose_enums_start_unspecified(
    files: list[descriptors.FileDescriptorProto],
) -> None:
    for file in files:
        assert (file.syntax, file.package) == ("proto3", "federation.v1"), file.name
        for enum in file.enum_type:
            assert enum.value[0].name.endswith("_UNSPECIFIED"), enum.name


def test_the_services_are_enrollment_federation_and_admin(files: list[descriptors.FileDescriptorProto]) -> None:
    assert sorted(service.name for file in files for service in file.service) == ["Admin", "Enrollment", "Federation"]
