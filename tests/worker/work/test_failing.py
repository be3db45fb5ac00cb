"""A worker whose computation fails in a private session gives the reply that it gives otherwise, and tells its owner.

The coordinator is scripted; the trainers are real, and the models are made such that they fail for some data alone.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from federation.digests import digest
from federation.owners_code import TwoTexts
from federation.secure import hashing
from federation.secure.evaluation import clip
from federation.secure.thresholds import EVALUATION_NOISE
from federation.spec.objective_names import joint_target
from federation.spec.run_spec import RunSpec
from federation.tasks import DataError, Dataset, DataSource, Splits, task
from federation.tasks.digits import Digits
from federation.training.external import ExternalTrainer
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest
from federation.v1.secure_pb2 import SecureReadyWork, SecureStatement
from federation.vectors import Layout, to_bytes
from federation.work.base import WorkError
from federation.work.evaluate.work import Evaluate
from federation.work.registry import kind as registered
from federation.work.secure.member_checks import require
from federation.work.site import FAILURES, FailedSession, SessionEntry
from federation.work.train.work import Train
from fedpareto.cli.main import app
from tests.federation.training.scene import child
from tests.harness import wait_for
from tests.scripted import ScriptedCoordinator
from tests.worker.scene import Running, Scene, serving
from tests.worker.work.scene import DOCUMENT, STAGES, keys_of_five, pin, session_terms, to_be_ready
from worker.home import WorkerHome
from worker.ledgers.round_ledger import RoundLedger
from worker.site.assignment_checks import Declined
from worker.work.begun import DIED
from worker.work.own_errors import SILENT, declining

SECRET = "the record of patient 17"
WHOLE = DOCUMENT + b'train.batch_size = 0\nevaluate.splits = ["train"]\n'
"""A run whose step is on the whole training split."""


POOL = Digits().pool(DataSource())
RECORD = int(np.argmax(np.square(POOL.x.numpy()).sum(axis=1)))
"""The digit with the most ink, of whom the coordinator asks whether a member has it."""
OTHERS = [place for place in range(300) if place != RECORD]


def with_first(place: int, made: type[Digits] = Digits) -> Trainer:
    """The trainer of a member with the digit of this place, and 99 others."""
    places = [place, *OTHERS[:99]]
    split = Dataset(POOL.x[places], POOL.y[places])
    return TorchTrainer(made(), Splits(split, split, split), "cpu", 1)


def oracle(layout: Layout) -> bytes:
    """A model whose loss is not finite exactly if the record is among the samples.

    All classes have the same value: a multiple of the inner product with the record, which overflows for it alone.
    """
    record, others = POOL.x[RECORD].numpy(), np.delete(POOL.x.numpy(), RECORD, axis=0)
    largest, next_one = float(record @ record), float((others @ record).max())
    assert next_one < 0.99 * largest
    values = {name: np.zeros(shape, np.float32) for name, shape in layout.shapes.items()}
    values["hidden.weight"][0] = 1e19 * record
    values["out.weight"][:, 0] = float(np.finfo(np.float32).max) / (1e19 * (largest + next_one) / 2)
    return to_bytes(layout, layout.join(values))


class Strict(Digits):
    """A member's own task, whose code raises an exception where a loss is not finite."""

    error: Exception = ValueError(SECRET)

    def losses(self, output: Any, y: Tensor) -> dict[str, Tensor]:
        found = super().losses(output, y)
        if not torch.isfinite(found["loss"]).all():
            raise self.error
        return found


class Exhausted(Strict):
    error = torch.OutOfMemoryError(f"CUDA out of memory, {SECRET}")


class Interrupted(Strict):
    error = OSError(5, SECRET)


