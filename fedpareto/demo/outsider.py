"""The fifth act: an outsider verifies a run from one file, and finds one changed byte."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fedpareto.demo.hospitals import TWO, Hospitals


@dataclass(frozen=True)
class Verification:
    """The results of `fedpareto verify`.

    Attributes:
        file: the record of the run.
        size: its size in bytes.
        verified: True if everything in it was verified.
        rounds: the number of verified rounds.
        changed: the name of the entry with the changed byte.
        wrong: the error that names the change; empty if the change was not detected.
    """

    file: str
    size: int
    verified: bool
    rounds: int
    changed: str
    wrong: str


def verification(stage: Hospitals, run: str) -> Verification:
    """Writes the record of a run to a file, verifies it, changes one byte and verifies it again."""
    file = stage.directory / f"{run}.fedpareto"
    stage.admin("bundle", run, "--out", str(file), "--payloads", "--yes")
    honest = json.loads(stage.fedpareto("verify", str(file), "--json"))
    forged = file.with_name(f"{run}-changed.fedpareto")
    changed = change_a_byte(file, forged)
    refused = json.loads(stage.fedpareto("verify", str(forged), "--json", code=1))
    return Verification(
        str(file), file.stat().st_size, honest["verified"], len(honest["rounds"]), changed, refused["wrong"]
    )


def change_a_byte(file: Path, forged: Path) -> str:
    """Copies a record with one bit of its middle round changed, in a reply of a hospital; returns the entry's name."""
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as entries:
        rounds = sorted(name for name in entries.namelist() if name.startswith("rounds/"))
        name = rounds[len(rounds) // 2]
        content = entries.read(name)
    at = data.index(content) + content.rindex(TWO[0].encode())
    data[at] ^= 1
    forged.write_bytes(data)
    return name
