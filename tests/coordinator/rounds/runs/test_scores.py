"""The record of the rounds' measurements: the best round, the value that stops a run, the share that improved."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import RunFacts
from coordinator.rounds.fleets.past_rounds import PastRounds
from coordinator.rounds.runs import scores
from federation.aggregation.metrics import model_metrics
from federation.aggregation.phases import PhaseReply, Replies
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MOST_VALUES, MetricKind
from storage import models
from storage.models import Assignment, Evaluation, Phase, Round, Run
from storage.states import AssignmentState, PhaseState, RoundState, RunState
from tests.federation.aggregation.scene import reply

NOW = datetime(2026, 5, 4, tzinfo=UTC)
OTHERS = ("before", "the one after")  # the names of further runs, on either side of "run"
KINDS = (MetricKind("auc"), MetricKind("rmse", better="lower"))
SPEC = 'name = "x"\ntask = "digits"\nrounds = 9\n'


def told(*claims: dict[str, float]) -> Replies:
    return Replies([reply(f"c{i}", metrics=claim) for i, claim in enumerate(claims)])


def test_a_round_records_mean_weighted_worst_and_best() -> None:
    replies = told(
        {"test/auc": 0.9, "test/rmse": 1.0, "test/samples": 1.0},
        {"test/auc": 0.5, "test/rmse": 3.0, "test/samples": 3.0, "test/other": 1.0},
        {"train/auc": 0.1},
    )
    found = model_metrics.scores(replies, ("loss",), KINDS)
    auc = {"mean": 0.7, "weighted": 0.6, "worst": 0.5, "best": 0.9}
    rmse = {"mean": 2, "weighted": 2.5, "worst": 3, "best": 1}
    expected = {f"metric/{metric}/{of}": v for metric, by in (("auc", auc), ("rmse", rmse)) for of, v in by.items()}
    recorded = {name: value for name, value in found.items() if name.startswith("metric/")}
    assert recorded == pytest.approx(expected)
    assert math.isnan(model_metrics.summary([(0.5, 0)], "weighted", higher=True)), "nobody has samples"
    with pytest.raises(ValueError, match="no summary 'median'"):
        model_metrics.summary([(0.5, 1)], "median", higher=True)


def test_a_member_that_claims_many_values_does_not_fill_the_record() -> None:
    many = {f"test/auc/{number}": 1.0 for number in range(1000)}
    found = model_metrics.scores(told(many, {"test/auc/z": 0.5}, {"test/auc/z": 0.7}), ("loss",), KINDS)
    recorded = {name for name in found if name.startswith("metric/")}
    assert len(recorded) == 4 * MOST_VALUES
    assert "metric/auc/z/mean" in recorded, "what most members report comes first"


@pytest.fixture
def session() -> Iterator[Session]:
    """The tables without the rows that foreign keys refer to."""
    engine = create_engine("sqlite://")
    models.Base.metadata.create_all(engine)
    with Session(engine) as opened:
        yield opened
    engine.dispose()


def a_run(session: Session, recorded: Sequence[Mapping[str, float]], spec: str = "", name: str = "run") -> list[Round]:
    """The rounds of a run with these metrics on record."""
    facts = {"spec_digest": "", "initial_model": "model", "model": "model", "submitted_by": "", "created": NOW}
    document = (SPEC + spec).encode()
    run = Run(run_id=name, name=name, state=RunState.RUNNING, spec=document, metrics=KINDS, **facts)
    facts = {"run": run, "state": RoundState.COMPLETED, "base_model": "model", "wanted": 2, "started": NOW}
    rounds = [Round(number=number, metrics=dict(numbers), **facts) for number, numbers in enumerate(recorded)]
    session.add_all(rounds)
    session.flush()
    return rounds


def measure(session: Session, of: Round, client: str, samples: int = 10, split: str = "test", **values: float) -> None:
    loss, accuracy = values.pop("loss", None), values.pop("accuracy", None)
    row = Evaluation(client_id=client, model="model", split=split, samples=samples, others=values)
    row.round_id, row.loss, row.accuracy = of.round_id, loss, accuracy
    session.add(row)
    session.flush()


def test_of_rounds_with_the_best_value_the_one_with_the_lowest_loss_on_the_same_split_is_the_best(
    session: Session,
) -> None:
    losses = [{"loss/validation": 0.6}, {"loss/validation": 0.2}, {"loss/validation": 0.4, "loss/test": 0.1}, {}]
    rounds = a_run(session, losses)
    for round_ in rounds:
        measure(session, round_, "a", split="validation", auc=1.0)
        measure(session, round_, "a", split="test", auc=1.0)
    run = rounds[0].run
    assert scores.best_round(session, run, "auc", "worst", "validation") == (1, 1.0, 4)
    assert scores.best_round(session, run, "auc", "a", "test") == (2, 1.0, 4)


def test_the_best_round_is_the_last_of_those_with_the_best_value_where_no_loss_decides(session: Session) -> None:
    rounds = a_run(session, [{}] * 4)
    for round_, (a, b) in zip(rounds, [(0.25, 0.5), (0.625, 0.125), (0.375, 0.375), (0.375, 0.375)], strict=True):
        measure(session, round_, "a", samples=30, accuracy=a, loss=a, auc=a, rmse=a)
        measure(session, round_, "b", accuracy=b, loss=b, auc=b, rmse=b)
        measure(session, round_, "c", split="validation", samples=0, loss=-a)
    for name in OTHERS:
        (other,) = a_run(session, [{}], name=name)
        measure(session, other, "a", accuracy=0.9, loss=0.0)
    run = rounds[0].run
    best = {
        (metric, of): scores.best_round(session, run, metric, of, "test")[:2]
        for metric in ("accuracy", "auc", "loss", "rmse")
        for of in ("", "mean", "weighted", "worst", "a", "b")
    }
    for higher, lower in (("accuracy", "loss"), ("auc", "rmse")):
        for metric in (higher, lower):
            assert best[metric, ""] == best[metric, "mean"] == (3, 0.375)
            assert best[metric, "worst"] == (3, 0.375)
        assert (best[higher, "weighted"], best[lower, "weighted"]) == ((1, 0.5), (0, 0.3125))
        assert (best[higher, "a"], best[lower, "a"]) == ((1, 0.625), (0, 0.25))
        assert (best[higher, "b"], best[lower, "b"]) == ((0, 0.5), (1, 0.125))
    assert scores.best_round(session, run, "loss", "", "")[:2] == (1, -0.625), "of the validation split"
    nowhere = r"run run has a validation loss \(weighted\) on record: its specification, .* says what is measured"
    for metric, of, split, why in (
        ("loss", "weighted", "", nowhere),  # without samples
        ("loss", "c", "test", r"has a test loss \(c\) on record"),
        ("auc", "c", "validation", r"has a validation auc \(c\) on record"),
        ("dice", "", "", "run run has no metric 'dice'; there are accuracy, loss, auc, rmse"),
        ("acuracy", "", "", r"run run has no metric 'acuracy'; did you mean 'accuracy'\? there are"),
    ):
        with pytest.raises(Refusal, match=why, check=lambda error: error.reason == "metric-unknown"):
            scores.best_round(session, run, metric, of, split)


def test_of_private_evaluations_the_best_round_is_that_of_the_best_mean_on_record(session: Session) -> None:
    recorded = [{}, {"loss/test": 2.0, "accuracy/mean": 0.5, "metric/auc/mean": 0.9}]
    recorded += [{"loss/test": 1.0, "loss/validation": 3.0, "accuracy/mean": math.nan, "metric/auc/mean": 0.8}]
    run = a_run(session, recorded, 'evaluate.splits = ["train", "test", "validation"]')[0].run
    for name in OTHERS:
        a_run(session, [{"loss/test": 0.0}], name=name)
    assert scores.best_round(session, run, "loss", "", "test") == (2, 1.0, 1)
    assert scores.best_round(session, run, "loss", "mean", "") == (2, 3.0, 1)
    assert scores.best_round(session, run, "accuracy", "mean", "test") == (1, 0.5, 1)
    assert scores.best_round(session, run, "auc", "mean", "test") == (1, 0.9, 1)
    for metric, of, split in (
        ("loss", "worst", "test"),
        ("loss", "a", "test"),
        ("loss", "", "train"),
        ("accuracy", "", "validation"),  # the accuracy on record is that of the first split
        ("rmse", "", "test"),
    ):
        with pytest.raises(Refusal, match=rf"has a {split} {metric} \({of or 'mean'}\) on record"):
            scores.best_round(session, run, metric, of, split)


def test_the_share_that_improved_is_of_the_deciding_replies_of_the_present_attempt(session: Session) -> None:
    def measuring(client: str, **measured: float) -> PhaseReply:
        return reply(client, metrics={f"train/{name}": value for name, value in measured.items()})

    before, current, after = a_run(session, [{}] * 3)
    current.attempt = 1
    for number, (round_, attempt, decides, accepted, loss) in enumerate(
        [
            (current, 0, True, True, 0.0),
            (current, 2, True, True, 0.0),
            (current, 1, False, True, 0.0),
            (current, 1, True, True, 2.0),
            (current, 1, True, False, 0.0),
            (before, 1, True, True, 0.0),
            (after, 1, True, True, 0.0),
        ]
    ):
        facts = {"kind": "train", "state": PhaseState.CLOSED, "wanted": 2, "started": NOW, "deadline": NOW}
        phase = Phase(round_id=round_.round_id, number=number, attempt=attempt, decides=decides, **facts)
        facts = {"state": AssignmentState.FULFILLED, "base_model": "model", "envelope": b"", "created": NOW}
        for client in "abc":
            assignment = Assignment(assignment_id=f"{client}-{number}", client_id=client, **facts)
            phase.assignments.append(assignment)
            told = models.Reply(client_id=client, accepted=accepted, envelope=b"", envelope_digest="", receipt=b"")
            told.received, told.metrics = NOW, {} if client == "c" else {"train/loss": loss}
            assignment.replies.append(told)
        session.add(phase)
    session.flush()
    decided = scores.decided(session, current)
    told_after = Replies([measuring("a", loss=1.0), measuring("b", samples=1), measuring("c", loss=1.0)])
    assert model_metrics.improved(decided, told_after) == {"improved": 0.5}, "b's loss is no finite number"
    told_after = Replies([measuring("a", loss=2.5, samples=5), measuring("b", samples=0)])
    assert model_metrics.improved(decided, told_after) == {"improved": 0.0}, "b measured nothing"
    assert model_metrics.improved(decided, Replies([measuring("c", loss=1.0)])) == {}


def stopped(keys: str) -> RunFacts:
    return RunFacts("run", RunSpec.parse(f"{SPEC}stop = {{ {keys} }}"), b"", "", 1, ("loss",), KINDS)


@pytest.mark.parametrize(("metric", "sign"), [("auc", 1.0), ("rmse", -1.0)])
def test_a_value_counts_as_better_if_it_exceeds_the_last_one_that_counted(
    session: Session, metric: str, sign: float
) -> None:
    run = stopped(f'metric = "{metric}", of = "weighted", patience = 2, improvement = 0.5')
    values = (1.0, 1.5, 1.75, None, 2.0, None, 9.0)
    rounds = a_run(session, [{} if value is None else {"stop/value": sign * value} for value in values])
    for name in OTHERS:
        a_run(session, [{"stop/value": sign * 9}], name=name)

    def of_run(number: int, run: RunFacts, told: Sequence[Mapping[str, float]]) -> dict[str, float]:
        stops = PastRounds(rounds[number].run_id).metrics(session, number).stops
        return model_metrics.watched(run.spec.stop, run.stopped_by, told, stops)

    def watched(number: int, **measured: float) -> dict[str, float]:
        told = {f"validation/{name}": value for name, value in measured.items()}
        return of_run(number, run, [told, {"validation/samples": 1.0}])

    found = watched(5, samples=1, **{metric: sign * 1.5})
    assert found == {"stop/value": sign * 1.5, "stop/best": sign * 2.0, "stop/since": 2.0}
    found = watched(2, samples=1, **{metric: sign * 1.75})
    assert found == {"stop/value": sign * 1.75, "stop/best": sign * 1.75, "stop/since": 0.0}
    assert watched(5, **{metric: 1.0}) == watched(5, samples=1) == {}, "no samples, no value"
    for other in (stopped(f'metric = "{metric}", of = "worst", patience = 2'), stopped("")):
        assert of_run(5, other, [{"validation/": 1.0}]) == {}


@pytest.mark.parametrize(("metric", "sign"), [("auc", 1.0), ("rmse", -1.0)])
def test_a_run_ends_at_its_target_or_after_its_patience(metric: str, sign: float) -> None:
    run = stopped(f'metric = "{metric}", target = {2 * sign}, patience = 3')
    assert scores.why_stopped(run, {}) == ""
    for value, since, why in (
        (1.5, 2.0, ""),
        (2.0, 0.0, f"target reached: validation {metric} (mean) = {2 * sign:g}, target {2 * sign:g}"),
        (1.5, 3.0, f"no better validation {metric} (mean) in 3 evaluations; the last one is {1.5 * sign:g}"),
    ):
        assert scores.why_stopped(run, {"stop/value": sign * value, "stop/since": since}) == why
    impatient = stopped(f'metric = "{metric}", target = 0.0')
    assert scores.why_stopped(impatient, {"stop/value": -sign, "stop/since": 9.0}) == ""
