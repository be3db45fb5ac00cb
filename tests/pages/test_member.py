"""The pages of docs/member, from their text."""

from pathlib import Path
from shutil import copy

import pytest

from tests.harness import wait_for
from tests.pages.reader import Reader
from tests.paths import DOCS

MEMBER = DOCS / "member"


@pytest.mark.full
def test_an_owner_joins_runs_a_worker_sees_what_left_decides_pauses_and_leaves(reader: Reader) -> None:
    reader.begin("hospital-b")
    reader.enter("fedpareto admin join-string hospital-a")
    (reader.directory / "run.toml").write_text('name = "cohort-2"\ntask = "digits"\nrounds = 1\n')
    worker = "fedpareto worker run --home hospital-a --task digits"

    def train() -> None:
        reader.work("hospital-b")
        reader.run("rehearsal-1", 'parameters.personal = ["*bias"]\nselection.minimum = 2\n')
        copy(reader.directory / "hospital-b/receipts.jsonl", reader.directory / "hospital-b-receipts.jsonl")

    def ask() -> None:
        (reader.directory / "hospital-a/policy.toml").write_text('approve = "each-run"\n')
        reader.enter(worker)
        both = "selection.minimum = 2\n"  # so that the run asks this site
        (reader.directory / "run.toml").write_text(f'name = "cohort-2"\ntask = "digits"\nrounds = 1\n{both}')
        reader.enter("fedpareto admin submit run.toml")
        wait_for(lambda: "cohort-2" in reader.enter("fedpareto worker runs --home hospital-a"), "the run to ask")

    reader.before = {
        "fedpareto worker left --home hospital-a": train,
        "fedpareto worker runs --home hospital-a": ask,
    }
    page = (MEMBER / "your-site.md").read_text()
    reader.read(
        page,
        {
            " --data /data/fashion-mnist": "",
            "fashion-mnist": "digits",
            "--now --forget --home /srv/fedpareto-worker": "--now --forget --home hospital-b",
            "/srv/fedpareto-worker": "hospital-a",
            "RUN ": "cohort-2 ",
        },
    )


@pytest.mark.full
def test_owners_make_and_pin_a_roster_change_it_and_look_at_failures(reader: Reader) -> None:
    members = [f"hospital-{letter}" for letter in "abcde"]
    reader.begin(*members, name="north")

    def card(home: str) -> str:
        return reader.enter(f"fedpareto worker roster card --home {home}")

    def gather(*homes: str) -> None:
        (reader.directory / "roster.toml").write_text("\n".join(map(card, homes)))

    def make_anew() -> None:
        reader.begin(name="north", home="again")
        for member in members[:2]:
            reader.admit(member, f"{member}-anew")

    pin = "fedpareto worker roster pin roster.toml --home hospital-a"
    old = "fedpareto worker roster card --home hospital-a-anew --old-home hospital-a"
    changed = ("hospital-a", "hospital-b-anew", *members[2:])
    reader.before = {
        pin: lambda: gather(*members),
        old: make_anew,
        f"{pin} --replace hospital-b": lambda: gather(*changed),
    }
    page = (MEMBER / "privacy.md").read_text()
    homes = {"--home h --old-home h-before": old.partition("card ")[2], "--home h\n": "--home hospital-a\n"}
    reader.read(page, {**homes, "--home h ": "--home hospital-a ", "mortality": "digits"})


@pytest.mark.full
def test_a_worker_runs_by_its_file(reader: Reader, tmp_path: Path) -> None:
    reader.begin("hospital-a")
    home = tmp_path / "hospital-a"
    (tmp_path / "worker.toml").write_text((home / "worker.toml").read_text() + '\ntasks = ["digits"]\n')
    reader.environment("FEDPARETO_CODE", "docs/examples")
    (home / "worker.toml").write_text((tmp_path / "worker.toml").read_text())
    files = {"/srv/fedpareto-worker": "hospital-a", "/var/lib/fedpareto/home": "hospital-a", "/etc/fedpareto/": ""}
    reader.read((MEMBER / "worker-file.md").read_text(), files)


@pytest.mark.full
def test_the_noise_for_an_epsilon_is_planned(reader: Reader) -> None:
    reader.read((MEMBER / "differential-privacy.md").read_text())
