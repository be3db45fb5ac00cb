"""`fedpareto` is all that documents, examples and owners' code import."""

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

import fedpareto
from tests.paths import DOCS, ROOT

EXAMPLES = sorted((DOCS / "examples").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Names that are public beside those of `fedpareto.__all__`: they need libraries of others.
BESIDE = {
    "fedpareto.adapters.flower": {"FlowerTask"},
    "fedpareto.adapters.lightning": {"LightningTask"},
    "fedpareto.adapters.transformers": {"TransformersTask"},
}
OURS = {"federation", "storage", "coordinator", "worker", "verification", "fedpareto"}


def sources() -> Iterator[tuple[str, str]]:
    for path in EXAMPLES:
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in DOCUMENTS:
        for number, block in enumerate(PYTHON.findall(path.read_text())):
            yield f"{path.relative_to(ROOT)}, block {number}", textwrap.dedent(block)


def imports(source: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The modules that code imports, and the names that it takes from each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names)


def test_documents_and_examples_import_nothing_of_ours_but_public_names() -> None:
    wrong = []
    seen: set[str] = set()
    for place, source in sources():
        for module, names in imports(source):
            if module.partition(".")[0] in OURS:
                public = set(fedpareto.__all__) if module == "fedpareto" else BESIDE.get(module, set())
                wrong += [] if set(names) <= public and public else [place]
                seen |= set(names)
    assert not wrong
    assert {"Task", "Pool", "DataSource", "DataError", "Rule", "Attack", "aggregate", "simulate"} <= seen


def test_a_rule_an_attack_and_a_stage_are_defined_without_importing_pytorch() -> None:
    code = "import sys; from fedpareto import Attack, Rule, Stage, Sketch, aggregate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", fedpareto.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert len((getattr(fedpareto, name).__doc__ or "").partition("\n")[0].split()) >= 3, name


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: fedpareto.task("no-such-task"), ValueError),
        (lambda: fedpareto.RunSpec.parse("rounds = 0"), ValueError),
        (lambda: fedpareto.aggregate("no-such-rule", [[0.0, 1.0]]), ValueError),
        (lambda: fedpareto.aggregate("fedavg", []), ValueError),
        (lambda: fedpareto.simulate("rounds = 0"), ValueError),
        (lambda: fedpareto.simulate("", resume=True), ValueError),
        (lambda: fedpareto.simulate(7), TypeError),  # type: ignore[arg-type]
    ],
)
def test_a_failure_of_the_public_face_is_an_error_of_fedpareto_and_keeps_its_kind(
    call: Callable[[], object], kind: type[Exception]
) -> None:
    with pytest.raises(fedpareto.Error) as raised:
        call()
    assert isinstance(raised.value, kind)
