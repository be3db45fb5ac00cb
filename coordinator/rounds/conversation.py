"""A round's conversation: the algorithm's generator yields phases, the fleet answers, until there is a step."""

from functools import partial

from sqlalchemy import func, select

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.phases import Phase, Replies, RoundContext, RoundGenerator, Step
from coordinator.aggregation.qp import UnsolvedError
from coordinator.aggregation.registry import server_rate
from coordinator.aggregation.rules import TooFewUpdatesError
from coordinator.aggregation.streaming import one_thread
from coordinator.rounds import selection
from coordinator.rounds.fleets.base import Fleet, Question, RunFacts, Skipped, Surroundings, settled_pool
from coordinator.rounds.step import read_memory, recall
from federation.objectives import encoder_columns
from federation.sketches.base import SketchError
from federation.vectors import model_layout
from federation.work.train.work import Train
from storage import models
from storage.models import Client, ClientState, Round


class Conversation:
    """Runs an algorithm against the clients of a run, or against the replies that they gave before a crash.

    Args:
        run: the run.
        around: the coordinator.
        fleet: the clients.
        algorithm: of the run.
    """

    def __init__(self, run: RunFacts, around: Surroundings, fleet: Fleet, algorithm: Algorithm) -> None:
        self._run = run
        self._spec = run.spec
        self._around = around
        self._database = around.database
        self._fleet = fleet
        self._algorithm = algorithm

    def hold(self, current: Round) -> tuple[Step, int]:
        """Phase after phase, until the algorithm ends the round.

        Returns:
            The step, and the number of the phase that follows.

        Raises:
            Held: the run is not RUNNING.
            Skipped: there is no step: too few replies, or a rule that cannot use them.
            Voided: the algorithm gave up this attempt.
        """
        conversation = self._algorithm.round(self._context(current))
        number = self._first_phase(current)
        phase = _continued(conversation, None)
        while True:
            replies = self._asked(current, number, phase)
            number += 1
            try:
                phase = _continued(conversation, replies)
            except StopIteration as end:
                return end.value, number

    def _asked(self, current: Round, number: int, phase: Phase) -> Replies:
        """The replies to one phase.

        Raises:
            Skipped: there are too few.
        """
        clients = list(current.selected if phase.clients is None else phase.clients)
        closing = phase.closes(len(clients))
        wanted = min(current.wanted, len(clients)) if closing is None else closing.wanted
        question = Question(
            round_id=current.round_id,
            round=current.number,
            attempt=current.attempt,
            number=number,
            phase=phase,
            clients=clients,
            wanted=wanted,
            base_model=current.base_model,
        )
        replies = self._fleet.ask(question)
        quorum = phase.kind.terms(self._spec).quorum
        if closing is not None:
            needed = closing.needed
        else:
            needed = 0 if quorum is None else selection.quorum(quorum, self._recorded(question))
        if len(replies) < needed:
            where = "" if phase.kind is Train else f" ({phase.kind.name})"
            raise Skipped(f"quorum: {len(replies)} of {len(clients)} clients replied{where}, {needed} are needed")
        return replies

    def _context(self, current: Round) -> RoundContext:
        with self._database.read() as session:
            memory = read_memory(session, self._run, self._around.evidence, current.number, current.base_model)
            known = self._fleet.known(session)
        layout = model_layout(self._around.blobs.local(current.base_model))
        server = self._spec.server
        return RoundContext(
            number=current.number,
            attempt=current.attempt,
            total=self._spec.rounds,
            prior=self._spec.algorithm.prior,
            state=memory.rule,
            device=self._around.device,
            recall=partial(recall, self._around.blobs),
            objectives=self._run.objectives,
            parameters=layout.size,
            encoder=encoder_columns(layout),
            seed=self._spec.seed,
            local_rate=self._spec.train.learning_rate,
            server_rate=server_rate(
                server.learning_rate, server.decay, current.number, self._spec.rounds, server.decay_every
            ),
            selected={name: known[name] for name in current.selected if name in known},
            draw=partial(self._draw, current),
            revoked=self._revoked,
        )

    def _draw(self, current: Round, purpose: str) -> tuple[str, ...]:
        """Another choice of clients for the same round."""
        pool = settled_pool(self._run, self._around, self._fleet)
        drawn = selection.select(
            self._spec.selection, pool, seed=self._spec.seed, round_number=current.number, purpose=purpose
        )
        return tuple(drawn)

    def _revoked(self) -> frozenset[str]:
        with self._database.read() as session:
            return frozenset(session.scalars(select(Client.client_id).where(Client.state == ClientState.REVOKED)))

    def _first_phase(self, current: Round) -> int:
        """The number of the first phase of the present attempt."""
        before = (models.Phase.round_id == current.round_id, models.Phase.attempt < current.attempt)
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(models.Phase).where(*before)) or 0

    def _recorded(self, question: Question) -> int:
        """How many replies a phase wanted when it was opened: since then, a restart may have changed the pool."""
        here = (models.Phase.round_id == question.round_id, models.Phase.number == question.number)
        with self._database.read() as session:
            return session.scalar(select(models.Phase.wanted).where(*here)) or question.wanted


def _continued(conversation: RoundGenerator, replies: Replies | None) -> Phase:
    """The next phase of a conversation, after the replies to the one before; None before the first.

    Raises:
        Skipped: the rule cannot use these replies, or these clients; the next round's may do better.
        StopIteration: the conversation has ended; its value is the step.
    """
    try:
        with one_thread():
            return conversation.send(replies)  # type: ignore[arg-type] # a generator that has not begun takes None
    except (TooFewUpdatesError, UnsolvedError, SketchError) as error:
        raise Skipped(f"aggregation: {error}") from error
