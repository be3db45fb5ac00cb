"""Before a run begins, its operator learns which members would take part, and why the others would not."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from federation.digests import digest
from federation.record.provenance import Provenance, with_provenance
from federation.spec.accounting import COARSE, DELTA, Mechanism, NoiseBudget, epsilon
from federation.spec.computation import Ability
from federation.spec.run_spec import RunSpec
from federation.task_layout import TaskLayout
from federation.tasks import Task
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import Trainer
from federation.v1 import common_pb2
from federation.v1.admin_pb2 import RunHeader, SubmitRunRequest, SubmitRunResponse
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, Hello, TaskOffer
from federation.vectors import Array, Layout, Tensor, Vector, to_bytes, update_layout
from federation.work.site import Site
from fedpareto.cli.admin.upload import InitialModel, initial_model
from storage.states import RunState
from tests.harness import Attending, federation
from tests.paths import OWNERS_CODE
from tests.running import SECONDS, refused
from tests.stage import LAYOUT, MODEL, Player, Stage, spec
from worker.ledgers.privacy_ledger import Ledger, PrivacyEntry
from worker.site.assignment_checks import Declined, check_assignment
from worker.site.hello import Introduction
from worker.site.policy_file import Policy, WorkLimits
from worker.site.privacy import SitePrivacy

ALL = frozenset(Ability)
MOVED = len(MODEL) + update_layout([("loss", LAYOUT.size)]).file_bytes  # the model and an update


class Numbers(Task):
    """The model of a stage, or another version of it, without PyTorch."""

    def __init__(self, name: str, width: int = 5, objectives: tuple[str, ...] = ("loss",)) -> None:
        self.name, self.objectives, self._width = name, objectives, width

    def initial(self, seed: int) -> dict[str, Vector]:
        return {
            "layer.weight": np.zeros((8, self._width), np.float32),
            "layer.bias": np.zeros(self._width, np.float32),
        }


class Idle(Trainer):
    """Twenty samples, of which nothing is learnt."""

    sizes = MappingProxyType({"train": 20, "validation": 0, "test": 5})

    def train(self, model: Vector, plan: TrainingPlan) -> Array:
        return model

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        return {"loss": 1.0}


class Words(Attending):
    """Attends with a Hello of its own."""

    def __init__(self, player: Player, hello: Hello) -> None:
        self._hello = hello
        super().__init__(player.member, {})

    def say(self, request: AttendRequest) -> None:
        super().say(AttendRequest(hello=self._hello) if request.HasField("hello") else request)


@dataclass
class Owner:
    """A member with the policy of its owner, whose worker introduces itself, and checks what it is asked."""

    player: Player
    trainer: Idle
    policy: Policy
    budget: Callable[[str], NoiseBudget | None] = lambda _: None

    @property
    def site(self) -> Site:
        return Site(policies={self.trainer.task.name: self.policy.secure.of(self.trainer.task.name)})

    @property
    def hello(self) -> Hello:
        return Introduction({self.trainer.task.name: self.trainer}, "cpu", self.site, self.policy, self.budget).hello()

    def attend(self, hello: Hello | None = None) -> None:
        if self.player.stream is not None:
            self.player.stream.close()
        self.player.tasks = {self.trainer.task.name: self.trainer.samples}
        self.player.stream = Words(self.player, hello or self.hello)
        assert isinstance(self.player.stream.next(), AttendResponse)

    def reason(self, envelope: SignedEnvelope) -> str:
        """Why the worker declines an assignment; empty if it does not."""
        try:
            check_assignment(
                envelope,
                member=self.player.member.files,
                offers={self.trainer.task.name: self.trainer},
                limits=self.policy.limits,
                site=self.site,
                newest_round=lambda run: None,
                now=datetime.now(UTC),
            )
        except Declined as declined:
            return declined.reason
        return ""


def owner(stage: Stage, task: Task, name: str, abilities: frozenset[str] = ALL, **policy: Any) -> Owner:
    """A member that attends with a task, and with these sections of a policy."""
    trainer = Idle(task, None)
    trainer.abilities = abilities
    made = Owner(stage.player(name), trainer, Policy(**policy))
    made.attend()
    return made


def asked(document: bytes, **changes: Any) -> SubmitRunRequest:
    """The question of a dry run, as the command asks it; `changes` are of its header."""
    fields = {"model_bytes": len(MODEL), "parameters": LAYOUT.size, "layout": message(TaskLayout.of(LAYOUT))}
    return SubmitRunRequest(
        header=RunHeader(**{"spec": document, "model": digest(MODEL), "dry_run": True, **fields, **changes})
    )


def message(layout: TaskLayout) -> common_pb2.TaskLayout:
    return common_pb2.TaskLayout(**asdict(layout))


def outlook(stage: Stage, document: bytes, **changes: Any) -> SubmitRunResponse:
    return stage._admin.SubmitRun(iter([asked(document, **changes)]), timeout=SECONDS)


def reasons(response: SubmitRunResponse) -> dict[str, str]:
    return {other.client_id: other.reason for other in response.others}


@pytest.mark.full
def test_submit_says_what_a_run_with_noise_spends_at_the_smallest_member_and_where_a_budget_ends_it(
    stage: Stage, tmp_path: Path
) -> None:
    task = Numbers(stage.task())
    owner(stage, task, "large").trainer.sizes = MappingProxyType({"train": 20, "validation": 0, "test": 5})
    careful = owner(stage, task, "careful", privacy={task.name: {"noise": 4.0, "epsilon": 2.0}})
    ledger = Ledger(tmp_path / "privacy.db")
    ledger.add(PrivacyEntry("", task.name, task.name, "r", 0, "a", 4.0, 1.0, 0.5, 2))
    careful.budget = SitePrivacy(careful.policy.privacy, ledger).told
    careful.attend()
    more = "train.steps = 2\ntrain.batch_size = 10"
    (line,) = noise_lines(outlook(stage, spec("open", task.name, 30, more=more)))
    spent = NoiseBudget(noise=4.0, epsilon=2.0, delta=DELTA, spent=(Mechanism(4.0, 0.5, 2),))
    rounds = spent.affords(Mechanism(4.0, 0.5, 2), 30)
    assert 0 < rounds < 30
    assert epsilon([Mechanism(4.0, 0.5, 2 * (rounds + 1))], DELTA, COARSE).value <= 2
    assert epsilon([Mechanism(4.0, 0.5, 2 * (rounds + 2))], DELTA, COARSE).value > 2
    already = f"{epsilon(spent.spent, DELTA).value:.3g}"
    assert f"careful (epsilon = 2, of which {already} is spent) lasts for {rounds} of 30 rounds" in line[1]
    whole = f"{epsilon([Mechanism(4.0, 0.5, 60)], DELTA).value:.3g}"
    assert f"spends epsilon = {whole} (delta = 1e-05) of the samples of careful" in line[0]
    noisy = noise_lines(outlook(stage, spec("noisy", task.name, 1, more=f"{more}\nprivacy.sample_noise = 5.0")))
    assert [text.partition(" (delta")[0] for (text,) in noisy] == [
        f"the whole run spends epsilon = {epsilon([Mechanism(5.0, 0.5, 2)], DELTA).value:.3g}"
    ]


def noise_lines(response: SubmitRunResponse) -> list[list[str]]:
    lines = [line for line in response.warnings if "whole run spends" in line or "the budget of" in line]
    return [lines] if lines else []


def test_the_members_that_would_decline_are_those_that_do_with_their_reasons(stage: Stage, tmp_path: Path) -> None:
    task = Numbers(stage.task())
    make = partial(owner, stage, task)
    owners = {
        "": [make("fits"), make("exact", limits={"max_bytes": MOVED, "max_epochs": 1.6, "rows": 1}), make("old")],
        "layout": [owner(stage, Numbers(task.name, 4), "other")],
        "limit:samples": [make("few", limits={"samples": 21})],
        "limit:steps": [make("short", limits={"steps": 3}), make("slow", limits={"max_steps": 1})],
        "limit:epochs": [make("tired", limits={"max_epochs": 1.5})],
        "limit:bytes": [make("narrow", limits={"max_bytes": MOVED - 1})],
        "limit:members": [make("alone", limits={"members": 20})],
        "policy:required": [make("hidden", secure={"required": True})],
    }
    older = Hello(software="older", tasks=[TaskOffer(task=task.name, samples=20)])
    owners[""][-1].attend(older)
    expected = {item.player.name: reason for reason, items in owners.items() for item in items}
    document = spec("foretold", task.name, more="train.steps = 2\ntrain.batch_size = 16")

    response = outlook(stage, document)
    assert set(response.members) == set(expected)
    assert reasons(response) == {name: reason for name, reason in expected.items() if reason}
    assert (response.asked, response.needed) == (11, 6)
    skipped = (
        "each round would be skipped: 3 of the 11 members that could be asked would take part, and a round needs 6"
    )
    assert response.obstacle.startswith(skipped)
    (of_other,) = [warning for warning in response.warnings if "layout" in warning]
    assert of_other == (
        "other (1 of 11 members) will decline work of this run: the model of this worker's task has 2 tensors with 36 "
        "elements, the submitted one 2 tensors with 45 elements: compare the versions of the task [layout]"
    )

    (tmp_path / "run.toml").write_bytes(document)
    (tmp_path / "model.safetensors").write_bytes(MODEL)
    dry = "submit", tmp_path / "run.toml", "--model", tmp_path / "model.safetensors", "--dry-run"
    shown = stage.served.command(*dry, code=1, columns=200)
    assert "members that would take part now: 3 (exact, fits, old); a round asks 11, and needs 6 replies" in shown
    assert "offer the task and would not: 8: alone (limit:members), few (limit:samples), hidden (policy:req" in shown

    run = stage.submit(document)
    for item in (item for items in owners.values() for item in items):
        order = item.player.order()
        envelope = SignedEnvelope.FromString(stage.assignments(run)[item.player.name].envelope)
        assert item.reason(envelope) == expected[item.player.name], item.player.name
        if reason := item.reason(envelope):
            item.player.decline(order, reason)
        else:
            item.player.reply(order)
    assert "quorum: 3 of 11" in stage.wait_state(run, RunState.FAILED).reason


def test_a_submission_warns_of_rounds_that_would_be_skipped(stage: Stage) -> None:
    task = Numbers(stage.task())
    for name, few in (("ann", 21), ("ben", 21), ("cleo", 8)):
        owner(stage, task, name, limits={"samples": few})
    request = asked(spec("warned", task.name), dry_run=False)
    chunk = SubmitRunRequest(chunk=MODEL)
    response = stage._admin.SubmitRun(iter([request, chunk]), timeout=SECONDS)
    stage.stop_run(response.run.run_id)
    assert list(response.warnings) == [
        "ann, ben (2 of 3 members) will decline work of this run: it would be made from 20 of 20 samples; this worker "
        "uses at least 21 [limit:samples]",
        "each round would be skipped: 1 of the 3 members that could be asked would take part, and a round needs 2 "
        "replies",
    ]


def test_members_that_cannot_be_asked_now_are_named_too(stage: Stage) -> None:
    task = Numbers(stage.task())
    away, closed, paused = (owner(stage, task, name) for name in ("away", "closed", "paused"))
    owner(stage, task, "there", approve="each-run")
    stage.hang_up(away.player)
    hello = closed.hello
    hello.closed_until.FromDatetime(datetime(2100, 1, 1, tzinfo=UTC))
    closed.attend(hello)
    hello = paused.hello
    hello.paused = True
    paused.attend(hello)
    response = outlook(stage, spec("away", task.name))
    assert list(response.members) == ["there"]
    assert reasons(response) == {"away": "absent", "closed": "closed", "paused": "paused"}
    assert response.obstacle == ""
    accepts = "there (1 of 1 member) must accept the run first, by policy or by decision of the owner"
    assert list(response.warnings) == [accepts]
    enrolled = outlook(stage, spec("away", task.name, more='selection.pool = "enrolled"'))
    assert list(enrolled.members) == ["away", "there"]
    required = outlook(stage, spec("away", task.name, more='selection.required = ["closed"]'))
    assert required.obstacle == (
        "the run could not begin: selection.required names closed: it is closed until 2100-01-01 00:00 UTC"
    )
    required = outlook(stage, spec("away", task.name, more='selection.required = ["paused"]'))
    assert required.obstacle == "the run could not begin: selection.required names paused: it is paused"


def test_a_required_member_that_would_decline_and_chance_are_told(stage: Stage) -> None:
    task = Numbers(stage.task())
    for name in ("ann", "ben", "cleo", "dora"):
        owner(stage, task, name, limits={"samples": 21 if name in ("ann", "ben") else 8})
    required = outlook(stage, spec("named", task.name, more='selection.required = ["ann"]\nselection.quorum = 0.1'))
    assert required.obstacle.startswith("each round would be skipped: selection.required names ann: it would be made")
    drawn = outlook(stage, spec("drawn", task.name, more='selection.method = "count"\nselection.count = 2'))
    assert drawn.obstacle == ""
    assert drawn.warnings[-1].startswith(
        "a round asks 2 of the 4 members and needs 2 replies. It is skipped if it asks"
    )
    left_out = outlook(stage, spec("drawn", task.name, more='selection.exclude = ["ann", "ben"]'))
    assert (list(left_out.members), len(left_out.others), left_out.obstacle) == (["cleo", "dora"], 0, "")


def test_a_layout_is_compared_if_both_sides_know_it(stage: Stage) -> None:
    task = Numbers(stage.task())
    owner(stage, task, "ann")
    document = spec("compared", task.name)
    assert reasons(outlook(stage, document, layout=None)) == {}
    renamed = replace(LAYOUT, tensors=(replace(LAYOUT.tensors[0], name="body"), LAYOUT.tensors[1]))
    for other in (TaskLayout.of(renamed), TaskLayout.of(LAYOUT, ("layer.bias",))):
        response = outlook(stage, document, layout=message(other))
        assert response.others[0].message.startswith(
            "the model of this worker's task has tensors with other names, shapes or places than the submitted one"
        )


def test_abilities_count_by_the_objectives_that_a_member_serves(stage: Stage) -> None:
    task = Numbers(stage.task(), objectives=("left", "right"))
    both, one = (owner(stage, task, name, abilities=frozenset()) for name in ("both", "one"))
    hello = one.hello
    hello.tasks[0].objectives[:] = ["left"]
    one.attend(hello)

    def told(algorithm: str, more: str = "") -> dict[str, str]:
        return reasons(
            outlook(stage, spec("able", task.name, algorithm=algorithm, more=more), objectives=("left", "right"))
        )

    assert told("fedavg-n") == {"both": "ability:weights"}
    assert told("fsmgda") == {}
    assert told("fedavg-n", "train.proximal_mu = 0.5") == {"both": "ability:proximal", "one": "ability:proximal"}
    both.policy = Policy(limits=WorkLimits(rows=1))
    both.attend()
    assert told("fsmgda") == {"both": "limit:rows"}
    assert told("fedcmoo", "train.batch_size = 4\ntrain.steps = 9") == {"both": "limit:samples", "one": "limit:samples"}


def test_nothing_is_foretold_of_an_algorithm_that_may_ask_for_anything(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(OWNERS_CODE / "lottery")
    task = Numbers(stage.task())
    owner(stage, task, "ann", limits={"samples": 21})
    assert reasons(outlook(stage, spec("drawn", task.name, algorithm="lottery:Lottery"))) == {}
    assert reasons(outlook(stage, spec("drawn", task.name))) == {"ann": "limit:samples"}


def test_the_command_tells_the_layout_of_the_task_or_that_of_a_model_that_is_shared_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(task: str, parameters: str = "", *, model: bool = True) -> InitialModel:
        document = f'name = "told"\ntask = "{task}"\nrounds = 1\n{parameters}'
        return initial_model(RunSpec.parse(document.encode()), path if model else None)

    path = tmp_path / "model.safetensors"
    path.write_bytes(MODEL)
    without = told("nowhere:Task")
    assert (without.layout, without.parameters, without.buffers) == (TaskLayout.of(LAYOUT), LAYOUT.size, 0)
    origin = Provenance(federation="f", run="r", round="0", record="", entries="")
    path.write_bytes(with_provenance(LAYOUT.header, origin) + MODEL[len(LAYOUT.header) :])
    assert told("nowhere:Task").digest == without.digest == digest(MODEL), "of what is sent, without metadata"
    part = 'parameters.personal = ["head"]'
    assert told("nowhere:Task", part).layout is None
    last = told("nowhere:Task", 'parameters = { buffers = "averaged", buffer_names = ["layer.bias"] }')
    assert (last.layout, last.parameters, last.buffers) == (None, LAYOUT.size - 5, 5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "probed.py").write_text(VERSION.format(width=2))
    path.write_bytes(to_bytes(Layout((Tensor("body", (9,)),)), np.zeros(9, np.float32)))
    made = told("probed:Probe", part, model=False)
    assert made.layout == told("probed:Probe", part).layout
    assert made.layout is not None
    assert (made.layout.tensors, made.layout.elements, made.parameters) == (2, 15, 9)


VERSION = """
import numpy as np
from fedpareto import Dataset, Splits, Task, Trainer

