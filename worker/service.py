"""The worker as a whole: threads that attend, that work in each lane, and that submit the replies in the spool."""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from federation.attacks import Attack, AttackError, attack_seed, poisoned
from federation.monitoring.events import Events
from federation.process.service_manager import ServiceManager
from federation.record.signed_scales import SignedScales
from federation.spec.run_spec import RunSpec
from federation.tasks import Dataset, DataSource, LossError, Splits, task, task_code
from federation.training.run_trial import FirstTraining
from federation.training.trainer import Trainer
from federation.training.trainers import TrainerChoice, close_trainer, trainer_code
from federation.trust.member_files import MemberFiles, note_addresses
from federation.v1.common_pb2 import ResultManifest, SignedEnvelope
from federation.work.base import Lane
from federation.work.closing import SiteClosing
from federation.work.peers import open_reply
from federation.work.site import Site
from worker.connection.approval import Approval
from worker.connection.attendance import Attendance, Handlers
from worker.connection.backoff import Backoff
from worker.connection.clock import CoordinatorClock
from worker.connection.renewal import Renewer
from worker.connection.revocation import LEFT
from worker.connection.starts import Starts
from worker.connection.witness import Witness
from worker.home import DiskUse, WorkerHome
from worker.ledgers.left_ledger import LeftLedger
from worker.ledgers.privacy_ledger import Ledger
from worker.ledgers.round_ledger import RoundLedger
from worker.progress import Progress
from worker.site.clear_answers import ClearAnswers
from worker.site.consents import Consents
from worker.site.declines import Declines
from worker.site.hello import Introduction
from worker.site.leaving import WatchedLeave
from worker.site.pause import WatchedPause, closing_now
from worker.site.policy_file import Policy
from worker.site.privacy import SitePrivacy
from worker.site.refused_orders import RefusedOrders
from worker.site.roster import Roster, pinned_roster
from worker.site.run_requests import Verdict
from worker.site.withdrawing import Leaver
from worker.status import StatusFile, WorkerStatus
from worker.threads import LOOK_SECONDS, WorkerThreads
from worker.work.attacker import Attacker
from worker.work.begun import BegunWork
from worker.work.cache import ModelCache
from worker.work.computing import Computing
from worker.work.execution import Execution
from worker.work.fetching import Fetcher
from worker.work.local_state import LocalState
from worker.work.memory import WorkerMemory
from worker.work.runner import Runner
from worker.work.spool import Spool
from worker.work.submitter import Submitter


def prepare_offers(
    names: Sequence[str],
    source: DataSource,
    *,
    device: str,
    threads: int | None,
    attack: Attack | None = None,
    client_id: str = "",
    objectives: Mapping[str, Sequence[str]] | None = None,
    trainers: Mapping[str, TrainerChoice] | None = None,
    run: RunSpec | None = None,
    describes: Collection[str] = (),
) -> tuple[dict[str, Trainer], str]:
    """Loads the owner's tasks and this client's data, and tries each task on a batch.

    The caller closes the trainers; where this fails, those that were made are closed. `names` is the allow-list; an
    attack poisons the training data of `client_id`; `objectives` are those that the owner
    serves, by task, and all for other tasks; `trainers` replace the tasks' own. Of `run`, the smallest minibatch is
    tried, too. A task of `describes` whose losses are not finite is offered for statistics alone.
    `device` and `threads` are as for `Trainer`.

    Returns:
        The trainer of each task, by its name, and a description of the devices.

    Raises:
        TaskError: no such task or objective, or an exception of the task's code on a batch of the data.
        PluginError: no such trainer, or an exception of its code.
        DataError: missing or malformed data, or data whose losses are not finite.
        SharingError: `[parameters]` of the run does not suit the model.
        ValueError: no such device, an attack that does not fit the data, or a run that this worker would decline.
    """
    served, offers = objectives or {}, {}
    with ExitStack() as made:
        for name in names:
            loaded = task(name)
            choice = (trainers or {}).get(name, TrainerChoice())
            kind = choice.kind(loaded)
            with trainer_code(kind, "loading its data"), task_code(name, "loading its data"):
                data = kind.load(loaded, source)
            trainer = choice.make(loaded, data, device, threads, served.get(name))
            made.callback(close_trainer, trainer)
            with trainer_code(kind, "trying it on the data"):
                try:
                    trainer.try_out()
                except LossError as error:
                    if name not in describes or (run is not None and run.task == name):
                        raise
                    trainer.unfit = str(error)
                if run is not None and run.task == name:
                    FirstTraining.of(trainer, run).try_smallest(trainer)
            in_memory = isinstance(data, Splits) and isinstance(data.train, Dataset)
            if attack is not None and not in_memory and type(attack).poison is not Attack.poison:
                location = "not in memory" if isinstance(data, Splits) else "in the trainer's own process"
                raise AttackError(f"{attack} changes training data, and that of {name} is {location}")
            if attack is not None and in_memory:
                changed = poisoned(attack, data, loaded, seed=attack_seed(0, 0, client_id))
                trainer = trainer if changed is data else trainer.on(changed, served.get(name))
            offers[name] = trainer
        made.pop_all()
    return offers, ", ".join(dict.fromkeys(filter(None, (trainer.device_in_words for trainer in offers.values()))))


