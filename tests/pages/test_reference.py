"""The page docs/reference/verify.md, from its text."""

import pytest

from tests.pages.reader import Reader
from tests.paths import DOCS


@pytest.mark.full
def test_an_outsider_a_user_of_the_model_and_a_member_verify_a_run(reader: Reader) -> None:
    members = [f"hospital-{letter}" for letter in "abcde"]
    reader.begin(*members)
    reader.work(*members)
    reader.run("first", "selection.minimum = 5\n")
    page = (DOCS / "reference/verify.md").read_text()
    ca = reader.fingerprint
    model = f"fedpareto verify run.fedpareto --ca {ca} --model model.safetensors"
    reader.before = {model: lambda: reader.enter("fedpareto admin export first --out model.safetensors")}
    reader.read(page, {" RUN": " first", "3f1c...": ca})
