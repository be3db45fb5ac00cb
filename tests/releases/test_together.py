"""Workers of 0.1.0 and of a later version in one run, with a coordinator of either."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.releases.next_version import NEXT
from tests.releases.scene import MEMBERS, OPEN, PRIVATE, Together
from tests.releases.versions import Version

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["an old coordinator", "a new coordinator"])
def together(
    request: pytest.FixtureRequest, old: Version, later: Version, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Together]:
    place: Path = tmp_path_factory.mktemp("together")
    with Together(place, later, data / "crashing.py") as scene:
        scene.found_of(old, old if request.param == "an old coordinator" else later)
        yield scene


def expected(together: Together) -> dict[str, str]:
    return {name: f"fedpareto-worker/{together.versions[name].name}" for name in MEMBERS}


@pytest.mark.parametrize(("name", "more"), [("open", OPEN), ("private", PRIVATE)], ids=["open", "private"])
def test_members_of_both_versions_make_every_round_of_a_run_together(
    together: Together, old: Version, later: Version, name: str, more: str
) -> None:
    run = together.send(name, more)
    together.ended(run)
    assert together.software() == expected(together)
    assert len({*together.software().values()}) == len({old.name, later.name})
    for number in range(2):
        record = together.admin("round", run, str(number))
        assert {(phase["asked"], phase["replied"]) for phase in record["phases"]} == {(5, 5)}
    signed = [one["envelope"]["decoded"] for one in together.admin("replies", run)["replies"]]
    assert {(one["client_id"], one["software"]) for one in signed} == {*expected(together).items()}
    bundle = together.bundle(run)
    later.python("-m", "fedpareto", "verify", bundle, cwd=together.directory)
    if later.name == NEXT:
        told = old.python("-m", "fedpareto", "verify", bundle, cwd=together.directory, code=1)
        assert "it has a field that this release does not know: use the release that wrote it" in told
    (coordinator,) = together.admin("coordinators")["coordinators"]
    assert coordinator["software"].endswith(together.version.name)


def test_a_worker_that_is_upgraded_within_a_private_round_goes_on_with_it(together: Together, later: Version) -> None:
    together.kill(together.workers["ann"])
    dying = together.dies("ann", "reply-3")
    run = together.send("upgraded", PRIVATE)
    together.wait(lambda: dying.popen.poll() is not None, "the death of ann's worker")
    together.kill(dying)
    together.versions["ann"] = later
    together.attend("ann")
    together.ended(run)
    record = together.admin("round", run, "0")
    assert not record["voided"]
    assert {(phase["asked"], phase["replied"]) for phase in record["phases"]} == {(5, 5)}


PAUSED = """\
algorithm.name = "fedavg"
selection = { minimum = 5, pool = "enrolled", quorum = 0.8 }
"""


def test_a_paused_member_is_not_asked_and_declines_at_once_where_the_coordinator_knows_no_pauses(
    together: Together, old: Version, later: Version
) -> None:
    home = ["--home", str(together.directory / "eve")]
    later.python("-m", "fedpareto", "worker", "pause", *home, cwd=together.directory)
    together.wait(lambda: "the site is paused" in together.workers["eve"].text, "the pause", pause=0.2)
    run = together.send("paused", PAUSED, rounds=1)
    if together.version.name != old.name:
        together.wait(lambda: "eve is paused" in together.run(run)["reason"], "the run to wait for eve", pause=0.2)
        later.python("-m", "fedpareto", "worker", "resume", *home, cwd=together.directory)
    together.ended(run)
    parts = {one["client_id"]: one for one in together.admin("round", run, "0")["participations"]}
    outcome = ("DECLINED", "paused") if together.version.name == old.name else ("FULFILLED", "")
    assert (parts["eve"]["state"], parts["eve"]["reason"].partition(":")[0]) == outcome
    later.python("-m", "fedpareto", "worker", "resume", *home, cwd=together.directory)


def test_a_member_gets_a_model_or_hears_that_the_coordinator_is_of_a_version_that_gives_none(
    together: Together, old: Version, later: Version
) -> None:
    run = together.send("fetched", OPEN)
    together.ended(run)
    out = together.directory / "fetched.safetensors"
    asked = ["worker", "model", run, "--home", str(together.directory / "eve"), "--out", str(out)]
    without = together.version.name == old.name
    told = later.python("-m", "fedpareto", *asked, cwd=together.directory, code=1 if without else 0)
    assert out.exists() != without
    assert ("is of a version that gives members no models: ask its operator" in told) == without


def test_a_member_leaves_beside_members_of_the_release_or_says_that_the_coordinator_does_not_know_how(
    together: Together, old: Version, later: Version
) -> None:
    home = ["--home", str(together.directory / "eve")]

    def leave() -> None:
        later.python("-m", "fedpareto", "worker", "leave", "--now", *home, cwd=together.directory)

    def eve() -> str:
        (found,) = (one for one in together.admin("clients")["clients"] if one["client_id"] == "eve")
        return str(found["state"]).removeprefix("CLIENT_STATE_")

    if together.version.name == old.name:
        leave()
        told = "is of a version that does not know how members leave"
        together.wait(lambda: told in together.workers["eve"].text, "the worker to say so", pause=0.2)
        assert eve() == "ACTIVE"
        together.kill(together.workers["eve"])
        (together.directory / "eve" / "leave.json").unlink()
        together.attend("eve")
        return
    # Those of the release are told of the end of a private round in words that they do not know, and go on.
    stopped = held(together, "reply-1", "stopped")
    together.admin("stop", stopped, "--yes")
    together.attend("ben")
    run = held(together, "reply-3", "left")
    leave()
    together.wait(lambda: eve() == "LEFT", "eve to leave", pause=0.2)
    together.kill(together.workers["eve"])
    together.attend("ben")
    together.ended(run)
    phases = [(phase["asked"], phase["replied"]) for phase in together.admin("round", run, "0")["phases"][:6]]
    assert phases.count((5, 4)) == 1, "afterwards, the others are asked"
    later.python("-m", "fedpareto", "verify", together.bundle(run), cwd=together.directory)
    assert together.admin("audit", "verify")["problems"] == []
    # It comes back.
    text = together.admin("join-string", "eve", "--again")["join_string"]
    later.python("-m", "fedpareto", "worker", "join", *home, cwd=together.directory, text=text)
    together.attend("eve")


def held(together: Together, point: str, name: str) -> str:
    """A private run in which a worker of the release has died at a point."""
    together.kill(together.workers["ben"])
    dying = together.dies("ben", point)
    run = together.send(name, PRIVATE, rounds=1)
    together.wait(lambda: dying.popen.poll() is not None, "the death of ben's worker")
    together.kill(dying)
    return run


LOTTERY = """\
algorithm.name = "lottery"
selection.minimum = 2
selection.pool = "enrolled"
"""


def test_a_worker_of_the_release_declines_a_kind_of_work_that_it_does_not_know(together: Together) -> None:
    if together.version.name != NEXT:
        pytest.skip("only the next version has another kind of work")
    for name in MEMBERS:
        (together.directory / name / "policy.toml").unlink()
    together.end(*MEMBERS)
    together.attend(*MEMBERS)
    run = together.send("lottery", LOTTERY)
    together.ended(run)
    parts = {one["client_id"]: one.get("reason", "") for one in together.admin("round", run, "0")["participations"]}
    older = [name for name in MEMBERS if together.versions[name].name != NEXT]
    assert len(older) == 2
    assert [parts[name].startswith("work:") for name in older] == [True, True], parts
