"""What tests of runs share: workers with options of their own, private runs, and simulations that were halted."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust.envelope import sign, verify
from federation.v1.common_pb2 import ConsentManifest, RunManifest
from federation.v1.federation_pb2 import AttendRequest, AttendResponse
from fedpareto.simulation.simulate import Simulation
from fedpareto.simulation.simulation_progress import SimulationProgress
from tests.harness import Attending, Federation, Process, federation
from tests.stage import Player

PRIVATE = """\
name = "private"
task = "digits"
rounds = 1
algorithm.name = "fedavg-n"
selection.minimum = 5
train = { steps = 1, batch_size = 20 }
evaluate.splits = ["test"]
privacy.secure = "sum"
simulation.clients = 5
"""


class Scene:
    """Members of a federation, each with its part of the data."""

    def __init__(self, fed: Federation, options: Mapping[str, Sequence[str]], task: str) -> None:
        self.fed, self.options, self.task = fed, options, task

    def work(self, client: str, crash: str = "") -> Process:
        return self.fed.work(client, *self.options[client], task=self.task, crash=crash)

    def exported(self, client: str, run: str) -> tuple[str, bytes]:
        """What the member's command shows of the personal parameters that it exports, and their file."""
        path = self.fed.directory / f"{client}.safetensors"
        home = str(self.fed.directory / client)
        shown = self.fed.fedpareto("worker", "export", run, "--out", str(path), "--home", home, "--json")
        return shown, path.read_bytes()

    def admin(self, *arguments: str) -> str:
        return self.fed.fedpareto("admin", "--home", str(self.fed.home / "admin"), *arguments)


@contextmanager
def serving(directory: Path, options: Mapping[str, Sequence[str]], task: str = "digits") -> Iterator[Scene]:
    """A coordinator that these members have joined."""
    with federation(directory) as fed:
        fed.serve()
        for client in options:
            fed.join(client)
        yield Scene(fed, options, task)


def halted(document: bytes, home: Path) -> None:
    """A simulation that is stopped after its second round."""
    with Simulation(document, home, threads=1) as simulation:

        def stop(progress: SimulationProgress) -> None:
            if progress.done == 2:
                simulation.stop()

        simulation.run(stop)


def kept_file(home: Path, client: str, number: int) -> Path:
    """What a simulated client has kept of a round."""
    return home / "kept" / client / f"{number}.safetensors"


def attends(player: Player, task: str) -> Attending:
    """The stream of a client that answers each run."""
    player.leave()
    stream = Attending(player.member, {task: 10}, consents=True)
    assert isinstance(stream.next(), AttendResponse)
    return stream


def asked(player: Player, stream: Attending) -> RunManifest:
    """The run that asks it to take part."""
    while True:
        message = stream.next()
        assert isinstance(message, AttendResponse)
        if message.WhichOneof("message") == "run":
            return verify(message.run, RunManifest, player.member.files.coordinator.chain.present)


def answer(player: Player, run: RunManifest, said: str, **changes: str) -> ConsentManifest:
    made = ConsentManifest(
        federation_id=run.federation_id, client_id=player.name, run_id=run.run_id, spec=run.spec, answer=said
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def say(player: Player, stream: Attending, said: ConsentManifest, key: Ed25519PrivateKey | None = None) -> None:
    stream.say(AttendRequest(consent=sign(said, key or player.member.files.signing_key)))
