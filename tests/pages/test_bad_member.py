"""The tutorial docs/operate/bad-member.md, run from its text by real processes."""

import re

import pytest

from tests.harness import SECONDS
from tests.pages.reader import Reader, pattern
from tests.paths import DOCS

BAD_MEMBER = (DOCS / "operate/bad-member.md").read_text()


@pytest.mark.full
def test_a_reader_finds_the_bad_member_shuts_it_out_and_sees_what_the_page_shows(reader: Reader) -> None:
    reader.before = {"fedpareto admin runs": reader.leave}
    assert reader.read(BAD_MEMBER) > 20
    _, shut_out = reader.terminals[-1]
    assert shut_out.popen.wait(SECONDS) == 1
    (told,) = re.findall(r"^```text\n(.*?)\n```$", BAD_MEMBER, re.MULTILINE)
    assert pattern(told) in pattern(shut_out.text)
