"""Directories that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
TESTS = ROOT / "tests"
OWNERS_CODE = TESTS / "owners_code"  # modules that specifications and plug-ins name, as an owner's would be
PROGRAMS = TESTS / "programs"  # that tests run in processes of their own
VECTORS = TESTS / "vectors"
PUBLIC_DATA = ROOT.parent / "shared" / "data"  # beside the project on some machines; tests skip without it
REFERENCES = ROOT.parent / "shared" / "vectors"
