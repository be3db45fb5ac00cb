"""`notify.toml`: what it may hold, and who may read and write it. No message repeats an address or a secret."""

import re
from pathlib import Path

import pytest

from federation.files.owners_own import NotOwnersOwn, check_owners_own
from fedpareto.delivery.targets_file import Targets, TargetsError
from tests.fedpareto.delivery.scene import SECRET, targets_file
from tests.paths import DOCS

GOOD = f'webhook = "https://hidden.example/hidden"\nsecret = "{SECRET}"'


def problem(directory: Path, text: str) -> str:
    path = targets_file(directory, more=text)
    with pytest.raises(TargetsError) as caught:
        Targets.load(path)
    assert not any(part in str(caught.value) for part in ("hidden", SECRET.removeprefix("whsec_")))
    return str(caught.value)


def test_the_example_on_the_page_of_alerts_is_accepted(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```$", (DOCS / "operate/alerts.md").read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "notify.toml"
    path.write_text(example)
    path.chmod(0o600)
    assert set(Targets.load(path).targets) == {"pager", "ops"}


def test_a_target_is_a_signed_webhook_or_an_address_of_apprise(tmp_path: Path) -> None:
    mail = 'apprise = "mailtos://u:p@example.org"\nseverity = "critical"'
    path = targets_file(tmp_path, more=f'[targets.one]\n{GOOD}\nca = "our.pem"\n[targets.two]\n{mail}\n')
    targets = Targets.load(path).targets
    assert (targets["one"].key(), targets["one"].severity) == (b"k" * 32, "notice")
    assert targets["one"].ca == str(tmp_path / "our.pem")
    assert targets["two"].severity == "critical"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("", "a target has one of the keys webhook and apprise"),
        (f'{GOOD}\napprise = "mailto://hidden"', "a target has one of the keys webhook and apprise"),
        ('apprise = "hidden"', "apprise: it is not an address"),
        (f'apprise = "mailto://hidden"\nsecret = "{SECRET}"', "secret and ca are for a webhook"),
        ('webhook = "https://hidden"', "secret: expected whsec_"),
        ('webhook = "https://hidden"\nsecret = "whsec_aGlkZGVu"', "secret: expected whsec_"),
        (GOOD.replace("https://hidden.example", "http://hidden.example"), "begins with https://, or with http://"),
        (GOOD.replace("https://hidden.example", "http://127.0.0.1.hidden.example"), "begins with https://"),
        (GOOD.replace("https://hidden.example", "file://localhost"), "begins with https://"),
        (GOOD.replace("hidden.example", "hidden:hidden@h.example"), "it has no user, no password"),
        (GOOD.replace("hidden.example", "hidden.example:99999"), "it is not an address"),
        (GOOD.replace("/hidden", "/hid\\r\\nden: x"), "it is not an address"),
        (GOOD.replace("https://hidden.example/hidden", ""), "a target has one of the keys"),
        ("webhook = 5", "webhook: Input should be a valid string"),
        (f'{GOOD}\nseverity = "hidden"', "severity: Input should be"),
        (f"{GOOD}\nwebhok = 1", "targets.one.webhok: no such key;"),
        ('webhook = "https://hidden', "is not a TOML document"),
    ],
)
def test_a_wrong_target_is_named_without_its_values(tmp_path: Path, target: str, told: str) -> None:
    assert told in problem(tmp_path, f"[targets.one]\n{target}\n")


def test_a_wrong_table_of_targets_is_named_without_its_values(tmp_path: Path) -> None:
    assert "targets: missing" in problem(tmp_path, "")
    assert "targets: Dictionary should have at least 1 item" in problem(tmp_path, "[targets]\n")
    assert "targets: Input should be a valid dictionary" in problem(tmp_path, 'targets = "https://hidden"\n')
    assert "targets.one: Input should be a valid dictionary" in problem(tmp_path, '[targets]\none = "https://hidden"\n')
    assert "String should match pattern" in problem(tmp_path, f'[targets."../x"]\n{GOOD}\n')
    with pytest.raises(TargetsError, match=r"there is no .*none\.toml"):
        Targets.load(tmp_path / "none.toml")


def test_a_file_that_others_can_write_or_read_is_refused(tmp_path: Path) -> None:
    path = targets_file(tmp_path, more=f"[targets.one]\n{GOOD}\n")
    for mode, told in ((0o620, "others can write"), (0o602, "others can write"), (0o640, "others can read it")):
        path.chmod(mode)
        with pytest.raises(TargetsError, match=f"{told}.*mode {mode:04o}.*chmod go-"):
            Targets.load(path)
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    try:
        with pytest.raises(TargetsError, match="others can write"):
            Targets.load(path)
    finally:
        tmp_path.chmod(0o700)
    path.chmod(0o644)
    check_owners_own(path, "it matters")
    with pytest.raises(NotOwnersOwn, match="it matters, and others can read it"):
        check_owners_own(path, "it matters", secret=True)
