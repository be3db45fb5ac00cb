"""What the page about clients that exist already shows."""

from tests.paths import DOCS


def run_of_the_page(section: str, *, rounds: int) -> str:
    """The run specification of a section, with this number of rounds."""
    text = (DOCS / "start/existing-clients.md").read_text().partition(f"\n## {section}\n")[2]
    name, there, rest = text.partition("```toml\n")[2].partition("```")[0].partition("rounds = 20\n")
    assert there
    return f"{name}rounds = {rounds}\n{rest}"
