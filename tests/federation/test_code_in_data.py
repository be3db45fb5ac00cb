"""Data is data: nothing that is read runs as code, and no message advises to run it."""

import ast
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from federation.files.npz import NpzError, read_npz
from tests.paths import ROOT
from verification.errors import VerificationError
from verification.replay import parse_gram

PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "fedpareto")
EXECUTE = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}

SUSPECT = re.compile(r"pickle|marshal|shelve|dill|joblib|eval\(|exec\(|\.load\(")


def executed(source: str) -> list[str]:
    """What in a module's source could run code from the data that it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in EXECUTE]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in EXECUTE:
                found.append(module)
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load"), keywords=keywords):
                given = {word.arg: word.value.value for word in keywords if isinstance(word.value, ast.Constant)}
                if given.get("allow_pickle") or (module in ("torch", "yaml") and not given.get("weights_only")):
                    found.append(f"{module}.load")
    return found


def test_no_module_unpickles_or_evaluates_what_it_reads() -> None:
    root = ROOT
    modules = {path: path.read_text() for package in PACKAGES for path in (root / package).rglob("*.py")}
    assert len(modules) > 300
    suspects = {str(path): source for path, source in modules.items() if SUSPECT.search(source)}
    assert suspects
    # It runs what its own caller asks for, as `python -c` does, and reads none of it.
    caller = str(root / "fedpareto/processes/forked.py")
    # It hands a data set to processes that it has started itself, through their own pipes.
    loader = str(root / "federation/training/stored.py")
    found_by_path = {path: found for path, source in suspects.items() if (found := executed(source))}
    assert found_by_path == {caller: ["exec"], loader: ["pickle"]}


def test_the_search_for_what_unpickles_finds_it() -> None:
    assert executed("import pickle, os") == ["pickle"]
    assert executed("from marshal import loads\nnp.load(f, allow_pickle=True)\ntorch.load(f)\neval(x)") == [
        "marshal",
        "np.load",
        "torch.load",
        "eval",
    ]
    assert executed("np.load(f, allow_pickle=False)\ntorch.load(f, weights_only=True)\njson.load(f)") == []


# ---- files of arrays

ROWS = np.arange(12.0).reshape(3, 4)


def header(shape: str, spaces: int = 0) -> bytes:
    """The beginning of a .npy file."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode() + b" " * spaces + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive(path: Path, member: bytes) -> None:
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("updates.npy", member)


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    np.savez_compressed(path, updates=ROWS)
    whole = path.with_suffix(".npz")
    path.write_bytes(change(whole.read_bytes()))


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "PyTorch": (lambda path: torch.save({"updates": torch.ones(3)}, path), "it is a PyTorch file, not an .npz file"),
    "old PyTorch": (
        lambda path: torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False),
        "it is a pickle, as older versions of PyTorch",
    ),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(ROWS)), "it is a pickle"),
    "text": (lambda path: path.write_text("loss, 1.5\nπ"), "it is a text, not an .npz file: np.savez writes one"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "one array": (lambda path: path.write_bytes(header("(3, 4)") + ROWS.tobytes()), "it is a single array of NumPy"),
    "cut off": (lambda path: changed(path, lambda data: data[:-40]), "a zip archive that is damaged or incomplete"),
    "damaged": (
        lambda path: changed(path, lambda data: data[:60] + b"\xff\xff\xff" + data[63:]),
        "its array 'updates' is damaged",
    ),
    "other files": (lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "x"), "a zip archive of other files"),
    "no array": (lambda path: archive(path, b"nothing of NumPy"), "its array 'updates' is damaged"),
    "a long header": (lambda path: archive(path, header("(3, 4)", 30_000) + ROWS.tobytes()), "'updates' is damaged"),
    "too large": (lambda path: archive(path, header("(1000000000000, 9)")), "too large for the memory of this machine"),
    "objects": (
        lambda path: archive(path, header("(1,)").replace(b"'<f8'", b"'|O' ") + pickle.dumps(["x"])),
        "its array 'updates' holds Python objects, which are not read, since they can run code",
    ),
}


@pytest.mark.parametrize(("write", "words"), WRONG.values(), ids=WRONG)
def test_a_file_of_another_kind_is_named_and_nobody_is_told_to_unpickle_it(
    tmp_path: Path, write: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "file"
    write(path)
    with pytest.raises(NpzError) as caught:
        read_npz(path)
    assert words in str(caught.value)
    assert not any(word in str(caught.value).lower() for word in ("allow_pickle", "unsafe", "trust"))


def test_nobody_is_told_to_trust_the_matrix_of_a_bundle() -> None:
    with pytest.raises(VerificationError, match=r"^the Gram matrix is not a .npy file of version 1.0$"):
        parse_gram(header("(1, 1)", 30_000) + bytes(8))


def test_arrays_are_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        np.savez(file, updates=ROWS, samples=np.arange(3))
    assert {name: array.tolist() for name, array in read_npz(path).items()} == {
        "updates": ROWS.tolist(),
        "samples": [0, 1, 2],
    }
    assert read_npz(path, ["samples"]).keys() == {"samples"}
    with pytest.raises(NpzError, match="it has no array 'losses'; there are updates, samples"):
        read_npz(path, ["losses"])
