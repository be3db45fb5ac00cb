"""Private rounds with ten real workers over TLS: each rule makes the step of an open round, and members that cheat."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.digests import derived_seed
from federation.secure.thresholds import ONE, Mode, Thresholds
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import SecureSession
from federation.v1.secure_pb2 import SecureTerms
from federation.vectors import read_vector
from storage.blob_directory import DirectoryStore
from tests.few import few_of
from tests.harness import wait_for
from tests.trained import train
from tests.worker.work.scene import STAGES, TASK, Members, scene
from tests.worker.work.scene import specification as of_members

Vector = NDArray[np.float64]
MEMBERS = 10
CHEAT, OTHER = "m3", "m6"
CLIP = 0.025  # some updates are longer
SEED = 7
ONE_STEP = LocalSgd(steps=1, batch_size=0, learning_rate=0.1)
HUNDRED_STEPS = LocalSgd(steps=100, batch_size=0, learning_rate=0.5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with scene(tmp_path_factory.mktemp("members"), MEMBERS, cheats=(CHEAT, OTHER)) as found:
        yield found


def specification(
    algorithm: Mapping[str, Any], privacy: Mapping[str, Any], *, seed: int = SEED, sgd: LocalSgd = ONE_STEP
) -> str:
    """One round of steps on the whole split: the updates do not depend on a seed."""
    steps = {"steps": sgd.steps, "batch_size": sgd.batch_size, "learning_rate": sgd.learning_rate}
    return of_members(MEMBERS, algorithm, privacy, seed=seed, train={**steps, "deadline_seconds": 120.0})


def private(mode: Mode, disclose: tuple[str, ...] = (), clip: float = 0.0) -> dict[str, Any]:
    return {"secure": mode.value, "disclose": [*disclose, "evaluation"], "clip": clip}


# --- every rule


@dataclass(frozen=True)
class Case:
    """A rule in private rounds, and what its step is compared with.

    Attributes:
        algorithm: of the specification.
        opened: of the open run with which it is compared.
        near: the least cosine of the two steps; 1 where they are the same within rounding.
        sgd: how members train.
    """

    mode: Mode
    algorithm: Mapping[str, Any]
    opened: Mapping[str, Any]
    near: float = 1.0
    disclose: tuple[str, ...] = ()
    clip: float = 0.0
    sessions: int = 1
    sgd: LocalSgd = ONE_STEP


def same(mode: Mode, name: str, near: float = 1.0, *, clip: float = 0.0, **values: Any) -> Case:
    """A rule that sees in a private round what it sees in an open one."""
    algorithm = {"name": name, **values}
    return Case(mode, algorithm, algorithm, near, clip=clip)


def of_units(mode: Mode, name: str, near: float, disclose: tuple[str, ...] = (), **values: Any) -> Case:
    """A rule that sees updates of length 1."""
    algorithm = {"name": name, **values}
    pre = list(dict.fromkeys(["normalize", *values.get("pre", [])]))
    return Case(mode, algorithm, {**algorithm, "pre": pre}, near, disclose)


def over_objectives(name: str, disclose: tuple[str, ...] = (), sessions: int = 1, **values: Any) -> Case:
    algorithm = {"name": name, **values}
    return Case(Mode.SUM, algorithm, algorithm, disclose=disclose, clip=1.0, sessions=sessions)


PRIVATE, VERIFIED = Mode.PRIVATE, Mode.VERIFIED
RULES = {
    "fedavg-n, sum": same(Mode.SUM, "fedavg-n"),
    "fedmgda+, private": same(PRIVATE, "fedmgda+", 0.99, epsilon=0.04),
    "fedmgda+, verified": same(VERIFIED, "fedmgda+", 0.99, epsilon=0.04),
}
MORE = {
    "fedavg-n, private": same(PRIVATE, "fedavg-n"),
    "fedavg-n, verified": same(VERIFIED, "fedavg-n"),
    "fedavg, sum": Case(Mode.SUM, {"name": "fedavg"}, {"name": "norm-clipping", "radius": CLIP}, clip=CLIP),
    "fedavg, private": Case(PRIVATE, {"name": "fedavg"}, {"name": "norm-clipping", "radius": 0.5}, clip=0.5),
    "fedavg, verified": Case(VERIFIED, {"name": "fedavg"}, {"name": "norm-clipping", "radius": CLIP}, clip=CLIP),
    "scalarised": same(Mode.SUM, "scalarised", clip=1.0, weights=[0.8, 0.2]),
    "q-fedavg": Case(
        Mode.SUM, {"name": "q-fedavg", "q": 2.0}, {"name": "q-fedavg", "q": 2.0}, disclose=("loss", "norm")
    ),
    "afl": of_units(Mode.SUM, "afl", 1.0, ("loss",)),
    "fedfa": of_units(Mode.SUM, "fedfa", 1.0, ("accuracy",)),
    "fsmgda": over_objectives("fsmgda", bound="none"),
    "fedcmoo": over_objectives("fedcmoo", sessions=2, bound="none", sketch="exact", budget=1.0),
    "fedcmoo, count": over_objectives("fedcmoo", sessions=2, bound="none", sketch="count"),
    "fedcmoo, mask": over_objectives("fedcmoo", sessions=2, bound="none", sketch="mask"),
    "fedcmoo-pref": over_objectives("fedcmoo-pref", ("loss",), 2, bound="none", sketch="exact", budget=1.0),
    "fedmgda": of_units(PRIVATE, "fedmgda", 0.95),
    "fedmgda+auto": of_units(PRIVATE, "fedmgda+auto", 0.95),
    "dual-cone": of_units(PRIVATE, "dual-cone", 0.95),
    "geometric-median": of_units(VERIFIED, "geometric-median", 0.95),
    "centred-clipping": of_units(PRIVATE, "centred-clipping", 0.95),
    "multi-krum": of_units(VERIFIED, "multi-krum", 0.9),
    "nash-mtl": of_units(PRIVATE, "nash-mtl", 0.95),
    "torchjd:upgrad": of_units(PRIVATE, "torchjd:upgrad", 0.95),
    "normalize": of_units(PRIVATE, "geometric-median", 0.95, pre=["normalize"]),
    # after one step, updates are so alike that its coefficients break the share rule: see the test below
    "adafed": replace(of_units(PRIVATE, "adafed", 0.98, ("loss",)), sgd=HUNDRED_STEPS),
    "clip": of_units(PRIVATE, "geometric-median", 0.95, pre=["clip"]),
    "nnm": of_units(VERIFIED, "geometric-median", 0.95, pre=["nnm"]),
    "bucket": of_units(PRIVATE, "geometric-median", 0.9, pre=["bucket"]),
    "fedfv": Case(PRIVATE, {"name": "fedfv"}, {"name": "fedfv"}, 0.9, ("loss", "norm")),
    "fedfv, normalize": of_units(PRIVATE, "fedfv", 0.9, ("loss",), pre=["normalize"]),
}


@cache
def updates(sgd: LocalSgd = ONE_STEP) -> Vector:
    """The updates of all members, (m, d), as their workers make them."""
    subject = task(TASK)
    _, base = initial_model(subject, SEED)
    rows = []
    for place in range(MEMBERS):
        trainer = TorchTrainer(subject, subject.load(DataSource(None, Part(place, MEMBERS))), threads=1)
        (row,) = train(trainer, base, sgd, measure=False).rows.values()
        rows.append(row.astype(np.float64))
    return np.stack(rows)


def moved(made: Members, run: str) -> Vector:
    """The base model of a run less its model, (d,)."""
    blobs = DirectoryStore(made.fed.home / "blobs")
    ((base, model),) = made.fed.query("select base_model, result_model from rounds where run_id = :run", run=run)
    _, before = read_vector(blobs.local(base))
    _, after = read_vector(blobs.local(model))
    return before.astype(np.float64) - after


def error(found: Vector, expected: Vector) -> float:
    """The relative error."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_record(made: Members, run: str, case: Case) -> SecureSession:
    """What the record shows of an honest round; returns what the signed step says."""
    record, step = made.round(run), made.settled(run)
    opened = [] if case.mode is Mode.SUM else ["secure-open"]
    stages = [*STAGES[:3], *opened, *STAGES[3:]] * case.sessions
    assert [phase["kind"] for phase in record["phases"]] == [*stages, "evaluate"]
    assert {(phase["asked"], phase["replied"]) for phase in record["phases"]} == {(MEMBERS, MEMBERS)}
    assert not record.get("voided")
    assert not record["gram_clients"]
    assert {part.get("reason", "") for part in record["participations"]} == {""}
    assert SecureTerms.FromString(step.terms).mode == case.mode.value
    assert list(step.ready) == list(step.members) == list(step.survivors) == list(made.clients)
    assert not step.alarms
    assert 0 < sum(map(abs, step.coefficients)) <= ONE
    return step


