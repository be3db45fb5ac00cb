"""A copied home is found when its worker starts, and a home that is the only one is never locked out."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import grpc
import pytest

from coordinator.alerts.about_federation import copied
from coordinator.members.home_starts import HomeCopied, check_starts, forget_starts, take_start
from federation.refusals import Refusal
from federation.v1.federation_pb2 import AttendRequest, Hello
from federation.v1.federation_pb2_grpc import FederationStub
from storage.models import Client
from tests.coordinator.members.scene import client, end_of
from tests.running import Running, command
from worker.connection.starts import KnownStarts, Starts, known_starts
from worker.doctor import check_copy
from worker.home import MEMBER_FILE, WorkerHome, WorkerHomeError


class Site:
    """A home, the worker that starts in it, and the number of ids that were made."""

    made = 0

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / MEMBER_FILE).touch()
        self.home = WorkerHome(directory)

    def begun(self) -> Starts:
        return Starts(self.home, self._new)

    def hello(self, starts: Starts | None = None) -> Hello:
        hello = Hello()
        (starts or self.begun()).tell(hello)
        return hello

    def copy(self, name: str) -> "Site":
        shutil.copytree(self.home.directory, target := self.home.directory.parent / name)
        return Site(target)

    def _new(self, size: int) -> bytes:
        Site.made += 1
        return Site.made.to_bytes(size, "big")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "home")


@pytest.fixture
def row() -> Client:
    return Client(client_id="ann", start="")


def start(site: Site, row: Client, killed: str = "") -> Hello:
    """Starts a worker, which may be killed: before its Hello is sent, after it was taken, or later."""
    starts = site.begun()
    hello = site.hello(starts)
    if killed == "before the Hello arrives":
        return hello
    take_start(row, hello)
    if killed == "before the welcome is noted":
        return hello
    take_start(row, site.hello(starts))  # the same start comes again, on a new stream
    starts.welcomed()
    return hello


POINTS = ("", "before the Hello arrives", "before the welcome is noted")


def test_a_home_that_is_the_only_one_is_taken_wherever_its_worker_was_killed(tmp_path: Path) -> None:
    for number, points in enumerate(product(POINTS, repeat=4)):
        site, row = Site(tmp_path / f"home-{number}"), Client(client_id="ann", start="")
        for killed in points:
            start(site, row, killed)
        assert start(site, row).start.hex() == row.start


def test_a_home_that_starts_a_hundred_times_without_an_answer_is_still_taken(site: Site, row: Client) -> None:
    start(site, row)
    for _ in range(100):
        start(site, row, "before the Hello arrives")
    for _ in range(100):
        hello = start(site, row, "before the welcome is noted")
    check_starts(hello)
    start(site, row)
    assert len(known_starts(site.home.starts).starts) <= 33


@pytest.mark.parametrize("first", ["copy", "home"])
@pytest.mark.parametrize("killed", POINTS)
def test_of_a_home_and_its_copy_the_one_that_starts_second_is_refused(
    site: Site, row: Client, first: str, killed: str
) -> None:
    start(site, row, killed)
    sites = {"home": site, "copy": site.copy("copied")}
    second = sites.pop("home" if first == "copy" else "copy")
    (begins,) = sites.values()
    taken = start(begins, row)
    for _ in range(3):  # alternately
        with pytest.raises(HomeCopied) as caught:
            take_start(row, second.hello())
        assert caught.value.start == row.start == taken.start.hex()
        taken = start(begins, row)


def test_a_running_home_is_refused_once_its_copy_has_started(site: Site, row: Client) -> None:
    starts = site.begun()
    take_start(row, site.hello(starts))
    starts.welcomed()
    start(site.copy("copied"), row)
    with pytest.raises(HomeCopied):
        take_start(row, site.hello(starts))  # its stream broke


def test_a_home_that_was_moved_or_restored_unchanged_is_taken_at_once(site: Site, row: Client) -> None:
    start(site, row)
    moved = site.copy("moved")
    shutil.rmtree(site.home.directory)
    start(moved, row)


def test_the_owner_lets_one_home_go_on_and_only_until_the_other_one_starts_again(site: Site, row: Client) -> None:
    start(site, row)
    other = site.copy("copied")
    start(other, row)
    starts = site.begun()
    for again in (True, False):
        with pytest.raises(HomeCopied) as caught:
            take_start(row, site.hello(starts))
        starts.refused(bytes.fromhex(caught.value.start))
        (found,) = check_copy(site.home)
        assert "stop both workers, then run `fedpareto worker copied`" in found.message
        assert "refuses this one since" in command("worker", "copied", "--home", site.home.directory).stdout
        assert not starts.decided()
        command("worker", "copied", "--home", site.home.directory, "--this-one")
        assert starts.decided()
        site.hello(starts)  # and is killed before it arrives
        starts = site.begun()
        if again:
            start(other, row)  # the owner has not stopped it: the decision was about its start before
    take_start(row, site.hello(starts))
    starts.welcomed()
    with pytest.raises(HomeCopied):
        take_start(row, other.hello())
    command("worker", "copied", "--home", other.home.directory, "--other-one")
    with pytest.raises(WorkerHomeError, match="was set aside"):
        other.begun()
    (found,) = check_copy(other.home)
    assert "was set aside for another copy" in found.message
    assert list(check_copy(site.home)) == []


def test_a_home_that_nobody_refused_has_nothing_to_decide(site: Site) -> None:
    said = command("worker", "copied", "--home", site.home.directory, "--this-one", code=1)
    assert "was not refused as a copy" in str(said.exception)
    said = command("worker", "copied", "--home", site.home.directory, "--this-one", "--other-one", code=1)
    assert "give the one that you mean" in str(said.exception)


def test_a_worker_of_version_0_1_0_is_taken_and_changes_nothing(site: Site, row: Client) -> None:
    hello = start(site, row)
    take_start(row, Hello())
    assert row.start == hello.start.hex()
    start(site, row)


@pytest.mark.parametrize(
    "hello",
    [
        Hello(start=b"short"),
        Hello(earlier_starts=[bytes(16)]),
        Hello(start=bytes(16), earlier_starts=[bytes(15)]),
        Hello(start=bytes(16), earlier_starts=[bytes(16)] * 33),
    ],
)
def test_starts_of_another_form_are_refused(hello: Hello) -> None:
    with pytest.raises(Refusal, match="start"):
        check_starts(hello)


def test_a_damaged_file_names_itself_and_what_to_do(site: Site) -> None:
    site.home.starts.write_text('{"format": 1, "starts": ["zz"]}')
    with pytest.raises(WorkerHomeError, match=r"starts\.json is damaged.*worker copied --this-one"):
        site.begun()
    (found,) = check_copy(site.home)
    assert "starts.json is damaged" in found.message


def test_what_a_refusal_names_is_kept_only_if_it_is_a_start(site: Site) -> None:
    starts = site.begun()
    site.hello(starts)
    for lie in (b"", b"x" * 1000):
        starts.refused(lie)
    assert known_starts(site.home.starts) == KnownStarts(starts=(starts.start,))


# --- with a coordinator


def answer(channel: grpc.Channel, hello: Hello) -> tuple[str, str]:
    """The first message of a stream, and the reason of a refusal that follows it."""
    call = FederationStub(channel).Attend(iter([AttendRequest(hello=hello)]))
    first = next(call)
    kind = first.WhichOneof("message") or ""
    if kind == "welcome":
        call.cancel()
        return kind, ""
    assert len(first.home_copied.start) == 16
    return kind, end_of(call)


def test_a_coordinator_refuses_a_copy_changes_nothing_by_it_records_it_and_alerts(served: Running, site: Site) -> None:
    channel = served.member("ann")
    other = site.copy("copied")
    assert answer(channel, site.hello()) == ("welcome", "")
    before = client(served, "ann")
    refused = other.hello()
    refused.software = "another"
    assert answer(channel, refused) == ("home_copied", "home-copied")
    after = client(served, "ann")
    assert (after.start, after.software) == (before.start, before.software)
    assert [entry.outcome for entry in served.refusals("Attend")][-1] == "home-copied"
    now = served.clock()
    (fact,) = served.look(lambda session: copied(session, now))
    assert (fact.client_id, fact.kind) == ("ann", "HOME_COPIED")
    assert not served.look(lambda session: copied(session, now + timedelta(days=2)))
    with served.database.begin() as session:
        forget_starts(session)  # as after a restore
    assert answer(channel, other.hello()) == ("welcome", "")
    assert answer(channel, site.hello()) == ("home_copied", "home-copied")


def test_of_two_copies_that_start_at_once_one_is_served(served: Running, site: Site) -> None:
    channel = served.member("ben")
    assert answer(channel, site.hello()) == ("welcome", "")
    hellos = [site.copy(f"copy-{number}").hello() for number in range(4)]
    with ThreadPoolExecutor(len(hellos)) as pool:
        answers = [kind for kind, _ in pool.map(partial(answer, channel), hellos)]
    assert sorted(answers) == ["home_copied"] * 3 + ["welcome"]
    (taken,) = (hello for hello, kind in zip(hellos, answers, strict=True) if kind == "welcome")
    assert client(served, "ben").start == taken.start.hex()
