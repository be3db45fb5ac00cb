"""Private rounds: a federation of real workers whose owners have pinned a roster, and sessions as a coordinator asks.

Some of the workers cheat when a test says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.secure.thresholds import BLUR, Mode
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.trust.envelope import key_id
from federation.trust.join_string import JoinStringFields
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import AssignmentManifest, SecureSession, SignedEnvelope, StepManifest
from federation.v1.secure_pb2 import SecureReadyWork
from federation.work.secure.ready import SPECIFICATION
from federation.work.secure.terms import Invited, SessionTerms
from federation.work.secure.wire import terms_bytes
from federation.work.train.work import Train
from tests.harness import SECONDS, Federation, Process, federation, wait_for
from tests.paths import PROGRAMS
from tests.scripted import CLIENT, FEDERATION
from tests.works import offer_input
from worker.connection.enroll import enroll
from worker.home import WorkerHome
from worker.site.roster import Card, Roster

POLICY = """\
[secure]
disclose = ["accuracy", "evaluation", "loss", "norm"]
sessions_per_model = 1000
sums_per_model = 1000
"""
TASK = "two-digits"
STAGES = ["secure-ready", "secure-deal", "secure-open", "secure-mask", "secure-confirm", "secure-unmask"]
"""The stages of the mode `sum`; the others open the Gram matrix after the third."""


DOCUMENT = b"""
name = "run"
task = "digits"
rounds = 1
seed = 7
algorithm.name = "fedavg-n"
privacy.secure = "sum"
train.steps = 1
"""
"""The specification of a private run."""
OTHERS = [f"hospital-{name}" for name in "bcde"]


def keys_of_five(member: MemberFiles) -> dict[str, Ed25519PrivateKey]:
    """The signing keys of a member and of four others."""
    return {CLIENT: member.signing_key} | {name: Ed25519PrivateKey.generate() for name in OTHERS}


def pin(home: WorkerHome, member: MemberFiles, keys: dict[str, Ed25519PrivateKey]) -> None:
    """Makes the home of a member, who has pinned the roster of these keys."""
    home.directory.mkdir()
    cards = [Card(FEDERATION, name, key.public_key().public_bytes_raw()) for name, key in keys.items()]
    Roster.parse("".join(card.text() for card in cards), member).pin(home.roster)


def invited(keys: dict[str, Ed25519PrivateKey]) -> tuple[Invited, ...]:
    """The members with the ids of their keys, sorted."""
    return tuple(Invited(name, key_id(key.public_key())) for name, key in sorted(keys.items()))


def session_terms(
    asked: AssignmentManifest, keys: dict[str, Ed25519PrivateKey], document: bytes = DOCUMENT, **changes: Any
) -> SessionTerms:
    """What the members agree on for a session of an assignment, in round 0 of the run `run`."""
    fields: dict[str, Any] = {
        "federation_id": FEDERATION, "run_id": "run", "round": 0, "mode": Mode.SUM, "base_model": asked.base_model,
        "spec": digest(document), "task": "digits", "length": asked.rows[0].length, "clip": 0.0, "blur": BLUR,
        "disclose": (), "invited": invited(keys), "seed": asked.seed, "unshared": Unshared(),
        "work": Train.of(RunSpec.parse(document), 0, joint_target(("loss",))),
    }  # fmt: skip
    return SessionTerms(**{**fields, **changes})


def to_be_ready(asked: AssignmentManifest, terms: SessionTerms, document: bytes = DOCUMENT) -> AssignmentManifest:
    """The assignment, to become ready for a session of a run with this specification."""
    del asked.rows[:]
    asked.kind, asked.work = "secure-ready", SecureReadyWork(terms=terms_bytes(terms)).SerializeToString()
    offer_input(asked, SPECIFICATION, document)
    return asked


def pin_each_other(homes: Sequence[WorkerHome], policy: str) -> None:
    """Pins the keys of all members in each member's directory, as owners do before private rounds."""
    members = [MemberFiles.load(home.directory) for home in homes]
    cards = "\n".join(Card.of(member).text() for member in members)
    for home, member in zip(homes, members, strict=True):
        Roster.parse(cards, member).pin(home.roster)
        home.policy.write_text(policy)


