"""`fedpareto data show`: what clients would hold, as a table, as JSON and as a chart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from federation.tasks import DataSource, Part, Pool, Splits, Task, task
from federation.tasks.census import Census, census
from federation.tasks.partition import deal
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.main import app
from fedpareto.cli.show import shares
from fedpareto.experiments import plots
from tests.fedpareto.cli.scene import shown
from tests.paths import DOCS


def show(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["data", "show", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert "--json" in arguments or max(map(len, result.stdout.splitlines())) <= 100
    return result.stdout


def test_the_table_counts_what_rehearsing_workers_load() -> None:
    lines = show("digits", "--clients", "4", "--partition", "shards:2", "--seed", "3").splitlines()
    assert lines[0].split() == ["client", "train", "validation", "test", "classes", *map(str, range(10))]
    for index, line in enumerate(lines[1:5]):
        own = task("digits").load(DataSource(part=Part(index, 4, "shards:2", 3)))
        held = torch.cat([own.train.y, own.validation.y, own.test.y]).bincount(minlength=10).tolist()
        sizes = [len(own.train), len(own.validation), len(own.test)]
        numbers = [f"client-00{index}", *sizes, sum(count > 0 for count in held), *held]
        assert line.replace("·", "0").split() == list(map(str, numbers))
    assert " ".join(lines[5:]).startswith(" 4 clients, 1,797 samples: 448 to 450 (median 449.5) each;")


def test_the_documented_table_is_the_one_that_is_printed() -> None:
    page = (DOCS / "research/simulation.md").read_text()
    block = page.split("```console\n$ fedpareto data show ")[1].split("```")[0]
    command, _, table = block.partition("\n")
    assert [line.rstrip() for line in show(*command.split()).splitlines()] == table.splitlines()


def test_many_clients_are_summarised_after_the_first() -> None:
    lines = show("digits", "--clients", "30", "--partition", "dirichlet:0.1", "--sizes", "lognormal:1").splitlines()
    names = [line.split()[0] for line in lines[1:25]]
    assert names == [*(f"client-{number:03d}" for number in range(20)), "…", "least", "median", "most"]
    found = census(task("digits"), DataSource(), Part(0, 30, "dirichlet:0.1", 0, "lognormal:1"))
    for name, number in (("least", found.sizes.min(axis=0)), ("most", found.sizes.max(axis=0))):
        line = next(line for line in lines if line.startswith(name))
        assert line.split()[1:4] == [str(size) for size in number]


def test_json_has_every_client_and_its_classes() -> None:
    document = json.loads(show("digits", "--clients", "30", "--partition", "dirichlet:0.1", "--json"))
    assert [client["client"] for client in document["clients"]] == [f"client-{number:03d}" for number in range(30)]
    for client in document["clients"]:
        assert sum(client["classes"].values()) == client["train"] + client["validation"] + client["test"]
    assert sum(sum(client["classes"].values()) for client in document["clients"]) == document["samples"] == 1797
    assert 0.5 < document["heterogeneity"] < 0.9


@pytest.mark.full
def test_a_chart_is_drawn_for_clients_and_classes_of_any_number(tmp_path: Path) -> None:
    show("digits", "--clients", "5", "--plot", str(tmp_path / "few.png"))
    assert (tmp_path / "few.png").read_bytes().startswith(b"\x89PNG")
    counts = np.arange(50 * 70).reshape(50, 70)
    many = Census(np.full((50, 3), 10), np.arange(70), counts[:, None])
    plots.draw_census(many, [str(number) for number in range(50)], "many", tmp_path / "many.png")
    assert (tmp_path / "many.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CommandFailure, match="cannot draw"):
        show("digits", "--plot", str(tmp_path / "nowhere" / "few.png"))


def test_a_chart_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpareto.cli.failure.find_spec", lambda name: None if name == "matplotlib" else name)
    with pytest.raises(CommandFailure, match=r"fedpareto\[experiments\]"):
        show("digits", "--plot", "few.png")


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (("digits", "--partition", "shards"), "unknown scheme", USAGE),
        (("digits", "--sizes", "huge"), "unknown sizes", USAGE),
        (("digits", "--partition", "natural"), "no natural owners", 1),
        (("digits", "--clients", "2000"), "1797 samples", 1),
        (("dogits",), "no task 'dogits'", USAGE),
        (("mnist",), "--data DIR", 1),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(arguments: tuple[str, ...], says: str, code: int) -> None:
    with pytest.raises(CommandFailure, match=says, check=lambda error: error.code == code):
        show(*arguments)


class Pairs(Task):
    """Two labels a sample; a hundred classes together, ten owners."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 10)

    def losses(self, output: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(output, y[:, 0])}

    def correct(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return output.argmax(dim=1) == y[:, 0]

    def pool(self, source: DataSource) -> Pool:
        pairs = np.arange(2000) % 100
        y = torch.from_numpy(np.stack([pairs // 10, pairs % 10], axis=1))
        names = tuple(f"owner {number} of a rather long name" for number in range(10))
        return Pool(torch.zeros(2000, 3), y, labels=pairs, owners=names, owner=pairs // 10)


class Alone(Pairs):
    """Says how one client's part is loaded, and nothing else; its targets are no classes."""

    pool = Task.pool

    def load(self, source: DataSource) -> Splits:
        return deal(Pairs().pool(source), source.part)


def test_many_classes_are_shades_and_owners_have_their_names() -> None:
    lines = show("tests.fedpareto.cli.test_data_show:Pairs", "--partition", "natural").splitlines()
    assert lines[0].split() == ["client", "train", "validation", "test", "classes", "0", "99"]
    assert [line[:8] for line in lines[1:11]] == [f"owner {number} " for number in range(10)]
    assert lines[1].split()[-1] == "███▒" + "·" * 30  # three a character: 9 classes, and the tenth with two others
    assert lines[11] == "A character stands for 3 classes."
    assert "10 of 100 classes each; heterogeneity 0.900" in " ".join(" ".join(lines).split())
    clients = json.loads(show("tests.fedpareto.cli.test_data_show:Pairs", "--partition", "natural", "--json"))[
        "clients"
    ]
    assert clients[3]["owner"] == "owner 3 of a rather long name"
    assert clients[3]["classes"] == {str(label): 20 for label in range(30, 40)}


def test_a_task_without_classes_is_counted_without_them() -> None:
    found = census(Alone(), DataSource(), Part(0, 7))
    dealt = [Alone().load(DataSource(part=Part(index, 7))) for index in range(7)]
    assert found.sizes.tolist() == [[len(own.train), len(own.validation), len(own.test)] for own in dealt]
    assert json.loads(show("tests.fedpareto.cli.test_data_show:Alone", "--json"))["heterogeneity"] is None
    assert "class" not in show("tests.fedpareto.cli.test_data_show:Alone")


def test_heterogeneity_is_the_mean_total_variation_from_everybody_together() -> None:
    counts = np.array([[4, 0], [1, 3]])  # together 5/8 and 3/8
    assert Census(np.zeros((2, 3), np.int64), np.arange(2), counts[:, None]).heterogeneity == pytest.approx(
        (3 / 8 + 3 / 8) / 2
    )


@pytest.mark.parametrize("classes", [1, 7, 13, 62, 500])
@pytest.mark.parametrize("most", [1, 999, 10**6])
def test_a_table_of_any_size_fits_a_hundred_columns(classes: int, most: int) -> None:
    counts = np.full((30, classes), most)
    sizes = np.stack([counts.sum(axis=1)] * 3, axis=1)
    lines = shown(shares.table(Census(sizes, np.arange(classes), counts[:, None]), ["x" * 40] * 30)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 1 + 20 + 1 + 3 + 1  # none is folded
    assert "validation" in lines[0]


class Scanned(Task):
    """Two images of each patient; one patient of twenty is ill."""

    def pool(self, source: DataSource) -> Pool:
        patients = np.arange(200) // 2
        ill = torch.from_numpy(patients % 20 == 0).long()
        stratify = source.directory is None
        return Pool(torch.zeros(200, 1), ill, groups=patients if stratify else None, stratify=stratify)


def test_the_classes_that_a_split_lacks_are_named_and_whether_rows_count_as_independent() -> None:
    plain, kept = (census(Scanned(), DataSource(path), Part(0, 1)) for path in (Path("plain"), None))
    assert [list(shares.remarks(each, ["client-000"])) for each in (plain, kept)] == [
        [
            "1 client holds a class that a split lacks, so its metrics know nothing of it. client-000: test lacks 1. "
            "Pool(stratify=True) gives each split a sample of each class if possible.",
            "Rows count as independent: the pool names no groups. If a person has several rows, Pool(groups=...) keeps "
            "them in one split, and with one client.",
        ],
        [],
    ]
    assert next(iter(shares.document(plain, ["client-000"])))["lacking"] == {"test": ["1"]}
    shown_by_json = json.loads(show("digits", "--clients", "2", "--json"))
    assert (shown_by_json["groups"], shown_by_json["stratified"]) == (False, False)
