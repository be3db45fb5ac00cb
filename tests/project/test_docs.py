"""What the documents say is so: reasons, keys, commands, links."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.aggregation.registry import algorithm
from federation.record.metric_definitions import DEFINITIONS, Basis, basis
from federation.refusals import REASONS
from federation.spec.run_spec import RunSpec
from fedpareto.cli.reasons.known_reasons import REFUSED, known
from storage.states import AlertKind
from tests.command_lines import problem
from tests.paths import DOCS, EXAMPLES, ROOT
from tests.project.scene import rows, tool
from worker.config import WorkerConfig
from worker.home import WorkerHome
from worker.site.policy_file import Policy

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("research/*.md"), *ROOT.glob("docs/**/*.md")])
PROSE = {path: path.read_text() for path in DOCUMENTS}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")

FOLDERS = ("start", "operate", "member", "research", "reference")
PAGES = [path for path in DOCUMENTS if path.parent.parent == DOCS and path.parent.name in FOLDERS]

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(text: str, *languages: str) -> Iterator[str]:
    return (body for language, body in FENCE.findall(text) if language in languages)


def test_tables_that_repeat_the_code_are_those_of_the_code() -> None:
    assert list(tool("tables").differing()) == [], "python tools/tables.py writes them"


def test_a_table_that_was_edited_is_written_anew_and_one_that_is_missing_is_refused() -> None:
    page, tables = "reference/run-spec.md", tool("tables")
    text = (DOCS / page).read_text()
    assert tables.written(page, text.replace("| `rounds` | required |", "| `rounds` | `30` |")) == text
    with pytest.raises(ValueError, match=r"run-spec\.md .* it needs the document, algorithm"):
        tables.written(page, text.replace("tables.py: train -->", "tables.py: trained -->"))


def test_each_reason_of_a_refusal_is_explained() -> None:
    explained = [reason for row in known() if row.said_by == REFUSED for reason in row.reasons if ":" not in reason]
    assert explained == list(REASONS)


def test_the_page_on_verification_says_of_each_metric_whether_it_is_verified() -> None:
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| (yes|no) \|$", PROSE[DOCS / "reference/verify.md"], re.MULTILINE)
    names = [
        (re.escape(name).replace(r"\.\.\.", ".+"), told) for row, told in rows for name in re.findall("`(.+?)`", row)
    ]
    for metric in DEFINITIONS:
        found = [told for name, told in names if re.fullmatch(name, metric)]
        assert found == ["no" if basis(metric) is Basis.COORDINATOR else "yes"], metric


def test_the_example_of_a_policy_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(next(blocks(PROSE[DOCS / "member/your-site.md"], "toml")))
    assert Policy.load(path).restore == "ask"


def test_the_table_of_formats_names_every_file_of_a_home(tmp_path: Path) -> None:
    table = "".join(row.name for row in tool("formats").formats())
    files = [path.name for path in vars(WorkerHome(tmp_path)).values() if path != tmp_path]
    missing = [name for name in files if name not in table and not name.endswith("rotations")]
    assert not missing, "tools/formats.py: give each of these a row"


def test_the_examples_of_a_workers_file_are_accepted(tmp_path: Path) -> None:
    for text in blocks(PROSE[DOCS / "member/worker-file.md"], "toml"):
        path = tmp_path / "worker.toml"
        path.write_text(text)
        assert WorkerConfig.load(path).tasks


def test_the_page_of_alerts_lists_every_kind() -> None:
    kinds = re.findall(r"^\| `([A-Z_]+)` \|", (DOCS / "operate/alerts.md").read_text(), re.MULTILINE)
    assert sorted(kinds) == sorted(AlertKind)


@every_document
def test_run_specifications_in_documents_are_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # for the plug-ins that they name
    for text in blocks(PROSE[path], "toml"):
        if "rounds" in tomllib.loads(text):
            rule = RunSpec.parse(text).algorithm
            algorithm(rule.name, rule.hyperparameters)


# What stands before our command in a shell line: a prompt, a path, a service of compose.yaml (whose entry point it is).
BEFORE = re.compile(
    r"^(\$ )?((?:[\w./]*/)?fedpareto|docker compose exec coordinator fedpareto|docker compose run( -\S+)* [a-z]\S*) "
)


def command_lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", " ", block).splitlines():
        for part in re.split(r" [|>] | && ", line):
            if BEFORE.match(part.strip()):
                yield BEFORE.sub("fedpareto ", part.strip())


@every_document
def test_commands_in_documents_are_ones_that_the_command_line_takes(path: Path) -> None:
    text = PROSE[path]
    problems = [problem(line) for block in blocks(text, "console", "sh", "bash") for line in command_lines(block)]
    for mention in re.findall(r"(?<!`)`(fedpareto [^`]+)`(?!`)", FENCE.sub("", text)):
        problems.append(problem(" ".join(mention.split()), complete=False))
    assert not [found for found in problems if found]


def defined_in(path: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def test_every_threat_names_tests_that_exist() -> None:
    threats = rows(PROSE[DOCS / "reference/security.md"], "Threats", "Threat")
    assert len(threats) > 50
    for row in threats:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, test in named:
            assert test in defined_in(ROOT / path), (path, test)


def test_every_value_that_a_party_may_choose_names_a_test_that_exists_or_a_decision() -> None:
    title = "7. What each party can choose, and what prevents its abuse"
    values = rows(PROSE[DOCS / "reference/private-protocol.md"], title, "Value")
    assert len(values) > 30
    for row in values:
        named = re.findall(r"`((?:\w+/)*test_\w+\.py)(?:::(\w+))?`", row)
        assert named or "*decision*" in row.lower(), row
        for path, test in named:
            assert not test or test in defined_in(ROOT / "tests" / path), (path, test)
            assert (ROOT / "tests" / path).exists(), path


def test_every_reason_to_refuse_is_expected_by_a_test() -> None:
    others = {"test_docs.py", "test_explained_reasons.py"}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path.name not in others)
    unexpected = [reason for reason in REASONS if not re.search(rf"[\"']{reason}(?![\w-])", sources)]
    assert not unexpected


def test_the_index_has_one_line_for_each_page_in_the_order_of_the_folders() -> None:
    rows = re.findall(r"^\| \[.+\]\((\w+)/([\w-]+\.md)\) \| .+ \|$", PROSE[DOCS / "README.md"], re.MULTILINE)
    assert sorted(rows) == [(path.parent.name, path.name) for path in PAGES]
    assert list(dict.fromkeys(folder for folder, _ in rows)) == list(FOLDERS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_first_sentence_of_a_page_says_for_whom_it_is_and_what_they_can_do_after_it(path: Path) -> None:
    first = " ".join(PROSE[path].split("\n\n")[1].split())
    assert re.match(r"This page is for [^.]+; after it you can ", first)


def test_the_page_of_benchmarks_is_short() -> None:
    assert len(PROSE[DOCS / "operate/benchmarks.md"].split()) <= 2500


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_document
def test_links_inside_the_project_lead_somewhere(path: Path) -> None:
    dead = []
    for target in LINK.findall(FENCE.sub("", PROSE[path])):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        inside = place.exists() and ROOT in (place, *place.parents)
        if not inside or (anchor and anchor not in anchors(place.read_text())):
            dead.append(target)
    assert not dead
