"""`qm9`: eleven properties of small molecules from their geometry: eleven objectives.

Source: R. Ramakrishnan, P. O. Dral, M. Rupp, O. A. von Lilienfeld, Quantum chemistry structures and properties of 134
kilo molecules, Scientific Data 1, 2014; targets and model as LibMTL and FedCMOO have them.
"""

import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Regression
from federation.tasks.published_files import BROKEN, found, lines

FOLDER = Path("QM9") / "raw"
OBJECTIVES = ("mu", "alpha", "homo", "lumo", "r2", "zpve", "u0-atom", "u298-atom", "h298-atom", "g298-atom", "cv")
_NUMBERS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
_WANTED = (
    "expected QM9 as PyTorch Geometric keeps it: gdb9.sdf, gdb9.sdf.csv and uncharacterized.txt. The geometries in "
    "gdb9.sdf cannot be done without: the model takes distances between atoms, which a table of SMILES does not have"
)


class Qm9(Regression):
    """Predict eleven properties of a molecule. `--data DIR` reads DIR/QM9/raw; its files may be .gz."""

    objectives = OBJECTIVES
    evaluation_batch = 200
    network = "molecule_network"
    files = str(FOLDER / "gdb9.sdf")
    hint = f"; {_WANTED}"

    def pool(self, source: DataSource) -> Pool:
        """Molecules, float32 (n, 29, 8) as `MessagePassing` takes them, and their properties, float32 (n, 11).

        Left out are the molecules that uncharacterized.txt names: 130,831 remain. Each property has mean 0 and standard
        deviation 1 over them, so that a loss of 1 is that of always predicting the mean. There are no classes to deal
        by: clients share them at random (iid).
        """
        import torch  # noqa: PLC0415

        folder = self.directory(source) / FOLDER
        names, properties = _properties(folder / "gdb9.sdf.csv")
        left_out = _left_out(folder / "uncharacterized.txt")
        kept = np.array([row for row in range(len(names)) if row + 1 not in left_out], dtype=np.int64)
        if not len(kept):
            raise DataError(f"{folder} holds no molecule that is not left out; {_WANTED}")
        y = properties[kept]
        deviation = y.std(axis=0)
        y = (y - y.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
        x = _molecules(folder / "gdb9.sdf", names)[kept]
        return Pool(torch.from_numpy(x), torch.from_numpy(y.astype(np.float32)))


def _properties(path: Path) -> tuple[list[str], NDArray[np.float64]]:
    """The names of all molecules, in order, and their properties (n, 11)."""
    rows = lines(path, _WANTED)
    header = next(rows)[1].strip().split(",")
    columns = [name.replace("-", "_") for name in OBJECTIVES]
    if header[0] != "mol_id" or not set(columns) <= set(header):
        raise DataError(f"{path}, line 1: not mol_id and then the names of properties; {_WANTED}")
    places = [header.index(name) for name in columns]
    names, values = [], []
    for number, line in rows:
        fields = line.strip().split(",")
        if fields == [""]:
            continue
        try:
            if len(fields) != len(header):
                raise ValueError(f"{len(fields)} fields, not {len(header)}")
            row = [float(fields[place]) for place in places]
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; {_WANTED}") from error
        names.append(fields[0])
        values.append(row)
    properties = np.array(values).reshape(-1, len(columns))
    if not np.isfinite(properties).all():
        raise DataError(f"{path}: a property is not finite; {_WANTED}")
    return names, properties


def _left_out(path: Path) -> set[int]:
    """The numbers, from 1, of molecules that failed the authors' check of consistency."""
    first = (line.split()[0] for _, line in lines(path, _WANTED) if line.strip())
    return {int(word) for word in first if word.isdecimal()}


def _molecules(path: Path, names: list[str]) -> NDArray[np.float32]:
    """(n, 29, 8) all molecules of a structure-data file, which must bear these names."""
    file = found(path)
    if file is None:
        raise DataError(f"no file {path}, nor {path.name}.gz beside it; {_WANTED}")
    from federation.tasks.molecules import ATOMS, COLUMNS  # noqa: PLC0415

    molecules = np.zeros((len(names), ATOMS, COLUMNS), np.float32)
    row = 0
    try:
        # The file is large: read line by line, never as a whole.
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
            stripped = (line.rstrip("\r\n") for line in text)
            for title in stripped:
                if row == len(names) and not title.strip():
                    continue
                if row == len(names) or title.strip() != names[row]:
                    raise ValueError(f"molecule {row + 1} is {title.strip()!r}, in the table of properties it is not")
                _fill(molecules[row], stripped)
                row += 1
    except (IndexError, KeyError, StopIteration, *BROKEN) as error:
        where = f"molecule {row + 1}: {type(error).__name__} {error}"
        raise DataError(f"cannot read {file} ({where}); {_WANTED}") from error
    if row < len(names):
        raise DataError(f"{file} ends after {row} of {len(names)} molecules; {_WANTED}")
    return molecules


def _fill(molecule: NDArray[np.float32], text: Iterator[str]) -> None:
    """Reads one molecule, V2000, from after its title to the line of dollars, into rows of zeros (29, 8)."""
    from federation.tasks.molecules import BONDS, bond  # noqa: PLC0415

    _program, _comment, counts = next(text), next(text), next(text)
    atoms, bonds = int(counts[:3]), int(counts[3:6])
    if not 0 < atoms <= len(molecule):
        raise ValueError(f"{atoms} atoms, not 1 to {len(molecule)}")
    for own in molecule[:atoms]:
        line = next(text)
        own[:4] = _NUMBERS[line[31:34].strip()], float(line[:10]), float(line[10:20]), float(line[20:30])
    if not np.isfinite(molecule).all():
        raise ValueError("a position is not finite")
    slots = [4] * atoms
    for line in islice(text, bonds):
        one, other, kind = int(line[:3]) - 1, int(line[3:6]) - 1, int(line[6:9]) - 1
        if not (0 <= one < atoms and 0 <= other < atoms and one != other and 0 <= kind < BONDS):
            raise ValueError(f"no bond: {line!r}")
        for here, there in ((one, other), (other, one)):
            molecule[here, slots[here]] = bond(kind, there)
            slots[here] += 1
    while next(text) != "$$$$":
        pass
