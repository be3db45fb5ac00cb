"""One schedule: a run from its submission to its end, under the faults that follow from one seed."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogKey
from coordinator.clock import ClockBehind
from coordinator.rounds.runs.run_states import HELD_REASONS
from coordinator.rounds.runs.submission import new_run
from coordinator.rounds.transitions import RUN_ENDED
from coordinator.signing_keys import Signing
from federation.digests import digest
from federation.record import log_entries
from federation.refusals import Refusal
from federation.spec.run_spec import RUN_KINDS, RunSpec
from federation.statistics.rules import MemberRules
from federation.trust.envelope import key_id
from federation.trust.identity import client_uri
from federation.trust.key_chain import KeyChain
from federation.work.peers import open_reply
from federation.work.site import SCALARS, SecurePolicy, Site
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Client, Run, note_model
from storage.states import ClientState, RunState
from tests.simulated.faults import AWAY, AWAY_AFTER_KILL, LEAVES, Faults
from tests.simulated.members import Member
from tests.simulated.plans import CERTIFICATE, DEADLINE_SECONDS, FEDERATION, TASK, Plan
from tests.simulated.process import SLEPT, Killed, Machine, Process
from tests.simulated.world import BEGINNING, World
from worker.home import WorkerHome

RUN = "simulated-run"[:12]
OPERATOR_SECONDS = 5.0  # between two chances of an operator, or of a clock
IN_GROUPS = (3, 4)  # of each eight schedules, those whose replies are handed in in groups
REVOKED_CHANCE = 0.1  # of a member, in the second ones of these, whenever an operator may act
SEVERAL_EVERY = 5  # one schedule of so many has two coordinators
SLEEP_CHANCE = 0.05
AWAY_SECONDS = (40.0, 250.0)  # longer than a new coordinator waits for members, and less than the grace of a phase
SLEEP_SECONDS = (8.0, 120.0)  # longer than a lease
AFTER_KILL_CHANCE = 0.2
AFTER_KILL_SECONDS = (60.0, 300.0)  # longer than rounds wait for members after a restart
RIGHT_SECONDS = 300.0  # until a clock that was set is right again
VOUCHED_SECONDS = 60.0  # until an operator sees to a machine that stood still
PATIENCE_SECONDS = 600.0  # until the operator stops a run that waits for members who are gone or revoked


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(blake3(name.encode()).digest())


@dataclass(frozen=True)
class Stage:
    """What all schedules of a plan share.

    Attributes:
        plan: of the run.
        template: a directory with the database and the blobs at the run's submission.
        log_key, signing: the coordinator's.
        keys: of the members, by name.
    """

    plan: Plan
    template: Path
    log_key: LogKey
    signing: Signing
    keys: Mapping[str, Ed25519PrivateKey]

    @classmethod
    def of(cls, plan: Plan, directory: Path) -> "Stage":
        """Makes the federation of a plan below a directory."""
        template = directory / f"plan-{plan.name}"
        template.mkdir()
        log_key, signing_key = LogKey(federation_id=FEDERATION, key=_key("log")), _key("coordinator")
        chain = KeyChain(signing_key.public_key())
        signing = Signing(FEDERATION, signing_key, chain, log_key.key.private_bytes_raw())
        stage = cls(plan, template, log_key, signing, {name: _key(name) for name in plan.samples})
        database = Database.open(f"sqlite:///{template / 'coordinator.db'}", durable=False)
        database.entry_key = log_key.entry_key
        database.migrate()
        stage._submit(database)
        database.close()
        return stage

    def _submit(self, database: Database) -> None:
        plan, now, blobs = self.plan, BEGINNING, DirectoryStore(self.template / "blobs", durable=False)
        stored, *further = map(blobs.put, plan.models)
        spec = RunSpec.parse(plan.document)
        run = new_run(plan.document, spec, plan.objectives, (), run_id=RUN, model=stored, by="operator", created=now)
        with database.begin() as session:
            for name, key in self.keys.items():
                public = key.public_key()
                client = Client(
                    client_id=name,
                    state=ClientState.ACTIVE,
                    signing_key=public.public_bytes_raw(),
                    key_id=key_id(public).hex(),
                    enrolled=now,
                    run_kinds=list(RUN_KINDS),
                )
                session.add(client)
                audit.record(
                    session,
                    at=now,
                    actor=client_uri(FEDERATION, name),
                    action=audit.ENROLLED,
                    subject=name,
                    detail=f"certificate {CERTIFICATE}",
                    digest=digest(public.public_bytes_raw()),
                )
            for name in (stored, *further):
                note_model(session, name, size=len(plan.model), parameters=plan.layout.size, created=now)
            session.add(run)
            subject, shown = RUN, digest(plan.document)
            audit.record(session, at=now, actor="operator", action=log_entries.SUBMITTED, subject=subject, digest=shown)

    def site(self, name: str) -> Site:
        """The site of a member, whose owner allows everything."""
        many = 10**6
        policy = SecurePolicy(
            disclose=SCALARS,
            sessions=many,
            evaluations=many,
            sessions_per_model=many,
            sums_per_model=many,
            assumed=1,
        )
        return Site(
            roster={other: key.public_key().public_bytes_raw() for other, key in self.keys.items()},
            policies={TASK: policy},
            statistics={TASK: MemberRules()},
            evaluations_ahead=many,
            open_reply=open_reply,
            new_secret=lambda session: blake3(f"{name}/{session}".encode()).digest(),
        )


class Schedule:
    """A schedule: `play` it, then look at it.

    Args:
        stage: of its plan.
        directory: empty; the coordinator's.
        seed: of everything that is left to chance.
        calm: True for a schedule without faults.
    """

    def __init__(self, stage: Stage, directory: Path, seed: int, *, calm: bool = False) -> None:
        self.stage = stage
        self.world = World(f"{stage.plan.name}/{seed}")
        self.faults = Faults(self.world) if calm else Faults.drawn(self.world, stage.plan.faults)
        shutil.copytree(stage.template, directory, dirs_exist_ok=True)
        several = not calm and seed % SEVERAL_EVERY == SEVERAL_EVERY - 1
        groups = not calm and seed % 8 in IN_GROUPS
        self.machine = Machine(
            directory, self.world, self.faults, stage.log_key, stage.signing, several=several, groups=groups
        )
        if groups and seed % 8 == IN_GROUPS[1]:
            self.faults.chances["member revoked"] = REVOKED_CHANCE
        if several:
            self.faults.chances[SLEPT] = SLEEP_CHANCE
        if not calm and stage.plan.evaluates_privately:
            self.faults.chances[AWAY_AFTER_KILL] = AFTER_KILL_CHANCE
        self.process: Process | None = None
        self._ids = Random(f"ids/{seed}")
        self._forward = 0  # steps forward of the machine's clock that are not set right yet
        self._held = False  # an operator has paused the run, and will resume it
        self.members = [
            Member(
                name,
                key,
                stage.signing.chain,
                stage.plan,
                stage.site(name),
                self.world,
                self.faults,
                lambda: self.process,
                WorkerHome(directory / "homes" / name),
            )
            for name, key in stage.keys.items()
        ]

    def play(self) -> None:
        """Plays until the run has ended and nobody waits for an answer; then the coordinator serves once more."""
        self.world.after(0.0, self._start)
        for member in self.members:
            self.world.after(self.faults.seconds(0.1, 3), member.attend)
            member.beat()
        self.world.after(OPERATOR_SECONDS, self._operate)
        while not self._over():
            with self._may_be_killed():
                if self.process is None:
                    self.world.next()
                elif self.process.conductors.wanted:
                    self.process.conduct()
                else:
                    self.process.idle()
        self.faults.chances.clear()
        self.machine.full_until = 0.0  # the end of the log is chained once there is space
        assert self.process is not None
        self.process.sequencer.sequence(show=True)

    def close(self) -> None:
        """Closes the coordinator."""
        if self.process is not None:
            self.process.close()

    # --- the coordinator's process

    @contextmanager
    def _may_be_killed(self) -> Iterator[None]:
        try:
            yield
        except Killed:
            self._killed()

    def _killed(self) -> None:
        if self.process is None:
            return
        self.world.counts["kills"] += 1
        self.process.close()
        self.process = None
        for member in self.members:
            member.hang_up()
            if not member.gone and self.faults.strikes(AWAY_AFTER_KILL, member.name):  # the next pool is another one
                member.stay_away(self.faults.seconds(*AFTER_KILL_SECONDS))
        self.world.after(self.faults.seconds(0.5, 20), self._start)

    def _start(self) -> None:
        """Starts the coordinator; if it fails or is killed, it is started again later.

        Nothing tells a coordinator that starts that its machine's clock is ahead: an operator sets it right before.
        """
        if self._forward:
            self.world.after(5.0, self._start)
            return
        process = Process(self.machine, RUN, self._new_id, self._sleep if self.machine.several else None)
        self.process = process
        self.world.note("started")
        process.acting = True
        try:
            process.start()
        except ClockBehind as error:
            raise Killed("its clock is behind the record") from error
        except SQLAlchemyError as error:
            process.refusal(error)
            raise Killed("the start failed") from error
        finally:
            process.acting = False

    def _sleep(self, sleeper: Process) -> None:
        """The conductor of a coordinator sleeps past its lease: another coordinator serves until the first wakes."""
        other: Process | None = None
        for member in self.members:
            member.hang_up()
        try:
            self.process = other = Process(self.machine, RUN, self._new_id)
            self.world.after(self.faults.seconds(*SLEEP_SECONDS), lambda: setattr(other, "alive", False))
            other.acting = True
            other.start()
            other.acting = False
            while True:
                if other.conductors.wanted:
                    other.conduct()
                else:
                    other.idle()
        except ClockBehind:  # nobody serves until the first one wakes
            self.world.note("start refused")
        except SQLAlchemyError as error:  # at its start
            sleeper.refusal(error)
        except Killed:
            self.world.counts["kills"] += 1
        finally:
            if other is not None:
                sleeper.learn_of(other)
                other.close()
            self.process = sleeper
            for member in self.members:
                member.hang_up()

    def _new_id(self) -> str:
        return f"{self._ids.getrandbits(128):032x}"

    # --- operators and clocks

    def _operate(self) -> None:
        """Gives everything that is not a call a chance to go wrong."""
        self.world.after(OPERATOR_SECONDS, self._operate)
        strikes, world = self.faults.strikes, self.world
        if strikes("clock set back"):  # by up to two hours
            self._set_clock(-12 * self.faults.seconds(1, 600))
        if not self.machine.several and strikes("clock set forward"):  # by up to a day
            self._set_clock(2880 * self.faults.seconds(1, 30))
        if strikes("deadline passed"):  # the machine stood still, and an operator vouches for its clock
            world.ahead += DEADLINE_SECONDS
            world.after(VOUCHED_SECONDS, self._vouch)
        for member in self.members:
            if not member.gone and strikes("stream broken", member.name):
                member.hang_up()
            if not member.gone and strikes(AWAY, member.name):
                member.stay_away(self.faults.seconds(*AWAY_SECONDS))
            if not member.gone and strikes("member gone", member.name):
                member.leave()
            self._may_leave(member)
        if self.process is None:
            return
        if not self._held and strikes("run paused"):
            self._held = True
            world.after(self.faults.seconds(5, 60), self._resume)
            self._order(lambda process: process.commands.pause(RUN, by="operator"))
        if strikes("run stopped"):
            self._order(lambda process: process.commands.stop(RUN, by="operator"))
        missing = any(member.gone or member.name in self.process._revoked for member in self.members)
        if missing and world.seconds > PATIENCE_SECONDS:
            run = self.run()
            if run.reason.startswith("waiting for members") and run.state not in RUN_ENDED:
                self._order(lambda process: process.commands.stop(RUN, by="operator", reason=run.reason))
        if strikes("member revoked"):
            name = world.random.choice([member.name for member in self.members])
            self._order(lambda process: process.revoke(name))

    def _may_leave(self, member: Member) -> None:
        """A member may want to leave the federation, if two others stay."""
        stay = [other for other in self.members if not other.gone and other.withdrawal is None]
        if member in stay and len(stay) > 2 and self.faults.strikes(LEAVES, member.name):
            member.withdraw(now=self.world.random.random() < 0.5)

    def _set_clock(self, seconds: float) -> None:
        """Somebody sets the machine's clock, and sets it right after a while."""

        def right() -> None:
            self.world.ahead -= seconds
            self._forward -= seconds > 0

        self.world.ahead += seconds
        self._forward += seconds > 0
        self.world.after(RIGHT_SECONDS, right)

    def _vouch(self) -> None:
        """An operator resumes the run, which its coordinator has paused because of its clock, until it obeys.

        It waits while the clock is also set forward. If an operator vouches for a clock that is ahead, the record is
        ahead, too: the next start waits until that time, or for `coordinator restored`.
        """
        if self._forward:
            self.world.after(5.0, self._vouch)
        elif self.process is not None and StorageFault.CLOCK in self.process.fault_state.present:
            self.world.after(5.0, self._vouch)
            self._order(lambda process: process.commands.resume(RUN, by="operator"))

    def _order(self, order: Callable[[Process], None]) -> bool:
        """Gives an order to the coordinator. True if it was obeyed or refused."""
        if self.process is None:
            return False
        try:
            order(self.process)
        except Refusal as refusal:
            self.world.note("order refused", refusal.reason)
        except (SQLAlchemyError, OSError) as error:
            self.world.note("order failed", self.process.refusal(error).reason)
            return False
        return True

    def _resume(self) -> None:
        """Resumes the run that an operator has paused, again until the coordinator obeys."""
        if self._held:
            self.world.after(5.0, self._resume)
            self._held = not self._order(lambda process: process.commands.resume(RUN, by="operator"))

    # --- the end

    def _over(self) -> bool:
        """True when the run has ended, or nobody will resume it, and nobody waits for an answer."""
        process = self.process
        if process is None or process.conductors.wanted or process.uploading:
            return False
        if any(member.busy for member in self.members):
            return False
        run = self.run()
        if run.state is RunState.PAUSED:
            return not self._held and not run.reason.startswith(HELD_REASONS)
        return run.state in RUN_ENDED

    def run(self) -> Run:
        """The row of the run."""
        with self.reading() as session:
            return session.get_one(Run, RUN)

    def reading(self) -> AbstractContextManager[Session]:
        """A snapshot of the record, in which nothing happens."""
        assert self.process is not None
        return Database.read(self.process.database)
