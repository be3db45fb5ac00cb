"""Keeps a release for the tests of later versions, in tests/releases/VERSION; run it on the commit of the release.

    python tools/keep_release.py

It builds the wheel from this tree, plays runs with it, and writes:

- the wheel, and the SHA-256 of each file;
- `data.tar.xz`: a database, the ledgers of a worker, the bundles of an open and of a private run, a backup,
  the coordinator's directory, whose keys are good for nothing else, and the program that crashes its processes;
- `wire.binpb`: the descriptors of the wire contract, a FileDescriptorSet;
- `forms.json`: for each kind of document that people write, one with the fewest keys and one with all, and their
  values; and the fields of the records that are kept as JSON.
"""

import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from release_check import Release, StepError, build_wheel, check_version  # noqa: E402

from tests.releases.scene import LEDGERS, Scene  # noqa: E402
from tests.releases.versions import RELEASES, Version, of_wheel  # noqa: E402


def keep(root: Path, target: Path) -> None:
    """Builds the wheel of the tree `root`, and writes what is kept into `target`.

    Raises:
        StepError: the version is not that of a release, files name several, or the wheel cannot be built.
    """
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        release = Release(root, place / "built")
        check_version(release)
        build_wheel(release)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.copy(release.wheel, target)
        with of_wheel(release.wheel, place / "packages") as version:
            version.python(ROOT / "tests" / "releases" / "forms.py", target, cwd=place)
            (place / "federation").mkdir()
            data = played(version, place / "federation", place / "data")
        with tarfile.open(target / "data.tar.xz", "w:xz") as archive:
            for path in sorted(data.iterdir()):
                archive.add(path, path.name)
    digests = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(target.iterdir())]
    (target / "SHA256SUMS").write_text("".join(digests))


def played(version: Version, directory: Path, data: Path) -> Path:
    """The data of a federation that has played a run of each kind."""
    data.mkdir()
    with Scene(directory, version) as scene:
        scene.found()
        scene.play()
        for run in ("open", "private"):
            shutil.copy(scene.bundle(run), data)
        scene.fedpareto("coordinator", "backup", str(data / "backup"), "--home", str(scene.home))
        scene.end()
        shutil.copy(ROOT / "tests" / "programs" / "crashing.py", data)
        (data / "ledgers").mkdir()
        for name in LEDGERS:
            shutil.copy(directory / "ann" / name, data / "ledgers")
        kept = ("*.lock", "ports.json", "blobs", "admin")
        shutil.copytree(scene.home, data / "coordinator", ignore=shutil.ignore_patterns(*kept))
    return data


def main() -> int:
    """Writes the directory of the version that this tree has."""
    release = Release(ROOT, ROOT)
    target = RELEASES / release.version
    try:
        keep(ROOT, target)
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size:>9} {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
