"""Data is data: nothing that is read runs as code."""

import ast
import re

from tests.paths import ROOT

PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "simulation", "experiments", "fedpareto")
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
    assert {path: found for path, source in suspects.items() if (found := executed(source))} == {caller: ["exec"]}


def test_the_search_for_what_unpickles_finds_it() -> None:
    assert executed("import pickle, os") == ["pickle"]
    assert executed("from marshal import loads\nnp.load(f, allow_pickle=True)\ntorch.load(f)\neval(x)") == [
        "marshal",
        "np.load",
        "torch.load",
        "eval",
    ]
    assert executed("np.load(f, allow_pickle=False)\ntorch.load(f, weights_only=True)\njson.load(f)") == []
