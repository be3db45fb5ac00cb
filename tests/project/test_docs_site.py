"""The documents as a site: it reads as on a forge, loads nothing from elsewhere, and no link of it is broken."""

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

import fedpareto
from tests.browsers import chromium
from tests.paths import DOCS, ROOT
from tests.project.scene import ended, tool

PYTHON = ROOT / ".venv-docs" / "bin" / "python"
SOURCES = sorted(DOCS.rglob("*.md"))
OPENED = [*{path.parent: path for path in SOURCES}.values(), DOCS / "reference/architecture.md"]  # one of each folder
COUNTED = ("li", "ol", "ul", "table", "tr", "th", "td", "pre", "blockquote", "img", "h1", "h2", "h3", "h4")
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "input": "src", "link": "href"}
builder = tool("docs_site")


class Page(HTMLParser):
    """What a page has: its elements, the anchors in it, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.elements[tag] += tag in COUNTED
        self.anchors.add(values.get("id") or "")
        self.links += [values["href"]] if tag == "a" and values.get("href") else []  # type: ignore[list-item]
        address = values.get(LOADING.get(tag, ""))
        self.loads += [address] if address else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip("`make test-full` installs zensical into .venv-docs")
    target = tmp_path_factory.mktemp("docs")
    ended(PYTHON, ROOT / "tools/docs_site.py", target, code=0, NO_COLOR="1")
    return target / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def built(site: Path, source: Path) -> Path:
    """The page of a document."""
    place = site / source.relative_to(DOCS)
    return place.with_name("index.html") if place.name == "README.md" else place.with_suffix(".html")


def test_lists_are_indented_by_four_spaces_and_code_in_them_moves_along() -> None:
    text = "Text:\n- one\n  more\n\n  ```toml\n  - = 1\n  ```\n- two\n\n1. a\n   - b\n"
    assert builder.indented(text) == (
        "Text:\n\n-   one\n    more\n\n    ```toml\n    - = 1\n    ```\n\n-   two\n\n1.  a\n    -   b\n"
    )


DIAGRAM = """```mermaid
flowchart LR
    subgraph site["A site"]
        W["worker<br/>with data"]
    end
    A["admin"]
    W & A -- "TLS" --> S["services"] --> DB[("database")]
```
"""
IN_WORDS = """```text
A site: worker (with data)
worker, admin → services: TLS
services → database
```
"""


def test_a_diagram_is_told_in_words_with_every_label_and_no_sign_of_its_language() -> None:
    assert builder.in_words(DIAGRAM) == IN_WORDS
    assert builder.in_words("```toml\nrounds = 1\n```\n") == "```toml\nrounds = 1\n```\n"
    diagrams = [
        found for path in SOURCES for found in re.findall(r"^```mermaid\n.*?^```\n", path.read_text(), re.M | re.S)
    ]
    assert len(diagrams) > 2
    for diagram in diagrams:
        words = builder.in_words(diagram)
        assert not re.search(r"--|->>|subgraph|<br/>|mermaid", words)
        labels = re.findall(r'"([^"]+)"|: (.+)$|participant \w+ as (.+)$', diagram, re.MULTILINE)
        assert [label for group in labels for label in "".join(group).split("<br/>") if label not in words] == []


def test_the_reference_has_every_public_name_and_the_navigation_every_page() -> None:
    assert sorted(re.findall(r"^::: fedpareto\.(\w+)$", builder.reference(), re.MULTILINE)) == fedpareto.__all__
    places = str(builder.navigation())
    shown = [path for path in SOURCES if len(path.relative_to(DOCS).parts) <= 2]
    assert [path for path in shown if f"'{path.relative_to(DOCS)}'" not in places] == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_page_has_the_elements_that_a_forge_shows(site: Path) -> None:
    forge = MarkdownIt("gfm-like", {"linkify": False})
    wrong = {}
    for source in SOURCES:
        text = built(site, source).read_text()
        article = Page(text[text.index("<article") : text.index("</article")]).elements
        expected = Page(forge.render(source.read_text())).elements
        if +article != +expected:
            wrong[source.name] = (article - expected, expected - article)
    assert wrong == {}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_no_page_loads_anything_from_elsewhere_and_no_link_is_broken(site: Path, pages: dict[Path, Page]) -> None:
    def problems() -> Iterator[tuple[str, str]]:
        for path, page in pages.items():
            for address in [*page.links, *page.loads]:
                if re.match(r"[a-z]+:|//", address):
                    if address in page.loads:
                        yield path.name, address
                    continue
                name, _, anchor = address.partition("#")
                target = (path.parent / unquote(name)).resolve() if name else path
                if not target.is_file() or (target in pages and unquote(anchor) not in pages[target].anchors):
                    yield path.name, address

    assert len(pages) > 100
    assert sorted(set(problems())) == []
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//", style.read_text()) == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_browser_opens_the_pages_from_files_asks_no_host_and_finds_a_word(site: Path) -> None:
    asked: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(300_000)
        page.on("request", lambda request: asked.append(request.url))
        for source in OPENED:
            page.goto(built(site, source).as_uri())
        page.goto((site / "index.html").as_uri())
        page.get_by_role("button", name="Search").first.click()
        page.keyboard.type("home-copied")
        page.get_by_text("Two copies have started").click()  # a title of another page
        page.wait_for_url("**/start/moving-a-worker.html*")
        page.goto((site / "reference/names.html").as_uri())
        assert "submit" in page.inner_text("article")
    assert len(asked) > len(OPENED)
    assert [address for address in asked if not re.match(r"file:|data:|blob:|about:", address)] == []
