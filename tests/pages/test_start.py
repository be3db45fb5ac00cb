"""The pages of docs/start after the first one, from their text."""

from shutil import copytree

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from tests.pages.reader import Reader
from tests.paths import DOCS, ROOT
from tests.project.scene import section

START = DOCS / "start"
HERE = {  # a directory below the reader's, in place of one that root makes, and this machine, in place of the host
    "/srv/fedpareto-worker": "hospital-a",
    "/srv/fedpareto": "coordinator",
    "fl.example.org": "localhost",
    " --port 7443 --enrollment-port 7444": "",
}
WORKER = "fedpareto-worker"  # the directory of a worker that no option names


def put_tumours(reader: Reader) -> None:
    """Writes the file of a clinic."""
    x, y = load_breast_cancer(return_X_y=True)
    rows = [",".join(map(str, (*measured, label))) for measured, label in zip(x, y, strict=True)]
    (reader.directory / "clinic").mkdir()
    (reader.directory / "clinic/tumours.csv").write_text("\n".join([",".join("m" * 31), *rows, ""]))


@pytest.mark.full
def test_a_federation_on_three_machines_is_set_up_and_its_model_used(reader: Reader) -> None:
    page = (START / "first-federation.md").read_text()
    first, other, rest = page.partition("Hospital B:")
    reader.read(first, HERE)
    reader.read(other + rest, HERE | {"/srv/fedpareto-worker": "hospital-b"})


@pytest.mark.full
def test_the_specification_for_three_hospitals_is_rehearsed(reader: Reader) -> None:
    reader.read((START / "three-hospitals.md").read_text())


@pytest.mark.full
def test_a_worker_is_moved_and_of_two_copies_one_goes_on(reader: Reader) -> None:
    reader.begin("old")
    run = "fedpareto worker run --home {} --task digits"
    reader.enter(run.format("old"))
    old, new = "worker run old", "worker run new"

    def two_copies() -> None:
        reader.keep(run.format("old"), "worker copied")
        reader.leave(old)
        reader.leave(new)
        reader.enter("fedpareto worker copied --home old --this-one")

    reader.own = {
        "systemctl stop fedpareto-worker": lambda: reader.leave(old),
        "rsync -a --delete HOME/ new-machine:HOME/": lambda: copytree(
            reader.directory / "old", reader.directory / "new"
        ),
        "fedpareto worker copied --home KEPT --this-one": two_copies,
    }
    moved = {"doctor --home HOME": "doctor --home new --task digits", "run --home HOME": "run --home new --task digits"}
    page = (START / "moving-a-worker.md").read_text()
    reader.read(page, {"/srv/fedpareto-worker": "HOME", **moved, "OTHER": "new"})
    reader.enter(run.format("old"))


@pytest.mark.full
def test_a_task_of_ones_own_is_written_rehearsed_and_trained_in_a_federation(reader: Reader) -> None:
    reader.begin("hospital-a")
    (reader.directory / "hospital-a").rename(reader.directory / WORKER)
    put_tumours(reader)
    reader.read((START / "your-own-task.md").read_text(), {"/srv/clinic": "clinic"})
    reader.enter("fedpareto admin watch tumours-1")


@pytest.mark.full
def test_trainers_of_ones_own_train_in_a_simulation_a_rehearsal_and_a_federation(reader: Reader) -> None:
    reader.begin("hospital-a")
    (reader.directory / "hospital-a").rename(reader.directory / WORKER)
    put_tumours(reader)
    page = (START / "your-own-trainer.md").read_text()
    own_loop, _, rest = page.partition("## Several GPUs")
    reader.read(own_loop, {"rounds = 20": "rounds = 2"})
    reader.enter("fedpareto admin watch own-loop")
    # Slurm is not here.
    here = {"processes=4": "processes=2", "per-node=4": "per-node=2", "srun --gres=gpu:1 ": "", "/srv/clinic": "clinic"}
    reader.read(rest, here | {"--task digits": "--task digits --device cpu"})


@pytest.mark.full
def test_python_simulates_starts_a_federation_and_works_with_one(reader: Reader) -> None:
    members = ("hospital-a", "hospital-b")
    reader.begin(*members)
    (reader.directory / "admin").symlink_to("coordinator/admin")
    for number, member in enumerate(members, 1):
        reader.enter(f"fedpareto worker run --home {member} --task digits --set part={number}/2")
    reader.read((START / "python.md").read_text())
    assert (reader.directory / "report.html").exists()


@pytest.mark.full
def test_a_language_model_learns_by_adapters(reader: Reader) -> None:
    pytest.importorskip("peft", reason="needs fedpareto[examples]")
    reader.read((START / "adapters-and-segmentation.md").read_text().partition("## Segmentation")[0])


@pytest.mark.full
def test_images_are_segmented_and_the_best_model_is_exported(reader: Reader) -> None:
    reader.read((START / "adapters-and-segmentation.md").read_text().partition("## Segmentation")[2])
    assert (reader.directory / "model.safetensors").exists()


def put_parts(reader: Reader, file: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Writes a third of samples into the file of each of three members."""
    for number, name in enumerate("abc"):
        (reader.directory / "data" / name).mkdir(parents=True)
        torch.save((x[number::3].clone(), y[number::3].clone()), reader.directory / "data" / name / file)


@pytest.mark.full
def test_a_lightning_module_is_rehearsed_and_takes_part(reader: Reader) -> None:
    pytest.importorskip("lightning", reason="needs fedpareto[examples]")
    reader.begin("hospital-a")
    (reader.directory / "hospital-a").rename(reader.directory / WORKER)
    images, labels = load_digits(return_X_y=True)
    put_parts(reader, "digits.pt", torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    page = (START / "existing-clients.md").read_text()
    reader.read(section(page, "Lightning"), {"/srv/digits": "data/a", "rounds = 20": "rounds = 2"})


@pytest.mark.full
def test_a_model_of_transformers_is_rehearsed_and_takes_part(reader: Reader) -> None:
    pytest.importorskip("transformers", reason="needs fedpareto[examples]")
    reader.begin("hospital-a")
    (reader.directory / "hospital-a").rename(reader.directory / WORKER)
    tokens = torch.randint(8, 50, (900, 12), generator=torch.Generator().manual_seed(0))
    put_parts(reader, "notes.pt", tokens, (tokens[:, 0] < 20).long())
    page = (START / "existing-clients.md").read_text()
    reader.read(section(page, "Transformers"), {"/srv/notes": "data/a", "rounds = 20": "rounds = 2"})


@pytest.mark.full
def test_a_flower_app_takes_part(reader: Reader) -> None:
    program = ROOT / ".venv-flower/bin/fedpareto"
    if not program.exists():
        pytest.skip("Flower is not installed: `make test-full` installs it into .venv-flower")
    reader.begin("hospital-a")
    (reader.directory / "hospital-a").rename(reader.directory / WORKER)
    reader.skipped = ("python3 -m venv", "flower/bin/pip")  # .venv-flower is such an environment
    page = (START / "existing-clients.md").read_text()
    reader.read(section(page, "Flower"), {"=flower/bin/fedpareto": f"={program}", "rounds = 20": "rounds = 2"})
    reader.enter("fedpareto admin submit run.toml --code docs/examples --watch")