def check_sum(step: SecureSession, case: Case, delta: Vector) -> None:
    """The model moved along the sum of the vectors that the coefficients give, and along nothing else."""
    rows = updates(case.sgd)
    U = rows / np.maximum(np.linalg.norm(rows, axis=1), case.clip)[:, None]
    R = np.array(step.coefficients) / ONE @ U
    assert error(delta / np.linalg.norm(delta), R / np.linalg.norm(R)) < 1e-4


@pytest.mark.parametrize("name", few_of(RULES))
def test_a_mode_sums_what_the_coefficients_say(made: Members, name: str) -> None:
    case = RULES[name]
    run = made.fed.completed(re.sub("[^a-z0-9]+", "-", name), specification(case.algorithm, private(case.mode)))
    step, delta = check_record(made, run, case), moved(made, run)
    check_sum(step, case, delta)
    weights = np.array(step.coefficients) / ONE
    if case.mode is Mode.SUM:
        units = updates() / np.linalg.norm(updates(), axis=1)[:, None]
        assert error(delta, units.mean(axis=0)) < 1e-4
    else:
        assert np.abs(weights - 1 / MEMBERS).max() <= 0.04 + 1e-6
        assert weights.max() <= Thresholds(MEMBERS, case.mode).cap
        assert weights.max() - weights.min() > 0.01, "the rule has looked at the Gram matrix"