class Asking(Scene):
    """A coordinator that asks one member, at homes with other data."""

    number = 0

    def __init__(self, *scene: Any) -> None:
        super().__init__(*scene)
        self.keys = keys_of_five(self.member)

    def home_of(self, *trained: str) -> WorkerHome:
        """A home that has pinned the roster, and has been in a private round of each of these runs."""
        self.number += 1
        home = WorkerHome(self.home.directory / f"{self.number}")
        self.home.directory.mkdir(exist_ok=True)
        pin(home, self.member, self.keys)
        with closing(RoundLedger(home.rounds)) as ledger:
            for run in trained:
                ledger.add(SessionEntry(run, run, "digits", digest(run.encode()), "train"))
        return home

    def question(self, document: bytes = WHOLE, *, model: bytes | None = None, **terms: Any) -> AssignmentManifest:
        """READY of a new session, from the model that asks for the record."""
        self.number += 1
        layout, _ = self.model
        self.coordinator.blobs[digest(document)] = document
        asked = self.coordinator.assignment(
            layout, oracle(layout) if model is None else model, self.number, run_id="run", spec=digest(document)
        )
        asked.round = 0
        made = session_terms(asked, self.keys, document, nonce=secrets.token_bytes(16), **terms)
        return to_be_ready(asked, made, document)

    def working(self, home: WorkerHome, trainer: Trainer) -> Running:
        running = self.start(home=home, offers={"digits": trainer})
        running.wait_for("attending")
        return running

    def answer(self, running: Running, asked: AssignmentManifest) -> str | ReplyManifest:
        """The reply to a question, or the reason of the decline with its message."""
        declines, replies = len(self.coordinator.declines), len(self.coordinator.submissions)
        self.coordinator.assign(asked)

        def found() -> Any:
            if len(self.coordinator.declines) > declines:
                last = self.coordinator.declines[-1]
                return f"{last.reason}: {last.message}"
            return self.coordinator.submissions[-1].manifest if len(self.coordinator.submissions) > replies else None

        said: str | ReplyManifest = wait_for(found, "an answer", 60)
        if not isinstance(said, str):
            running.wait_spooled()
        self.coordinator.open.clear()
        return said

    def reply_of(self, asked: AssignmentManifest, trainer: Trainer, *trained: str) -> tuple[ReplyManifest, Running]:
        """The reply of a new worker with this trainer."""
        running = self.working(self.home_of(*trained), trainer)
        said = self.answer(running, asked)
        running.stop()
        assert isinstance(said, ReplyManifest), said
        return said, running


