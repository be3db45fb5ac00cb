"""What the tests of several coordinators have in common: calm runs, and runs whose conductor is killed or frozen."""

import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.harness import Member, wait_for
from tests.process_state import process_state
from tests.running import Running
from tests.soak.checks import Calm, Checks, Place, questions
from tests.soak.cluster import Cluster, Coordinator
from tests.stage import Player, Stage

LEASE_SECONDS = 1.5
SETTINGS: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.5}
REFUSED = "a change by this coordinator was refused: another coordinator has taken it"


class Scene:
    """A cluster whose runs are compared with calm ones."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.checks = Checks(cluster)
        self._calm: dict[tuple[str, int], Calm] = {}

    def calm(self, spec: str, rounds: int = 2) -> Calm:
        """A run while nothing happens; of private ones the second, since members measure a model once."""
        if (spec, rounds) not in self._calm:
            for _ in range(1 + ("[privacy]" in spec)):
                run = self.cluster.submit(self.cluster.first, spec, rounds=rounds)
                self._calm[spec, rounds] = Calm.of(self.cluster, run)
            assert self.checks.of_run(run, self._calm[spec, rounds], {}, self.cluster.first) == []
        return self._calm[spec, rounds]

    def submit(self, conductor: Coordinator, spec: str, *, rounds: int = 2, crash: bool = False) -> str:
        """Submits a run that this coordinator conducts, or has conducted; returns its id. `crash` as of `Cluster`.

        Another coordinator may look for runs just then, and be faster. Then its run ends, and the next one is tried.
        """
        while True:
            run = self.cluster.submit(conductor, spec, rounds=rounds, crash=crash)
            wait_for(partial(self._taken, run, 1), f"somebody to conduct {run}")
            if not conductor.alive or self._taken(run, 2) or self.cluster.conducts(run) is conductor:
                return run
            self.cluster.wait_ended(run)

    def asked(self, run: str) -> Mapping[Place, str]:
        """The questions on record now."""
        return questions(self.cluster, run)

    def problems(
        self, run: str, spec: str, by: Coordinator, asked: Mapping[Place, str] | None = None, *, rounds: int = 2
    ) -> list[str]:
        """Waits until a run has ended, and returns what is wrong with it; see `Checks.of_run`."""
        self.cluster.wait_ended(run)
        return self.checks.of_run(run, self.calm(spec, rounds), asked or {}, by)

    def restart(self, coordinator: Coordinator, *, crash: str = "") -> None:
        """Stops a coordinator in order, and starts it again with a member; `crash` as of programs/crashing.py."""
        coordinator.serving.stop()
        coordinator.serve(crash=crash)
        self.cluster.move(next(iter(self.cluster.workers)), coordinator)
        self.cluster.attending(*self.cluster.workers)

    def wait_taken(self, run: str) -> float:
        """Waits until another coordinator than the first conductor has taken a run; returns the seconds of waiting."""
        began = time.monotonic()
        wait_for(partial(self._taken, run, 2), f"somebody to take {run}")
        return time.monotonic() - began

    def _taken(self, run: str, times: int) -> bool:
        return self._look(f"select epoch >= {times} from runs where run_id = :run", run)

    def wait_round(self, run: str, number: int) -> None:
        """Waits until a run has begun a round."""
        sql = f"select count(*) > 0 from rounds where run_id = :run and number >= {number}"
        wait_for(lambda: self._look(sql, run), f"round {number} of run {run}")

    def _look(self, sql: str, run: str) -> bool:
        return bool(self.cluster.query(sql, run=run)[0][0])

    def oversleep(self, sleeper: Coordinator, spec: str, *options: str) -> tuple[str, list[str]]:
        """A conductor is frozen before it records its step, and wakes up when the run is in its next round.

        Args:
            sleeper: conducts the run, and is started again before.
            spec: of the run, which has three rounds.
            options: further ones of programs/crashing.py.

        Returns the log of the conductor from its start on, and what is wrong with the run.
        """
        self.calm(spec, 3)
        before = len(sleeper.serving.text)
        self.restart(sleeper, crash=",".join(["model-written", "frozen", *options]))
        run = self.submit(sleeper, spec, rounds=3)
        wait_for(lambda: is_stopped(sleeper.pid), f"coordinator {sleeper.name} to stop itself")
        asked = self.asked(run)
        self.wait_taken(run)
        self.wait_round(run, 1)
        worker = next(iter(self.cluster.workers.values()))
        worker.send(signal.SIGSTOP)  # so the run waits for it
        try:
            sleeper.thaw()
            signs = (REFUSED, "round 0: stepped to", ": paused")
            wait_for(lambda: any(sign in sleeper.serving.text[before:] for sign in signs), "the conductor to wake up")
        finally:
            worker.send(signal.SIGCONT)
        found = self.problems(run, spec, sleeper, asked, rounds=3)
        return sleeper.serving.text[before:], found


def is_stopped(pid: int) -> bool:
    """True if a process is stopped by a signal."""
    return process_state(pid) == "T"


def player_at(served: Running, stage: Stage, name: str, **tasks: int) -> Player:
    """A client that joined at this coordinator, and attends there."""
    made = stage.players[name] = Player(Member.enroll(served.join_string(name)))
    made.attend(**tasks)
    return made


def two_players(first: Stage, second: Running, here: str, there: str) -> tuple[str, Player, Player]:
    """A new task, a client that attends at the first coordinator with it, and one at the second."""
    task = first.task()
    return task, player_at(first.served, first, here, **{task: 10}), player_at(second, first, there, **{task: 10})