@pytest.mark.full
@pytest.mark.parametrize("name", [*RULES, *MORE])
def test_each_rule_makes_the_step_of_an_open_round(made: Members, name: str) -> None:
    case = (RULES | MORE)[name]
    label = re.sub("[^a-z0-9]+", "-", name)
    secret = private(case.mode, case.disclose, case.clip)
    run = made.fed.completed(f"private-{label}", specification(case.algorithm, secret, sgd=case.sgd))
    step, delta = check_record(made, run, case), moved(made, run)
    if case.sessions == 1 and case.algorithm["name"] not in ("fsmgda", "scalarised"):
        check_sum(step, case, delta)
    other = made.fed.completed(f"open-{label}", specification(case.opened, {}, sgd=case.sgd))
    expected = moved(made, other)
    if case.near == 1.0:
        assert error(delta, expected) < 1e-4
    else:
        assert float(delta @ expected / np.linalg.norm(delta) / np.linalg.norm(expected)) >= case.near


@pytest.mark.full
def test_a_rule_of_eight_members_survives_kills_of_the_coordinator_and_of_a_member_at_each_stage(made: Members) -> None:
    fed, case, victim = made.fed, RULES["fedmgda+, verified"], made.clients[0]
    fed.serving.stop()
    made.fed.workers[victim].stop()
    for number in range(1, len(STAGES) + 2):
        dying_member = made.work(victim, crash=f"reply-{number}")
        dying = fed.serve(crash=f"phase-{number}")
        run = fed.submit(f"kills-{number}", specification(case.algorithm, private(case.mode)), crash=True)
        dying.wait_killed()
        fed.serve()
        dying_member.wait_killed()
        made.work(victim)
        fed.wait_completed(run)
        check_sum(check_record(made, run, case), case, moved(made, run))
        fed.serving.stop()
        made.fed.workers[victim].stop()
    fed.serve()
    made.work(victim)
    fed.attending(*made.clients)


