"""Tutorials after the first one, run from their text by real processes."""

import re
from pathlib import Path

import pytest

from tests.harness import SECONDS
from tests.pages.reader import Reader, pattern
from tests.paths import DOCS

BAD_MEMBER = (DOCS / "operate/bad-member.md").read_text()


@pytest.mark.full
def test_a_reader_finds_the_bad_member_shuts_it_out_and_sees_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    reader = Reader(tmp_path, monkeypatch.setenv, after_ctrl_c="fedpareto admin runs")
    try:
        assert reader.read(BAD_MEMBER) > 20
        _, shut_out = reader.terminals[-1]
        assert shut_out.popen.wait(SECONDS) == 1
    finally:
        reader.close()
    (told,) = re.findall(r"^```text\n(.*?)\n```$", BAD_MEMBER, re.MULTILINE)
    assert pattern(told) in pattern(shut_out.text)