def _site(
    roster: Roster | None, policy: Policy, offers: Mapping[str, Trainer], ledger: RoundLedger, events: Events
) -> Site:
    """The owner's rules for private rounds. Warns of rules that have no effect or decline everything."""
    for name in sorted(set(policy.secure.tasks) - set(offers)):
        events.warn("policy", f"policy.toml has a section secure.tasks for {name!r}, which this worker does not offer")
    policies = {name: policy.secure.of(name) for name in offers}
    if roster is None:
        for name in (name for name, rules in policies.items() if rules.required):
            events.warn(
                "policy",
                f"policy.toml requires private rounds for {name!r}, and no roster is pinned, so every training is "
                "declined: `fedpareto worker roster pin FILE`",
            )
    return Site(
        roster={} if roster is None else roster.keys,
        policies=policies,
        data_sets=policy.data_sets,
        ledger=ledger,
        open_reply=open_reply,
        algorithms=frozenset(policy.algorithms),
        statistics=policy.statistics_of(offers),
        summed=policy.summed_of(offers),
    )


class Worker:
    """One worker process, from its first hello to its end.

    The caller has locked the home. `offers` and `device` are what `prepare_offers` returned: the trainers are closed at
    the end of `run`, or at once if there can be no worker. `uniform` draws the jitter of every back-off; an honest
    member has no attacker. `passphrase` encrypts the member's next keys. `clock` is that of the owner's own machine,
    aware. `manager` hears when the worker begins to attend, and that it lives, also while it trains or the coordinator
    is away.

    Raises:
        WorkerHomeError, RosterError, SpoolError: a file of the home is damaged; the message says which.
    """

    def __init__(
        self,
        *,
        home: WorkerHome,
        member: MemberFiles,
        offers: Mapping[str, Trainer],
        device: str,
        events: Events,
        uniform: Callable[[float, float], float],
        attacker: Attacker | None = None,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        passphrase: bytes | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        manager: ServiceManager | None = None,
    ) -> None:
        self._threads = WorkerThreads()
        self._manager = manager or ServiceManager()
        self._events = events
        self._accomplices = None if attacker is None else attacker.accomplices
        self._clock = clock
        with ExitStack() as scope:  # closes what is open in reverse order; one that cannot be closed keeps none open
            for trainer in offers.values():
                scope.callback(close_trainer, trainer)
            rounds = scope.enter_context(closing(RoundLedger(home.rounds, self._counted)))
            for name, trainer in offers.items():
                if trainer.unfit:
                    events.warn("policy", f"{name} is offered for statistics alone: {trainer.unfit}", task=name)
            site = _site(pinned_roster(home.roster, member), policy, offers, rounds, events)
            if attacker is not None:
                site = replace(site, stretch=attacker.attack.stretch)
                events.warn("attack", attacker.warning, attack=str(attacker.attack))
            privacy = SitePrivacy(policy.privacy, scope.enter_context(closing(Ledger(home.privacy))))
            self._hours, self._pause = policy.open, WatchedPause(home.pause, events)
            self._leave = WatchedLeave(home.leave, events)
            self._status = StatusFile(home.status)
            self._introduction = Introduction(offers, device, site, policy, privacy.told)
            progress = Progress(
                home.progress, home.accepted_restore, member=member, ask=policy.restore == "ask", events=events
            )
            self._starts = Starts(home, secrets.token_bytes)
            self._attendance = Attendance(
                member=member,
                rotations=home.coordinator_rotations,
                note=lambda addresses: note_addresses(home.directory, MemberFiles.name_key, addresses=addresses),
                hello=self._introduction.hello,
                starts=self._starts,
                clock=CoordinatorClock(member, progress),
                progress=progress,
                witness=Witness(home.log, home.forked_log, member=member, events=events),
                backoff=Backoff(uniform),
                patience=Backoff(uniform, first=1.0, longest=600.0),
                events=events,
                approval=Approval(home.pending, member.client_id, events),
                closing=self._closing,
                leaving=self._leave.closes,
            )
            self._renewer = Renewer(
                home, self._attendance, passphrase, Backoff(uniform, first=1.0, longest=3600.0), events
            )
            memory = scope.enter_context(closing(WorkerMemory(home.memory, member.signing_key)))
            begun = BegunWork(home.begun, events)
            scope.callback(begun.stop)
            left = scope.enter_context(closing(LeftLedger(home.left)))
            spool = Spool(home, member.signing_key, events)
            local_state = LocalState(home.kept, spool, events)
            privacy.check_suits(offers)
            execution = Execution(
                attendance=self._attendance,
                offers=offers,
                computing=Computing(self._attendance, attacker),
                fetcher=Fetcher(
                    attendance=self._attendance,
                    caches={lane: ModelCache(home.cache / lane) for lane in Lane},
                    backoff=Backoff(uniform),
                    events=events,
                    hosts=policy.download_addresses,
                ),
                spool=spool,
                memory=memory,
                site=site,
                privacy=privacy,
                local_state=local_state,
                begun=begun,
                scales=SignedScales(member.federation_id, self._result),
                events=events,
            )
            execution.count_deaths()
            self._submitter = Submitter(
                self._attendance,
                spool,
                local_state,
                left,
                Backoff(uniform),
                events,
                partial(execution.forget, acknowledged=True),
            )
            self._consents = scope.enter_context(
                closing(Consents(home.runs, policy, offers, self._attendance, events, self._withdrawn))
            )
            self._runner = Runner(
                execution=execution,
                spool=spool,
                left=left,
                attendance=self._attendance,
                progress=progress,
                limits=policy.limits,
                events=events,
                finished=self._submitter.wake,
                consent=self._consents.accepted,
                taken=ClearAnswers(site, offers, decides=policy.decides, events=events).note,
                closing=self._closing,
                disk_use=DiskUse(home.directory),
                decline=Declines(
                    self._attendance, RefusedOrders(home.evidence, events), left, events, policy.error_texts
                ).decline,
            )
            self._leaver = Leaver(
                home,
                self._attendance,
                self._leave,
                idle=self._runner.idle,
                drop=partial(self._runner.drop_all, LEFT),
                left=self.stop,
                backoff=Backoff(uniform),
                patience=Backoff(uniform, first=1.0, longest=600.0),
                events=events,
            )
            self._handlers = Handlers(
                assigned=self._runner.assigned,
                cancelled=self._runner.cancelled,
                asked=self._consents.asked,
                restored=self._runner.restored,
                working=self._runner.working,
            )
            self._scope = scope.pop_all()

    def run(self) -> None:
        """Works until `stop`, once. The calling thread only waits, so that it can handle signals.

        Raises:
            AttendanceError: the coordinator refuses this worker.
            DirectoryGone: the worker's directory was unmounted, moved or removed.
            WorkerHomeError: the directory of the accomplices of an attack cannot be written.
            PluginError: a trainer of the owner's own cannot be closed.
            WorkerEndedError: a thread has ended without an exception, or by one that ends a process.
            Exception: the exception that ended one of the threads; the other threads have then ended, too.
        """
        try:
            with self._scope as scope, self._threads as threads:
                if self._accomplices is not None:
                    self._accomplices.meet()
                    scope.callback(self._accomplices.leave)
                threads.start("attendance", partial(self._attendance.run, self._handlers), self._attendance.stop)
                threads.start("submission", self._submitter.run, self._submitter.stop)
                threads.start("renewal", self._renewer.run, self._renewer.stop)
                threads.start("leaving", self._leaver.run, self._leaver.stop)
                scope.callback(self._status.close)
                threads.start("policy", partial(self._each_second, self._look))
                threads.start("presence", partial(self._each_second, self._look_open))
                for lane in Lane:
                    threads.start(lane, partial(self._runner.run, lane), self._runner.stop)
                self._manager.ready()
                threads.wait()
                self._manager.stopping()
        finally:
            if self._threads.failure is not None:  # rather than that of a trainer that cannot be closed
                raise self._threads.failure

    def stop(self) -> None:
        """Makes `run` return; safe in a signal handler."""
        self._threads.stop()

    def _each_second(self, look: Callable[[], None]) -> None:
        """Checks that the directory is there, and looks, once a second until the worker ends."""
        while not self._threads.ending.wait(LOOK_SECONDS):
            self._events.home.check_there()
            look()

    def _look(self) -> None:
        """Looks at the owner's decisions about runs, which may take seconds, and at abilities; feeds the watchdog."""
        self._consents.look()
        if self._introduction.outdated:
            self._attendance.introduce_again()
        self._runner.working(), self._attendance.files_now()  # they take locks: a deadlock starves the watchdog
        self._manager.feed()

    def _look_open(self) -> None:
        """Looks whether the site is open, closed, paused or set aside, and shows what the worker does."""
        if self._starts.decided():
            self._attendance.try_again()
        self._pause.look()
        self._leave.look()
        self._runner.look()
        self._status.show(
            WorkerStatus(self._attendance.connection, self._runner.work_now(), self._introduction.offered)
        )

    def _counted(self, task: str) -> None:
        """Sends the new numbers of private rounds left for the tasks that share a data set with `task`."""
        for left in self._introduction.left_beside(task):
            self._attendance.tell_left(left)

    def _result(self, envelope: SignedEnvelope) -> ResultManifest:
        """A result that the coordinator has signed. Raises a Refusal."""
        return self._attendance.member.coordinator.verify(envelope, ResultManifest)

    def _withdrawn(self, run_id: str, verdict: Verdict) -> None:
        self._runner.withdrawn(run_id, verdict)

    def _closing(self) -> SiteClosing | None:
        if self._leave.closes():
            return SiteClosing(None, paused=True)
        return closing_now(self._pause.pause, self._hours, self._clock())
