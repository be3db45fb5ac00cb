"""Runs one after the other on a cluster that is not left in peace, with checks after each."""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from coordinator.rounds.runs.run_states import HELD_REASONS
from tests.harness import wait_for
from tests.soak.checks import Calm, Checks, Place, questions
from tests.soak.cluster import OPEN, PRIVATE, Cluster
from tests.soak.faults import Fault, Inflictor, Kind, Repair
from tests.soak.figures import Sample

ROUNDS = {OPEN: 16, PRIVATE: 6}
STUCK_SECONDS = 180.0  # without an end of the run, after which the soak gives up
TICK_SECONDS = 0.02
SHOW_SECONDS = 10.0
RESTART_SECONDS = 1.0  # after a start that failed
# Faults of a coordinator that conducts a run, after which another one takes it if they last.
_PARTING = (Kind.KILLED, Kind.FROZEN, Kind.SILENT)


@dataclass
class Findings:
    """What has happened so far.

    Attributes:
        faults: how many of each kind.
        runs: how many have ended, by their kind.
        problems: what was wrong; empty if nothing was.
        takeovers: seconds from a fault of the conductor until another coordinator took its run, by the fault.
        leases: how often another coordinator took a run.
        refused: writes of conductors that had lost their leases.
        starts: of coordinators that failed, since PostgreSQL was away, and were repeated.
        samples: memory, descriptors and threads.
        seconds: since the beginning.
        under_way: seconds in which a run was under way; faults begin only then.
    """

    faults: Counter[Kind] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    takeovers: list[tuple[Kind, float]] = field(default_factory=list)
    leases: int = 0
    refused: int = 0
    starts: int = 0
    receipts: int = 0
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    under_way: float = 0.0


class Stuck(Exception):
    """A run does not end."""