class Halving(Trainer):
    def train(self, model, plan):
        return model / 2

    def evaluate(self, model, plan):
        return {{"loss": 1.0}}

class Probe(Task):
    trainer = Halving

    def initial(self, seed):
        return {{"body": np.ones(9), "head": np.ones((3, {width}))}}

    def load(self, source):
        some = Dataset(np.zeros((20, 1)), np.zeros(20))
        return Splits(some, some, some)
"""


@pytest.mark.full
def test_five_workers_of_which_three_would_decline_do_as_a_dry_run_says(tmp_path: Path) -> None:
    for version in (1, 2):
        (tmp_path / f"v{version}").mkdir()
        (tmp_path / f"v{version}" / "probe.py").write_text(VERSION.format(width=version))
    document = tmp_path / "run.toml"
    document.write_text('name = "probe"\ntask = "probe:Probe"\nrounds = 1\ntrain = { steps = 2, batch_size = 10 }\n')
    policies = {"dora": "[limits]\nsamples = 50\n", "emil": "[limits]\nmax_steps = 1\n"}
    with federation(tmp_path) as fed:
        fed.serve()
        for name in ("ann", "ben", "cleo", "dora", "emil"):
            (fed.join(name) / "policy.toml").write_text(policies.get(name, ""))
            code = tmp_path / ("v2" if name == "cleo" else "v1")
            fed.work(name, "--code", str(code), task="probe:Probe")
        fed.attending("ann", "ben", "cleo", "dora", "emil")
        submit = "submit", str(document), "--code", str(tmp_path / "v1")
        dry = fed.admin(*submit, "--dry-run", code=1)
        foretold = {other["client_id"]: other["reason"] for other in dry["others"]}
        assert foretold == {"cleo": "layout", "dora": "limit:samples", "emil": "limit:steps"}
        assert "2 of the 5 members that could be asked would take part, and a round needs 3 replies" in dry["obstacle"]
        warnings = fed.admin(*submit)["warnings"]
        assert [warning.partition(" ")[0] for warning in warnings] == ["cleo", "dora", "emil", "each"]
        (run,) = fed.query("select run_id from runs")[0]
        assert fed.wait_ended(run) == "FAILED"
        declined = fed.query("select client_id, reason, message from assignments where state = 'DECLINED'")
        assert {name: reason for name, reason, _ in declined} == foretold
        (message,) = (message for name, _, message in declined if name == "cleo")
        assert message == (
            "tensor 2 is 'head' [3, 1] in the model of the run, and 'head' [3, 2] in this task: compare the versions "
            "of the task"
        )


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"layout": common_pb2.TaskLayout(digest="md5:1", tensors=1, elements=1)}, "not a digest: 'md5:1'"),
        ({"layout": common_pb2.TaskLayout(digest=digest(b""), tensors=2, elements=1)}, "2 tensors with 1 elements"),
        ({"parameters": 2**48, "buffers": 1}, f"{2**48} parameters and 1 buffers"),
    ],
)
def test_a_submission_that_describes_no_model_is_refused(stage: Stage, told: dict[str, Any], words: str) -> None:
    with refused("INVALID_ARGUMENT", "argument") as messages:
        outlook(stage, spec("strange", "digits"), **told)
    assert words in messages[0]