@pytest.mark.full
def test_a_rule_that_would_give_one_member_too_large_a_share_is_moved_towards_averaging(made: Members) -> None:
    """AdaFed of updates that are much alike: in an open round, one member has a quarter of all coefficients."""
    run = made.fed.completed("adafed-one-step", specification({"name": "adafed"}, private(PRIVATE, ("loss",))))
    ((state, metrics),) = made.fed.query("select state, metrics from rounds where run_id = :run", run=run)
    assert state == "COMPLETED"
    assert 0 < json.loads(metrics)["private/rule_share"] < 1


# --- members that cheat (docs/reference/private-protocol.md, section 4)


@dataclass(frozen=True)
class Cheat:
    """What a member does, and what comes of it.

    Attributes:
        words: see tests/programs/lying.py.
        failed: a regular expression for why the first attempt is voided; empty: it makes a step.
        named: the reason for which the member is named; empty: nobody is.
        left: members that are not in W.
        lost: members of W that are not in V.
        alarms: of the step.
    """

    mode: Mode
    words: str
    failed: str = ""
    named: str = ""
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()


SUM = Mode.SUM
LONG = "sum-length"
CHEATS = [
    Cheat(PRIVATE, "scaled:3", "sum-gram"),
    Cheat(VERIFIED, "scaled:3 shared:3", "share-norm of m3", "share-norm"),
    Cheat(SUM, "accusing:5", left=(CHEAT,), alarms=(f"{CHEAT}: it accuses more than 3 members",)),
]
MORE_CHEATS = [
    # its own vector is longer, and nothing else is wrong
    Cheat(SUM, "scaled:3"),
    Cheat(SUM, "scaled:5", LONG),
    Cheat(PRIVATE, "scaled:1.5"),
    Cheat(PRIVATE, "scaled:5", LONG),
    Cheat(PRIVATE, "scaled:1000", "sum-entry"),
    Cheat(VERIFIED, "scaled:1.5", "sum-sketch"),
    Cheat(VERIFIED, "scaled:2", "sum-sketch"),
    Cheat(VERIFIED, "scaled:3", "sum-sketch"),
    Cheat(VERIFIED, "scaled:5", "sum-sketch"),
    Cheat(VERIFIED, "scaled:1000", "sum-sketch"),
    # and it makes room for it in the Gram matrix
    Cheat(PRIVATE, "scaled:3 raised:0.2:all"),
    Cheat(VERIFIED, "scaled:3 raised:0.2:all", "sum-sketch"),
    # in the second sketch, too
    Cheat(VERIFIED, "scaled:1.5 shared:1.5", "share-norm of m3", "share-norm"),
    Cheat(VERIFIED, "scaled:2 shared:2", "share-norm of m3", "share-norm"),
    Cheat(VERIFIED, "scaled:1000 shared:1000", "share-range of m3", "share-range"),
    Cheat(VERIFIED, "shared:0", "sum-sketch"),
    # shares
    Cheat(VERIFIED, "no-zero", "share-zero of m3", "share-zero"),
    Cheat(VERIFIED, "no-polynomial", "share-degree of m3", "share-degree"),
    Cheat(
        VERIFIED,
        "lower-norms",
        named="wrong-answers",
        alarms=(f"{CHEAT}: wrong answers about the shares of 10 members",),
    ),
    Cheat(PRIVATE, "wrong-masks:1", alarms=(f"{CHEAT}: wrong shares of 1 mask secrets",)),
    Cheat(PRIVATE, "wrong-masks:10", named="wrong-shares", alarms=(f"{CHEAT}: wrong shares of 10 mask secrets",)),
    Cheat(VERIFIED, "wrong-masks:10", named="wrong-shares", alarms=(f"{CHEAT}: wrong shares of 10 mask secrets",)),
    # entries of the Gram matrix
    Cheat(PRIVATE, "raised:0.1:own"),
    Cheat(VERIFIED, "raised:0.1:own"),
    Cheat(PRIVATE, "raised:0.5:own", r"gram-eigenvalue -0\.\d+, at least -0\.09"),
    Cheat(VERIFIED, "raised:0.5:own", "gram-eigenvalue"),
    # ciphertexts, and accusations
    Cheat(SUM, "bad-ciphertexts:1", left=("m0", CHEAT), alarms=(f"m0: it accuses {CHEAT}; both are left out",)),
    Cheat(
        VERIFIED,
        "bad-ciphertexts:9",
        left=(CHEAT,),
        alarms=(f"{CHEAT}: more than 2 members accuse it of bad ciphertexts",),
    ),
    Cheat(VERIFIED, "bad-shares:9", "shares of the second sketch cannot be read", "bad-share"),
    Cheat(PRIVATE, "accusing:5", left=(CHEAT,), alarms=(f"{CHEAT}: it accuses more than 3 members",)),
    Cheat(PRIVATE, "accusing:1", left=("m0", CHEAT), alarms=(f"{CHEAT}: it accuses m0; both are left out",)),
    # statements
    Cheat(PRIVATE, "other-view-at-mask", lost=(CHEAT,), alarms=(f"{CHEAT}: it signed another view at secure-mask",)),
    Cheat(PRIVATE, "other-view-at-confirm", alarms=(f"{CHEAT}: it signed another view at secure-confirm",)),
    Cheat(VERIFIED, "other-view-at-confirm", "lost before the second sketch was shared: m3", "other-view"),
]