def specification(
    members: int, algorithm: Mapping[str, Any], privacy: Mapping[str, Any], *, seed: int, **more: Mapping[str, Any]
) -> str:
    """A run of one round for this many members."""
    document: dict[str, Any] = {
        "task": TASK,
        "rounds": 1,
        "seed": seed,
        "algorithm": algorithm,
        "selection": {"minimum": members, "pool": "enrolled"},
        "evaluate": {"every": 0, "splits": ["test"]},
        "privacy": privacy,
    }
    return tomli_w.dumps({**document, **more})


class Members:
    """Members with equal parts of one data set, all of whom have pinned the same roster.

    A client of `cheats` has a file that names what its worker does wrong.
    """

    def __init__(
        self, fed: Federation, clients: Sequence[str], cheats: Sequence[str] = (), *, task: str = TASK
    ) -> None:
        self.fed, self.clients, self.task = fed, tuple(clients), task
        self.cheats = {name: fed.directory / f"{name}.cheats" for name in cheats}

    def enrol(self, policy: str) -> None:
        """Enrols all members, who then pin the roster of all."""
        homes = [WorkerHome(self.fed.directory / name) for name in self.clients]
        with self.fed.administrator() as channel:
            for name, home in zip(self.clients, homes, strict=True):
                asked = CreateJoinStringRequest(client_id=name)
                text = AdminStub(channel).CreateJoinString(asked, timeout=SECONDS).join_string
                enroll(home, JoinStringFields.decode(text))
        pin_each_other(homes, policy)

    def work(self, client: str, *options: str, crash: str = "") -> Process:
        """Starts a member's worker, with further options."""
        program: list[str] = []
        if client in self.cheats:
            self.cheats[client].touch()
            program = [str(PROGRAMS / "lying.py"), str(self.cheats[client])]
        part = f"{self.clients.index(client) + 1}/{len(self.clients)}"
        return self.fed.work(client, "--set", f"part={part}", *options, task=self.task, program=program, crash=crash)

    @contextmanager
    def cheating(self, **chosen: str) -> Iterator[None]:
        """Members cheat meanwhile; the word of each names how (see tests/programs/lying.py)."""
        try:
            for client, words in chosen.items():
                self.cheats[client].write_text(words)
            yield
        finally:
            for client in chosen:
                self.cheats[client].write_text("")

    def approve(self, run: str) -> None:
        """The owner of each member approves a run, after the worker was asked."""
        for client in self.clients:
            home = ("--home", str(self.fed.directory / client))
            asked = lambda home=home: run in self.fed.fedpareto("worker", "runs", *home)  # noqa: E731
            wait_for(asked, f"{client} to be asked")
            self.fed.fedpareto("worker", "approve", run, *home)

    def round(self, run: str) -> Any:
        """What `admin round` shows of the run's only round."""
        return self.fed.admin("round", run, "0")

    def step(self, run: str) -> StepManifest:
        """The signed step of the run's only round."""
        ((step,),) = self.fed.query("select step from rounds where run_id = :run", run=run)
        return StepManifest.FromString(SignedEnvelope.FromString(step).manifest)

    def settled(self, run: str) -> SecureSession:
        """What that step says of its last session."""
        return self.step(run).secure[-1]


@contextmanager
def scene(
    directory: Path, members: int, *, cheats: Sequence[str] = (), program: str = "", policy: str = POLICY
) -> Iterator[Members]:
    """A federation with this many members, m0 to m9 at most, whose workers attend and whose owners have this policy.

    `program` is a Python program that runs the coordinator, in place of it.
    """
    with federation(directory) as fed:
        fed.serve(program=program)
        made = Members(fed, [f"m{number}" for number in range(members)], cheats)
        made.enrol(policy)
        for client in made.clients:
            made.work(client)
        fed.attending(*made.clients)
        yield made