@pytest.fixture
def asking(
    coordinator: ScriptedCoordinator, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> Iterator[Asking]:
    with serving(Asking(coordinator, tmp_path / "homes", offers, model)) as made:
        yield made


def but_for_keys(reply: ReplyManifest) -> bytes:
    """A reply without its keys and its time."""
    said = SecureStatement.FromString(reply.statement)
    assert len(said.keys) == 64
    said.keys = b""
    bare = ReplyManifest()
    bare.CopyFrom(reply)
    bare.statement = said.SerializeToString(deterministic=True)
    bare.ClearField("created")
    return bare.SerializeToString(deterministic=True)


def evaluation() -> dict[str, Any]:
    return {"work": Evaluate(splits=("train",)), "length": 2, "clip": clip(2, EVALUATION_NOISE), "blur": 0.0}


def test_whether_a_record_is_among_the_samples_does_not_show_in_the_reply(asking: Asking) -> None:
    asked = asking.question()
    (absent, quiet), (present, told) = (asking.reply_of(asked, with_first(place)) for place in (OTHERS[200], RECORD))
    assert but_for_keys(absent) == but_for_keys(present)
    assert present.seconds == 0
    assert not quiet.events("alert")
    (alert,) = told.events("alert")
    assert (alert["reason"], alert["task"], alert["run_id"], alert["round"]) == ("training-failed", "digits", "run", 0)
    assert "TrainingDiverged" in alert["message"]
    assert "It is failure 1 in a row; after 3 in a row" in alert["message"]
    (done,) = told.events("done")
    assert done["seconds"] > 0, "the owner sees the time"


@pytest.mark.parametrize("made", [Strict, Exhausted, Interrupted])
@pytest.mark.parametrize("evaluates", [False, True])
def test_exceptions_of_a_members_own_task_do_not_show(asking: Asking, made: type[Digits], *, evaluates: bool) -> None:
    asked = asking.question(**evaluation() if evaluates else {})
    trained = ("run",) if evaluates else ()
    (absent, _), (present, told) = (
        asking.reply_of(asked, with_first(place, made), *trained) for place in (OTHERS[200], RECORD)
    )
    assert but_for_keys(absent) == but_for_keys(present)
    assert SECRET.encode() not in present.SerializeToString()
    assert SECRET in told.events("alert")[0]["message"]
    if evaluates:
        assert SecureStatement.FromString(present.statement).measured == b"\1\1"


TRAINS = "if kind == 'train': {}\nelse: answer()"


def test_the_failure_of_an_external_trainer_does_not_show(asking: Asking, tmp_path: Path) -> None:
    asked = asking.question(model=asking.model[1])
    replies = []
    for trains in ("say(struct.pack('<f', 1.0) + model[4:], type='model', id=id)", "os._exit(3)"):
        command = child(tmp_path, TRAINS.format(trains))
        with closing(ExternalTrainer(task("digits"), DataSource(), command=command, silence=60.0)) as trainer:
            replies.append(asking.reply_of(asked, trainer))
    assert but_for_keys(replies[0][0]) == but_for_keys(replies[1][0])
    (alert,) = replies[1][1].events("alert")
    assert "ended with exit status 3" in alert["message"]


def test_after_three_failures_a_worker_declines_until_its_owner_says_so(asking: Asking) -> None:
    home = asking.home_of()
    running = asking.working(home, with_first(RECORD))
    for _ in range(FAILURES):
        assert isinstance(asking.answer(running, asking.question()), ReplyManifest)
    running.stop()
    running = asking.working(home, with_first(RECORD))
    said = asking.answer(running, asking.question(model=asking.model[1]))
    assert said == "failing: 3 computations of private rounds failed here in a row; the owner of this site has to look"
    asking.member.save(home.directory)
    done = CliRunner().invoke(app, ["worker", "failures", "--home", str(home.directory), "--reset", "digits"])
    assert done.exit_code == 0, done.output
    assert "digits: 3 computations of private rounds failed in a row" in done.stdout
    assert isinstance(asking.answer(running, asking.question(model=asking.model[1])), ReplyManifest)
    assert not running.events("alert"), "the data were not read"


def died(home: WorkerHome, asked: AssignmentManifest, tries: int) -> None:
    """The process has died in a question, so often."""
    session = hashing.session(SecureReadyWork.FromString(asked.work).terms)
    failed = FailedSession(session.hex(), "run", 0, "digits", "train", DIED)
    work = {asked.assignment_id: {"tries": tries, "session": asdict(failed)}}
    home.begun.write_text(json.dumps({"format": 1, "work": work}))


def failures(home: WorkerHome) -> list[str]:
    with closing(RoundLedger(home.rounds)) as ledger:
        return [failed.error for failed in ledger.failures({"digits"})]


def test_a_question_in_which_the_process_dies_is_a_failure_that_counts_and_is_answered_like_any_other(
    asking: Asking,
) -> None:
    asked, home = asking.question(), asking.home_of()
    reply, _ = asking.reply_of(asked, with_first(OTHERS[200]))
    died(home, asked, 2)
    running = asking.working(home, with_first(OTHERS[200]))
    assert (failures(home), len(running.events("alert"))) == ([DIED], 1)
    assert "It is failure 1 in a row" in running.events("alert")[0]["message"]
    said = asking.answer(running, asked)
    assert isinstance(said, ReplyManifest)
    assert but_for_keys(said) == but_for_keys(reply)
    assert (failures(home), len(running.events("alert")), home.begun.exists()) == ([DIED], 2, False)


def test_a_question_in_which_the_process_died_once_is_tried_again_and_a_success_ends_the_row(asking: Asking) -> None:
    asked, home = asking.question(), asking.home_of()
    died(home, asked, 1)
    asking.working(home, with_first(OTHERS[200])).stop()
    running = asking.working(home, with_first(OTHERS[200]))
    assert (failures(home), len(running.events("alert"))) == ([DIED], 0), "it counts once"
    assert isinstance(asking.answer(running, asked), ReplyManifest)
    assert (failures(home), len(running.events("crashed")), home.begun.exists()) == ([], 1, False)


def test_questions_in_which_the_process_dies_count_although_they_are_not_asked_again(asking: Asking) -> None:
    home = asking.home_of()
    for _ in range(FAILURES):
        died(home, asking.question(), 1)
        running = asking.working(home, with_first(OTHERS[200]))
        running.stop()
    running = asking.working(home, with_first(OTHERS[200]))
    assert str(asking.answer(running, asking.question())).startswith("failing: 3 computations")


def test_a_question_in_which_the_process_dies_without_the_model_of_the_run_is_declined(asking: Asking) -> None:
    asked, home = asking.question(), asking.home_of()
    died(home, asked, 3)
    running = asking.working(home, with_first(OTHERS[200]))
    assert asking.answer(running, asked) == f"crashed: {DIED}; it was tried 3 times"


def test_what_does_not_depend_on_the_model_is_declined_as_before(asking: Asking) -> None:
    empty = Dataset(POOL.x[:0], POOL.y[:0])
    without = asking.working(asking.home_of(), TorchTrainer(Digits(), Splits(empty, empty, empty), "cpu", 1))
    assert str(asking.answer(without, asking.question())).startswith("limit:samples: ")
    without.stop()
    running = asking.working(asking.home_of(), with_first(RECORD))
    half = WHOLE + b'train.precision = "fp16"\n'
    work = Train.of(RunSpec.parse(half), 0, joint_target(("loss",)))
    assert str(asking.answer(running, asking.question(half, work=work))).startswith("precision: ")
    assert not without.events("alert")
    assert not running.events("alert")


def test_where_a_run_discloses_losses_a_failure_is_declined_without_its_text(asking: Asking) -> None:
    home = asking.home_of()
    home.policy.write_text('[secure]\ndisclose = ["loss"]\n')
    running = asking.working(home, with_first(RECORD, Strict))
    asked = asking.question(WHOLE + b'privacy.disclose = ["loss"]\n', disclose=("loss",))
    said = asking.answer(running, asked)
    assert said == "training-failed: the numbers that this run discloses could not be computed"
    assert SECRET in running.wait_for("alert")[0]["message"]
    with closing(RoundLedger(home.rounds)) as ledger:
        assert (len(ledger.entries({"digits"})), len(ledger.failures({"digits"}))) == (1, 1)


class Broken(Digits):
    """A task that nobody can evaluate, whatever the model."""

    def losses(self, output: Any, y: Tensor) -> dict[str, Tensor]:
        raise ValueError(SECRET)


def test_a_task_whose_metrics_cannot_be_found_declines_without_a_text(asking: Asking) -> None:
    running = asking.working(asking.home_of("run"), with_first(RECORD, Broken))
    assert asking.answer(running, asking.question(**evaluation())) == "failed: this worker's log has the error"


@pytest.mark.parametrize("error", [RuntimeError(SECRET), MemoryError(SECRET), DataError(SECRET), WorkError(SECRET)])
@pytest.mark.parametrize("kind", STAGES)
def test_no_stage_declines_with_the_text_of_an_exception(error: Exception, kind: str) -> None:
    order: Any = SimpleNamespace(work=registered(kind).work, manifest=AssignmentManifest(kind=kind))
    with pytest.raises(Declined) as caught, declining(order):
        raise error
    assert caught.value.texts == TwoTexts.same(SILENT)
    with pytest.raises(Declined, match="a check of this project"), declining(order):
        require(False, "terms", "a check of this project")