def seed_that_leaves_out(member: str, mode: Mode) -> int:
    """A seed with which the member is in the first group that is left out after a check that names nobody."""
    size = 1 if mode is VERIFIED else 3
    names = [f"m{place}" for place in range(MEMBERS)]
    for seed in range(1000):
        if member in sorted(names, key=lambda name: derived_seed(f"groups\0{seed}\0{0}\0{name}"))[:size]:
            return seed
    raise AssertionError(member)


def named_by(made: Members, run: str) -> list[tuple[str, str]]:
    """The audit log: which members a run has named, each with where and why."""
    rows = made.fed.query("select subject, detail from audit_log where action = 'member.named' order by entry_id")
    return [(subject, detail) for subject, detail in rows if f"run {run} " in detail]


@pytest.mark.parametrize(
    "cheat",
    few_of([*CHEATS, *MORE_CHEATS]),
    ids=lambda cheat: f"{cheat.mode}: {cheat.words}",
)
def test_a_member_that_cheats(made: Members, cheat: Cheat) -> None:
    label = re.sub("[^a-z0-9]+", "-", f"{cheat.mode}-{cheat.words}")
    text = specification({"name": "fedavg-n"}, private(cheat.mode), seed=seed_that_leaves_out(CHEAT, cheat.mode))
    with made.cheating(**{CHEAT: cheat.words}):
        run = made.fed.completed(label, text)
    record, step = made.round(run), made.settled(run)
    voided = [(one["attempt"], one.get("named", [])) for one in record.get("voided", [])]
    assert voided == (
        [(0, [{"client_id": CHEAT, "reason": cheat.named}] if cheat.named else [])] if cheat.failed else []
    )
    for one in record.get("voided", []):
        assert re.search(cheat.failed, one["reason"])
    where = f"run {run} round 0 attempt 0: {cheat.named}"
    assert named_by(made, run) == ([(CHEAT, where)] if cheat.named else [])
    told = {part["client_id"]: part.get("reason", "") for part in record["participations"]}
    gone = set(made.clients) - set(step.ready)
    if cheat.named and cheat.failed:
        assert gone == {CHEAT}
        assert told[CHEAT] == f"named as a cheater: {cheat.named}; its last attempt was 0"
        shown = made.fed.fedpareto("admin", "round", run, "0", "--home", str(made.fed.home / "admin"))
        assert f"named: {CHEAT} ({cheat.named})" in " ".join(shown.split())
    elif cheat.failed:
        assert CHEAT in gone
        assert len(gone) == (1 if cheat.mode is VERIFIED else 3)
        assert {told[name] for name in gone} == {"not asked again; its last attempt was 0"}
    else:
        assert not gone
    assert set(step.ready) - set(step.members) == set(cheat.left)
    assert set(step.members) - set(step.survivors) == set(cheat.lost)
    assert tuple(step.alarms) == cheat.alarms


