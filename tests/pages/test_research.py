"""The pages of docs/research, from their text."""

import json

import numpy as np
import pytest

from federation.tasks.digits import bundled
from tests.pages.reader import Reader
from tests.paths import DOCS

RESEARCH = DOCS / "research"


@pytest.mark.full
def test_a_run_is_simulated_read_exported_resumed_and_taken_into_a_notebook(reader: Reader) -> None:
    x, y = bundled()
    for name, digits in (("east", y < 5), ("west", y >= 5)):
        (reader.directory / "data" / name).mkdir(parents=True)
        np.savez(reader.directory / "data" / name / "digits.npz", x=x[digits], y=y[digits])
    reader.before = {"fedpareto simulate run.toml --threads 1 --resume": reader.leave}
    reader.read((RESEARCH / "simulation.md").read_text())


@pytest.mark.full
def test_attacks_are_listed_and_rehearsed_by_a_worker_and_a_backdoor_is_simulated(reader: Reader) -> None:
    reader.begin("h")
    reader.read((RESEARCH / "attacks.md").read_text())


@pytest.mark.full
def test_models_are_evaluated_at_the_members(reader: Reader) -> None:
    reader.begin("hospital-a", "hospital-b")
    reader.work("hospital-a", "hospital-b")
    reader.run("digits-1")
    for number, name in enumerate(("ours", "published")):
        reader.enter(f"fedpareto admin export digits-1 --round {number} --out {name}.safetensors")
    reader.read((RESEARCH / "evaluation.md").read_text(), {"--home ADMIN": "--home coordinator/admin"})


@pytest.mark.full
def test_what_members_hold_is_asked_for(reader: Reader) -> None:
    sites = ("hospital-a", "hospital-b")
    reader.begin(*sites)
    for site in sites:
        (reader.directory / site / "policy.toml").write_text("[statistics]\nopen = true\n")
    reader.work(*sites)
    # A private run needs five members: tests/worker/site/test_private_statistics.py.
    reader.skipped = ("fedpareto admin submit held.toml", "fedpareto admin statistics what-is-held ")
    reader.read((RESEARCH / "statistics.md").read_text(), {"--home ADMIN": "--home coordinator/admin"})


@pytest.mark.full
def test_a_model_is_filled_from_statistics_and_predicts_from_inputs_as_they_are(reader: Reader) -> None:
    sites = ("site-a", "site-b", "site-c")
    reader.begin(*sites)
    for site in sites:
        (reader.directory / site / "policy.toml").write_text("[statistics]\nopen = true\n")
    first = "fedpareto worker run --home site-a --task visits:Visits --code mine --data mine/data/site-a"
    others = [first.replace("site-a", site) for site in sites[1:]]
    reader.before = {first: lambda: [reader.enter(command) for command in others]}
    reader.read((RESEARCH / "standardise.md").read_text(), {"--home ADMIN": "--home coordinator/admin"})
    assert (reader.directory / "visits.safetensors").exists()


@pytest.mark.full
def test_a_task_with_two_objectives_is_simulated(reader: Reader) -> None:
    reader.skipped = ("fedpareto demo",)  # tests/fedpareto/test_demo.py plays it
    reader.read((RESEARCH / "objectives.md").read_text())


@pytest.mark.full
def test_personal_parameters_and_the_shared_ones_are_exported(reader: Reader) -> None:
    reader.begin("fedpareto-worker")
    reader.work("fedpareto-worker")
    reader.run("own-heads", 'parameters.personal = ["out.*"]\n')
    (run,) = json.loads(reader.enter("fedpareto admin runs --json"))["runs"]
    reader.read((RESEARCH / "personal-parameters.md").read_text(), {"4f0c1d2e3a5b": run["run_id"]})


@pytest.mark.full
def test_a_rule_a_stage_an_attack_and_a_sketch_of_ones_own_are_tried_and_run(reader: Reader) -> None:
    random = np.random.default_rng(0)
    np.savez(reader.directory / "updates.npz", updates=random.standard_normal((4, 9)), losses=np.arange(4.0))
    reader.begin("fedpareto-worker")
    reader.leave("coordinator serve coordinator")
    page = (RESEARCH / "plugins.md").read_text()
    reader.skipped = ("fedpareto experiment run my-experiment",)  # which a package gives a name
    reader.read(page, {"serve --code": "serve --home coordinator --code", "rounds = 20": "rounds = 2"})


@pytest.mark.full
def test_experiments_are_listed_and_one_of_ones_own_is_run(reader: Reader) -> None:
    # These take hours, and data that is not here; the tests in tests/fedpareto/experiments make their short forms.
    reader.skipped = ("fedpareto experiment run fedfv", "fedpareto experiment compare", "fedpareto experiment run leak")
    page = (RESEARCH / "experiments.md").read_text()
    told, title, own = page.partition("## An experiment of your own")
    reader.read(title + own)
    reader.read(told, {" --data DATA": "", "results/fedfv-table3": "results/my-experiment"})
