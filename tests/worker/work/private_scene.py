"""A federation of real workers whose owners have pinned a roster; some of them cheat when a test says so."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from federation.trust.join_string import JoinStringFields
from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import SecureSession, SignedEnvelope, StepManifest
from tests.harness import SECONDS, Federation, Process, federation
from tests.paths import PROGRAMS
from worker.home import WorkerHome
from worker.line.enroll import enroll
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


class Scene:
    """Members with equal parts of one data set, all of whom have pinned the same roster.

    `workers` are their processes, by client. A client of `cheats` has a file that names what its worker does wrong.
    """

    def __init__(self, fed: Federation, clients: Sequence[str], cheats: Sequence[str]) -> None:
        self.fed, self.clients = fed, tuple(clients)
        self.cheats = {name: fed.directory / f"{name}.cheats" for name in cheats}
        self.workers: dict[str, Process] = {}

    def enrol(self, policy: str) -> None:
        """Enrols all members, who then pin the roster of all."""
        with self.fed.administrator() as channel:
            stub = AdminStub(channel)
            texts = [
                stub.CreateJoinString(CreateJoinStringRequest(client_id=name), timeout=SECONDS).join_string
                for name in self.clients
            ]
        homes = {name: WorkerHome(self.fed.directory / name) for name in self.clients}
        members = {
            name: enroll(home, JoinStringFields.decode(text)).member
            for (name, home), text in zip(homes.items(), texts, strict=True)
        }
        cards = "\n".join(Card.of(member).text() for member in members.values())
        for name, home in homes.items():
            Roster.parse(cards, members[name]).pin(home.roster)
            home.policy.write_text(policy)

    def work(self, client: str) -> None:
        """Starts a member's worker."""
        program: list[str] = []
        if client in self.cheats:
            self.cheats[client].touch()
            program = [str(PROGRAMS / "lying.py"), str(self.cheats[client])]
        part = f"{self.clients.index(client) + 1}/{len(self.clients)}"
        self.workers[client] = self.fed.work(client, "--part", part, task=TASK, program=program)

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

    def round(self, run: str) -> Any:
        """What `admin round` shows of the run's only round."""
        return self.fed.admin("round", run, "0")

    def settled(self, run: str) -> SecureSession:
        """What the signed step of the run's only round says of its last session."""
        ((step,),) = self.fed.query("select step from rounds where run_id = :run", run=run)
        return StepManifest.FromString(SignedEnvelope.FromString(step).manifest).secure[-1]


@contextmanager
def scene(
    directory: Path, members: int, *, cheats: Sequence[str] = (), program: str = "", policy: str = POLICY
) -> Iterator[Scene]:
    """A federation with this many members, m0 to m9 at most, whose workers attend and whose owners have this policy.

    `program` is a Python program that runs the coordinator, in place of it.
    """
    with federation(directory) as fed:
        fed.serve(program=program)
        made = Scene(fed, [f"m{number}" for number in range(members)], cheats)
        made.enrol(policy)
        for client in made.clients:
            made.work(client)
        fed.attending(*made.clients)
        yield made
