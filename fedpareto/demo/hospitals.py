"""The federation of the demo: ten hospitals as processes on this machine, each with its own keys and data."""

from collections.abc import Sequence
from pathlib import Path

from federation.tasks import digits, scanners
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.processes.local_federation import LocalFederation

HOSPITALS = tuple(f"hospital-{number + 1}" for number in range(scanners.HOSPITALS))
TWO = tuple(HOSPITALS[index] for index in scanners.TURNED)  # have another scanner
EIGHT = tuple(name for name in HOSPITALS if name not in TWO)
ATTACKER = HOSPITALS[0]
# The private rounds have a cheater, who spoils the first sum from one model; the owners allow a second one.
POLICY = "[secure]\nsums_per_model = 2\n"


class Hospitals(LocalFederation):
    """The hospitals; `seed` is that of the deal of the images, `tasks` are those that their workers offer."""

    def __init__(self, directory: Path, *, seed: int, tasks: Sequence[str]) -> None:
        super().__init__(directory, HOSPITALS)
        self._seed, self._tasks = seed, tasks
        self._attack = ""

    def found(self) -> None:
        """Makes the federation, and each hospital's part of the images."""
        making = self.founding("demo")
        parts = [self.data(name) for name in HOSPITALS]  # written while the other process works
        if "scanners" in self._tasks:
            scanners.write_parts(parts, seed=self._seed)
        if any(task != "scanners" for task in self._tasks):
            digits.write_parts(parts, scheme="iid", seed=self._seed)
        self.finish(making)

    def data(self, name: str) -> Path:
        """The directory of a hospital's images."""
        return self.directory / "data" / name

    def cast(self, stub: AdminStub, attack: str) -> None:
        """Starts the workers, or the attacker's again if its attack changes; waits until all attend.

        An empty `attack` makes the attacker honest.
        """
        if ATTACKER in self.workers and attack != self._attack:
            self.stop(self.workers.pop(ATTACKER))
        self._attack = attack
        tasks = [option for task in self._tasks for option in ("--task", task)]
        options = {name: ["--data", str(self.data(name)), "--device", "cpu", *tasks] for name in HOSPITALS}
        if attack:
            options[ATTACKER] += ["--set", f"attack={attack}"]
        self.attend(stub, options)