@pytest.mark.full
def test_two_members_that_lie_about_norms_are_both_named_and_eight_are_too_few(made: Members) -> None:
    """They are named in a round that makes its step, and are not asked in the next one."""
    text = specification({"name": "fedavg-n"}, private(VERIFIED)).replace("rounds = 1", "rounds = 2")
    with made.cheating(**{CHEAT: "lower-norms", OTHER: "lower-norms"}):
        run = made.fed.completed("two-lie", text)
    assert [name for name, _ in named_by(made, run)] == [CHEAT, OTHER]
    found = made.fed.query("select state, reason from rounds where run_id = :run order by number", run=run)
    (first, _), (state, reason) = found
    assert (first, state) == ("COMPLETED", "SKIPPED")
    assert "8 members can be invited; a private round in mode verified of 10 members needs 9" in reason


@pytest.mark.full
def test_one_bad_share_of_the_second_sketch_costs_the_answer_of_its_receiver(made: Members) -> None:
    text = specification({"name": "fedavg-n"}, private(VERIFIED))
    with made.cheating(**{CHEAT: "bad-shares:1"}):
        run = made.fed.completed("bad-share", text)
    record, step = made.round(run), made.settled(run)
    assert list(step.survivors) == list(made.clients)
    (told,) = (part["reason"] for part in record["participations"] if part.get("reason"))
    assert told.startswith(f"bad-share:{CHEAT}")
    assert record["phases"][-2]["replied"] == MEMBERS - 1
    assert not named_by(made, run)


@pytest.mark.full
def test_a_member_that_signs_two_statements_leaves_both_on_record(made: Members) -> None:
    text = specification({"name": "fedavg-n"}, private(VERIFIED))
    with made.cheating(**{CHEAT: "two-statements"}):
        run = made.fed.completed("two-statements", text)
        made.fed.workers[CHEAT].wait_for_text("the second reply was refused: StatusCode.ALREADY_EXISTS")
    assert list(made.settled(run).survivors) == list(made.clients)
    details = made.fed.query("select detail from audit_log where action = 'reply.equivocation'")
    assert [True for (detail,) in details if detail.startswith(f"run {run} round 0: ")] == [True]
    assert not named_by(made, run)


# --- a member that is revoked; the last test, since it does not come back


@pytest.mark.full
def test_a_member_that_is_revoked_during_a_session_voids_it_and_the_next_attempt_is_without_it(made: Members) -> None:
    """It is revoked while the others wait for another member's masked vector, and after its own was accepted."""
    text = specification({"name": "fedavg-n"}, private(VERIFIED))
    replied = (
        "select count(*) from assignments join phases using (phase_id) join rounds using (round_id) "
        "where run_id = :run and phases.kind = 'secure-mask' and assignments.state = 'FULFILLED'"
    )
    with made.cheating(**{OTHER: "waits:secure-mask"}):
        run = made.fed.submit("revoked", text)
        wait_for(lambda: made.fed.query(replied, run=run)[0][0] == MEMBERS - 1, "the masked vectors of the others")
        made.fed.admin("revoke", CHEAT, "--reason", "its owner has left", "--yes")
    made.fed.wait_completed(run)
    record, step = made.round(run), made.settled(run)
    ((attempt, reason),) = ((one["attempt"], one["reason"]) for one in record["voided"])
    assert (attempt, reason) == (0, "a member was revoked during the private round")
    assert list(step.ready) == list(step.survivors) == [name for name in made.clients if name != CHEAT]
    assert not step.alarms
    assert not named_by(made, run)
    check_verifies(made, run)


def check_verifies(made: Members, run: str) -> None:
    """An outsider verifies the record of a run with a voided attempt; without payloads it names what it lacks."""
    path = made.fed.directory / "revoked.fedpareto"
    made.fed.admin("bundle", run, "--payloads", "--yes", "--out", str(path))
    document = json.loads(made.fed.fedpareto("verify", str(path), "--json"))
    assert (document["verified"], document["wrong"]) == (True, "")
    made.fed.admin("bundle", run, "--out", str(path), "--force")
    document = json.loads(made.fed.fedpareto("verify", str(path), "--json", code=3))
    (round_,) = document["rounds"]
    assert {"entropy", "private/members", "direction_norm", "bytes/down"} <= {*round_["metrics_not_verified"]}
    assert "step/rate" not in round_["metrics_not_verified"]
    assert any(reason.startswith("metrics: ") for reason in round_["missing"])
    assert made.fed.admin("audit", "verify")["problems"] == []