class Soak:
    """Plays runs and faults.

    Args:
        cluster: what is soaked; it is started.
        inflictor: makes the faults happen.
        faults: those to come.
        lease: the seconds of a lease; shorter faults make no other coordinator take a run.
        show: tells of the progress.
    """

    def __init__(
        self,
        cluster: Cluster,
        inflictor: Inflictor,
        faults: Iterator[Fault],
        *,
        lease: float,
        show: Callable[[str], None],
    ) -> None:
        self.findings = Findings()
        self._cluster = cluster
        self._inflictor = inflictor
        self._faults = faults
        self._lease = lease
        self._show = show
        self._checks = Checks(cluster)
        self._calm: dict[str, Calm] = {}
        self._began = time.monotonic()
        self._shown = self._began
        self._repairs: list[tuple[float, int, str, Repair]] = []
        self._numbers = count()
        self._next: Fault | None = None
        self._waited = 0.0  # seconds since the last fault in which a run was under way
        self._parted: tuple[Kind, float, int] | None = None  # a conductor's fault: the time, and the epoch before it
        self._read: dict[str, int] = dict.fromkeys(cluster.coordinators, 0)

    def prepare(self) -> None:
        """Plays the calm runs with which the others are compared; members measure a model of a private run once."""
        for spec, times in ((OPEN, 1), (PRIVATE, 2)):
            for _ in range(times):
                run = self._cluster.submit(self._cluster.first, spec, rounds=ROUNDS[spec])
                self._calm[spec] = Calm.of(self._cluster, run)
            self._check(run, spec, {}, 0)

    def play(self, seconds: float) -> None:
        """Plays runs for this time; the last one ends a little later.

        Raises:
            Stuck: a run does not end.
        """
        self._began = time.monotonic()
        for number in count():
            if self._elapsed >= seconds:
                break
            self._play_run(OPEN if number % 2 == 0 else PRIVATE, number)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _play_run(self, spec: str, number: int) -> None:
        coordinators = [*self._cluster.coordinators.values()]
        run = self._cluster.submit(coordinators[number % len(coordinators)], spec, rounds=ROUNDS[spec])
        asked: Mapping[Place, str] = {}
        began = looked = self._elapsed
        while not self._ended(run):
            now = self._elapsed
            if now > began + STUCK_SECONDS:
                raise Stuck(f"run {run} has not ended after {STUCK_SECONDS:.0f} s: {self._cluster.state(run)}")
            self._waited, looked = self._waited + now - looked, now
            if self._waited >= self._upcoming.after:
                asked = questions(self._cluster, run) or asked
                self._inflict(self._upcoming, run)
                self._next, self._waited = None, 0.0
            self._repair()
            self._supervise()
            self._look_at_lease(run)
            self._show_progress()
            time.sleep(TICK_SECONDS)
        self.findings.under_way += self._elapsed - began
        self._parted = None
        self._repair(everything=True)
        wait_for(self._all_served, "the coordinators to serve")
        self._cluster.wait_serving()
        self._check(run, spec, asked, number)

    @property
    def _upcoming(self) -> Fault:
        """The next fault. What has a fault still, gets no other one."""
        busy = {target for _, _, target, _ in self._repairs}
        while self._next is None or self._next.target in busy:
            self._next = next(self._faults)
        return self._next

    def _inflict(self, fault: Fault, run: str) -> None:
        """Makes a fault happen, unless its coordinator does not serve yet."""
        target = self._cluster.coordinators.get(fault.target)
        if target is not None and not target.serves:
            return
        conductor = self._conductor(run)
        repair = self._inflictor.inflict(fault)
        self.findings.faults[fault.kind] += 1
        parts = fault.kind is Kind.KILLED or (fault.kind in _PARTING and fault.seconds > self._lease)
        if parts and conductor is not None and conductor[0] == fault.target and not self._parted:
            self._parted = (fault.kind, self._elapsed, conductor[1])
        if repair is not None:
            self._later(fault.seconds, fault.target, repair)

    def _later(self, seconds: float, target: str, repair: Repair) -> None:
        heapq.heappush(self._repairs, (self._elapsed + seconds, next(self._numbers), target, repair))

    def _repair(self, *, everything: bool = False) -> None:
        """Ends the faults whose time is over."""
        while self._repairs and (everything or self._repairs[0][0] <= self._elapsed):
            heapq.heappop(self._repairs)[3]()

    def _supervise(self) -> None:
        """Starts coordinators again that could not start, as the machine's supervisor does."""
        under_repair = {target for _, _, target, _ in self._repairs}
        for name, coordinator in self._cluster.coordinators.items():
            if not coordinator.alive and name not in under_repair:
                if coordinator.has_served:
                    log = coordinator.serving.text
                    self.findings.problems.append(f"coordinator {name} has ended by itself: {log[-1500:]}")
                    self._show(f"PROBLEM: coordinator {name} has ended by itself: {log[-1500:]}")
                self.findings.starts += 1
                self._later(RESTART_SECONDS, name, coordinator.begin)

    def _all_served(self) -> bool:
        self._supervise()
        self._repair()
        return all(coordinator.has_served for coordinator in self._cluster.coordinators.values())

    def _conductor(self, run: str) -> tuple[str, int] | None:
        """The name of the coordinator that conducts a run, and the epoch; None if PostgreSQL does not answer."""
        sql = (
            "select c.address, r.epoch from runs r left join coordinators c on c.coordinator = r.conductor "
            "where r.run_id = :run"
        )
        rows = self._cluster.glance(sql, run=run)
        if not rows:
            return None
        address, epoch = rows[0]
        found = [name for name, one in self._cluster.coordinators.items() if one.address == address]
        return (found[0] if found else "", epoch)

    def _look_at_lease(self, run: str) -> None:
        """Notes how long it took until a run was taken over; a short fault ends before."""
        if self._parted is None:
            return
        kind, since, before = self._parted
        now = self._conductor(run)
        if now is not None and now[1] > before:
            self.findings.takeovers.append((kind, self._elapsed - since))
            self._parted = None

    def _ended(self, run: str) -> bool:
        rows = self._cluster.glance("select state, reason from runs where run_id = :run", run=run)
        if not rows:
            return False
        state, reason = rows[0]
        return state in ("COMPLETED", "FAILED", "STOPPED") or (
            state == "PAUSED" and not reason.startswith(HELD_REASONS)
        )

    def _check(self, run: str, spec: str, asked: Mapping[Place, str], number: int) -> None:
        coordinators = [*self._cluster.coordinators.values()]
        by = coordinators[(number + 1) % len(coordinators)]
        found = self._checks.of_run(run, self._calm[spec], asked, by)
        found += [*self._of_processes()]
        self.findings.problems += [f"{self._elapsed:.0f} s, run {run} ({_kind(spec)}): {one}" for one in found]
        for problem in found:
            self._show(f"PROBLEM: {problem}")
        self.findings.runs[_kind(spec)] += 1
        self.findings.receipts = self._checks.receipts
        self.findings.seconds = self._elapsed
        self.findings.leases += self._cluster.query("select epoch from runs where run_id = :run", run=run)[0][0] - 1
        now = time.time()
        self.findings.samples += [Sample.of(one, self._elapsed, now) for one in coordinators]

    def _of_processes(self) -> Iterator[str]:
        """No unexpected error comes to the log of a coordinator."""
        for name, coordinator in self._cluster.coordinators.items():
            log = coordinator.serving.log
            with log.open(errors="replace") as file:
                file.seek(self._read[name])
                new = file.read()
                self._read[name] = file.tell()
            self.findings.refused += new.count("a change by this coordinator was refused")
            if (place := new.find("Traceback")) >= 0:
                shown = new[max(0, place - 300) : place + 2500]
                yield f"{new.count('Traceback')} tracebacks in the log of coordinator {name}: {shown}"

    def _show_progress(self) -> None:
        if time.monotonic() - self._shown >= SHOW_SECONDS:
            self._shown = time.monotonic()
            found = self.findings
            self._show(
                f"{self._elapsed / 60:.1f} min: {found.runs.total()} runs, {found.faults.total()} faults, "
                f"{len(found.problems)} problems"
            )


def _kind(spec: str) -> str:
    return "private" if spec is PRIVATE else "open"
