"""The release that is kept, unpacked, and this tree and a made-up next version, which take its data along."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.few import few_of
from tests.releases.next_version import next_version
from tests.releases.versions import RELEASE, Version, of_tree, of_wheel


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data that 0.1.0 has made; tests change copies."""
    directory = tmp_path_factory.mktemp("data")
    with tarfile.open(RELEASE / "data.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    """The release, from its wheel."""
    (wheel,) = RELEASE.glob("*.whl")
    with of_wheel(wheel, tmp_path_factory.mktemp("old")) as version:
        yield version


@pytest.fixture(scope="module", params=few_of(["today", "next"], "today"))
def later(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    """This tree, and a made-up next version."""
    directory = tmp_path_factory.mktemp(request.param)
    with of_tree(directory) if request.param == "today" else next_version(directory) as version:
        yield version
