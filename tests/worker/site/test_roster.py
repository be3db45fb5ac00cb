"""The roster that an owner pins: what it is made of, what is refused, and what changes."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust.member_files import MemberFiles
from federation.work.site import SessionEntry
from fedpareto.cli.failure import USAGE
from tests.command_lines import at_a_terminal, failure
from tests.scripted import CLIENT, FEDERATION, scripted
from tests.worker.scene import command as worker_command
from worker.home import WorkerHome
from worker.ledgers.round_ledger import RoundLedger
from worker.site.roster import Card, Roster, RosterError, changes, pinned_roster, read_roster

OTHERS = tuple(f"hospital-{number}" for number in range(4))
KEYS = {name: Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number, name in enumerate(OTHERS)}


@pytest.fixture(scope="module")
def member() -> Iterator[MemberFiles]:
    with scripted() as coordinator:
        yield coordinator.member()


@pytest.fixture
def home(member: MemberFiles, tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    member.save(directory)
    return directory


def other(name: str, key: Ed25519PrivateKey | None = None) -> Card:
    return Card(FEDERATION, name, (key or KEYS[name]).public_key().public_bytes_raw())


def roster(member: MemberFiles, *cards: Card) -> str:
    """The text of a roster: this member, the others, and cards that take the place of theirs."""
    chosen = {card.client_id: card for card in (Card.of(member), *map(other, OTHERS), *cards)}
    return "\n".join(card.text() for card in chosen.values())


def rotated(name: str, *, by: Ed25519PrivateKey | None = None) -> tuple[Ed25519PrivateKey, Card]:
    """A new key of a member, and its card, which the old key has signed, or another one."""
    key = Ed25519PrivateKey.generate()
    plain = other(name, key)
    return key, replace(plain, signature=(by or KEYS[name]).sign(plain._signed()))


# --- the file


def test_the_cards_of_all_members_one_after_the_other_are_a_roster(member: MemberFiles) -> None:
    made = Roster.parse(roster(member), member)
    assert [card.client_id for card in made.cards] == sorted([CLIENT, *OTHERS])
    assert made.keys[CLIENT] == member.signing_key.public_key().public_bytes_raw()


def test_the_digest_depends_on_members_and_keys_and_not_on_their_order(member: MemberFiles) -> None:
    text = roster(member)
    backwards = "\n".join(reversed([f"[[member]]{part}" for part in text.split("[[member]]")[1:]]))
    digest = Roster.parse(text, member).digest
    assert re.fullmatch(r"\d{5}( \d{5}){11}", digest)
    assert Roster.parse(backwards, member).digest == digest
    key, card = rotated(OTHERS[0])
    for changed in (other(OTHERS[0], key), other("hospital-9", key)):
        assert Roster.parse(roster(member, changed), member).digest != digest
    assert (
        Roster.parse(roster(member, card), member).digest
        == Roster.parse(roster(member, other(OTHERS[0], key)), member).digest
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[member]]", "[member", "it is not a TOML document"),
        ("[[member]]", "[[mamber]]", "mamber: no such key; did you mean 'member'. an entry has"),
        ("key =", "kay =", "member.0.kay: no such key"),
        ('key = "', 'key = "00', "the key of .* has 33 bytes, not 32"),
        ('key = "', 'key = "zz', "the key of .* is not hexadecimal: 'zz"),
        ('key = "', f'key = "{"00" * 32}" #', "the key of .*: a point of small order cannot be an Ed25519 key"),
        ('key = "', f'key = "01{"00" * 30}80" #', "the key of .*: a point of small order"),
        ('key = "', "key = 3 #", r"member.0.key: Input should be a valid string; got 3"),
        (f'"{OTHERS[0]}"', f'"{OTHERS[1]}"', f"the member {OTHERS[1]} stands in it twice"),
        (f'"{OTHERS[0]}"', '"Hospital"', "client_id 'Hospital' will not do"),
        (f'"{CLIENT}"', '"somebody"', f"this member, {CLIENT}, is not in it"),
        (f'"{FEDERATION}"', '"elsewhere"', "is of the federation 'elsewhere'; this worker is a member of"),
        ("[[member]]\n", '[[member]]\nsignature = "00"\n', "the signature of .* has 1 bytes, not 64"),
    ],
)
def test_a_file_that_is_no_roster_is_refused(
    member: MemberFiles, tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "roster"
    path.write_text(roster(member).replace(old, new, 1))
    with pytest.raises(RosterError, match=words, check=lambda error: str(path) in str(error)):
        read_roster(path, member)


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(member: MemberFiles, tmp_path: Path) -> None:
    path = tmp_path / "roster"
    with pytest.raises(RosterError, match="cannot be read: No such file"):
        read_roster(path, member)
    path.write_bytes(b"\xff")
    with pytest.raises(RosterError, match="cannot be used"):
        read_roster(path, member)
    path.write_bytes(b"\xef\xbb\xbf" + roster(member).replace("\n", "\r\n").encode())
    assert len(read_roster(path, member).cards) == 5, "text as mail programs save it"


def test_a_roster_with_a_key_twice_or_too_few_members_is_refused(member: MemberFiles) -> None:
    with pytest.raises(RosterError, match="hospital-0 and hospital-1 have the same key"):
        Roster.parse(roster(member, other(OTHERS[0], KEYS[OTHERS[1]])), member)
    with pytest.raises(RosterError, match="it has 4 members; a private round needs 5"):
        Roster.parse("\n".join(card.text() for card in (Card.of(member), *map(other, OTHERS[1:]))), member)


def test_a_roster_with_another_key_for_this_member_is_refused(member: MemberFiles) -> None:
    with pytest.raises(RosterError, match=f"another key for this member, {CLIENT}"):
        Roster.parse(roster(member, other(CLIENT, Ed25519PrivateKey.generate())), member)


# --- what changes


def test_what_changes_is_told_and_a_new_key_needs_the_signature_of_the_old_one(member: MemberFiles) -> None:
    pinned = Roster.parse(roster(member), member)
    assert not changes(pinned, pinned)
    assert changes(None, pinned).added == tuple(sorted([CLIENT, *OTHERS]))
    moved = Roster.parse(
        roster(
            member,
            rotated(OTHERS[0])[1],
            rotated(OTHERS[1], by=Ed25519PrivateKey.generate())[1],
            other("new", KEYS[OTHERS[2]]),
        ).replace(other(OTHERS[2]).text(), ""),
        member,
    )
    found = changes(pinned, moved)
    assert (found.added, found.removed) == (("new",), (OTHERS[2],))
    assert (found.rotated, found.unsigned) == ((OTHERS[0],), (OTHERS[1],))


def test_a_signature_for_another_member_or_federation_or_key_does_not_hold() -> None:
    old, (_, card) = KEYS[OTHERS[0]].public_key().public_bytes_raw(), rotated(OTHERS[0])
    assert card.succeeds(old)
    for changed in (
        replace(card, client_id=OTHERS[1]),
        replace(card, federation_id="elsewhere"),
        replace(card, key=old),
        replace(card, signature=b""),
    ):
        assert not changed.succeeds(old)
    assert not card.succeeds(KEYS[OTHERS[1]].public_key().public_bytes_raw())


# --- the commands


def command(name: str, home: Path, *arguments: str) -> str:
    return worker_command("roster", name, *arguments, "--home", str(home))


def fails(words: str, name: str, home: Path, *arguments: str, code: int = 1) -> None:
    """The command fails with words that this pattern finds."""
    error = failure("worker", "roster", name, *arguments, "--home", str(home))
    assert (error.code, bool(re.search(words, str(error)))) == (code, True), error


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_roster_is_pinned_once_and_shown_with_its_digest(member: MemberFiles, home: Path, tmp_path: Path) -> None:
    card = command("card", home)
    file = written(tmp_path / "roster", card + "".join(other(name).text() for name in OTHERS))
    assert "no roster is pinned" in command("show", home)
    out = command("pin", home, file, "--yes")
    for words in (*(f"new member: {name}" for name in OTHERS), "not through the coordinator", "Digest: "):
        assert words in out
    assert (home / "roster.toml").stat().st_mode & 0o777 == 0o600
    assert "It is pinned already." in command("pin", home, file)
    digest = Roster.parse(Path(file).read_text(), member).digest
    assert digest in out
    assert f"Digest: {digest}" in command("show", home)
    assert json.loads(command("show", home, "--json"))["roster"]["digest"] == digest


def test_pinning_asks_and_without_a_terminal_it_needs_yes(member: MemberFiles, home: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "roster", roster(member))
    fails("there is no terminal", "pin", home, file, code=USAGE)
    code, out, _ = at_a_terminal("worker", "roster", "pin", file, "--home", str(home), answer="n")
    assert (code, "nothing was changed" in out) == (1, True)
    assert pinned_roster(home / "roster.toml", member) is None
    assert at_a_terminal("worker", "roster", "pin", file, "--home", str(home), answer="y")[0] == 0
    assert pinned_roster(home / "roster.toml", member) == Roster.parse(roster(member), member)


def test_an_unsigned_new_key_is_refused_until_its_owner_was_called(
    member: MemberFiles, home: Path, tmp_path: Path
) -> None:
    command("pin", home, written(tmp_path / "roster", roster(member)), "--yes")
    before = (home / "roster.toml").read_bytes()
    _, forged = rotated(OTHERS[0], by=Ed25519PrivateKey.generate())
    file = written(tmp_path / "forged", roster(member, forged))
    fails(f"{OTHERS[0]} has another key .* Call its owner.*--replace {OTHERS[0]}", "pin", home, file, "--yes")
    unchanged = f"--replace {OTHERS[1]}: its key does not change"
    fails(unchanged, "pin", home, file, "--yes", "--replace", OTHERS[1], code=USAGE)
    assert (home / "roster.toml").read_bytes() == before
    assert f"NOT signed by the old one: {OTHERS[0]}" in command("pin", home, file, "--yes", "--replace", OTHERS[0])
    assert pinned_roster(home / "roster.toml", member) == Roster.parse(roster(member, forged), member)


def test_the_card_of_a_member_that_joined_again_is_signed_by_its_old_key(
    member: MemberFiles, home: Path, tmp_path: Path
) -> None:
    again = replace(member, signing_key=Ed25519PrivateKey.generate())
    again.save(tmp_path / "again")
    card = command("card", tmp_path / "again", "--old-home", str(home))
    old = Roster.parse(roster(member), member)
    new = Roster.parse(card + "".join(other(name).text() for name in OTHERS), again)
    assert changes(old, new).rotated == (CLIENT,)
    replace(member, client_id="another").save(tmp_path / "another")
    fails("is the directory of another of", "card", tmp_path / "again", "--old-home", str(tmp_path / "another"))


def test_a_pin_that_dies_leaves_the_old_roster(
    member: MemberFiles, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command("pin", home, written(tmp_path / "roster", roster(member)), "--yes")
    before = pinned_roster(home / "roster.toml", member)
    file = written(tmp_path / "new", roster(member, other("hospital-9", Ed25519PrivateKey.generate())))
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Path, "replace", lambda *_: os._exit(9))
        command("pin", home, file, "--yes")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert pinned_roster(home / "roster.toml", member) == before
    command("pin", home, file, "--yes")


def test_the_private_rounds_of_a_data_set_are_shown_for_each_of_its_tasks(member: MemberFiles, home: Path) -> None:
    WorkerHome(home).policy.write_text(
        '[secure.tasks.length]\nsessions = 5\n[secure.data_sets]\na = ["length", "mortality"]\n'
    )
    with closing(RoundLedger(WorkerHome(home).rounds)) as ledger:
        for number, task in enumerate(("length", "mortality", "mortality", "other")):
            ledger.add(SessionEntry(str(number), "run", task, "model", "evaluate" if number == 2 else "train"))
    assert command("show", home).splitlines()[1:] == [
        "length: 2 of 5 private rounds, 1 of 1000 evaluations",
        "mortality: 2 of 1000 private rounds, 1 of 1000 evaluations",
        "other: 1 of 1000 private rounds, 0 of 1000 evaluations",
    ]


def test_a_damaged_pinned_roster_and_a_damaged_ledger_are_named(
    member: MemberFiles, home: Path, tmp_path: Path
) -> None:
    command("pin", home, written(tmp_path / "roster", roster(member)), "--yes")
    RoundLedger(WorkerHome(home).rounds).close()
    (home / "private-rounds.db").write_bytes(b"no database" * 1000)
    fails("private-rounds.db is damaged .* put back a copy", "show", home)
    (home / "roster.toml").write_text("damaged")
    fails("it is the pinned roster: move it away, and pin one again", "show", home)
