"""The examples of the pages for users: they are the ones in the documents, and they do what the pages say."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from coordinator.rounds.runs.specification import cautions, parse_run
from federation.tasks import DataSource, task
from federation.tasks.parameters import trainable
from fedpareto import simulate
from fedpareto.processes.forked import completed
from fedpareto.processes.process_federation import ProcessFederation
from tests.paths import DOCS, EXAMPLES
from tests.running import command

SHOWN = {  # from these words on
    "adapters.py": ("start/adapters-and-segmentation.md", "import torch"),
    "backwards.py": ("research/plugins.md", "from dataclasses"),
    "clinic.py": ("start/your-own-task.md", "import numpy"),
    "equal_length.py": ("research/plugins.md", "from dataclasses"),
    "my-experiment.toml": ("research/experiments.md", "title"),
    "progression.py": ("start/your-own-task.md", "import torch"),
    "random_signs.py": ("research/plugins.md", "from dataclasses"),
    "scikit.py": ("start/your-own-trainer.md", "import warnings"),
    "segment.py": ("start/adapters-and-segmentation.md", "def dice"),
    "use_the_model.py": ("start/first-federation.md", "import sys"),
    "worst_first.py": ("research/plugins.md", "from dataclasses"),
}

SPEC = """
name = "exported"
task = "digits"
rounds = 8
[simulation]
clients = 4
"""


def test_the_run_specification_of_the_first_federation_comes_without_a_warning() -> None:
    texts = re.findall(
        r"^```toml\n(# run\.toml\n.*?)^```$", (DOCS / "start/first-federation.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(texts) == 1
    assert cautions(*parse_run(texts[0].encode())) == ()


@pytest.mark.parametrize("name", SHOWN)
def test_the_example_on_a_page_is_the_file(name: str) -> None:
    page, begin = SHOWN[name]
    source = (EXAMPLES / name).read_text()
    assert f"{source[source.index(begin) :]}```\n" in (DOCS / page).read_text()


@pytest.mark.full
def test_an_exported_model_is_loaded_into_pytorch_as_the_page_says(tmp_path: Path) -> None:
    history = simulate(SPEC, home=tmp_path / "coordinator", threads=1)
    file = tmp_path / "model.safetensors"
    with ProcessFederation(tmp_path) as served:
        served.serve("--hold")
        assert served.admin("export", history.run_id, "--out", str(file))["file"] == str(file)
    done = completed([str(EXAMPLES / "use_the_model.py"), str(file), "digits"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    digits = task("digits")
    model, test = digits.model(), digits.load(DataSource()).test
    values = torch.from_numpy(np.array(history.model))
    torch.nn.utils.vector_to_parameters(values, [parameter for _, parameter in trainable(model)])
    right = digits.correct(model(test.x), test.y)
    assert isinstance(right, torch.Tensor)
    assert f"accuracy {right.float().mean():.3f}" in done.stdout
    assert right.float().mean() > 0.5
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
    assert sorted(names) == sorted(state) == sorted(name for name, _ in trainable(model))
    assert all(torch.equal(state[name], parameter) for name, parameter in trainable(model))


@pytest.mark.full
def test_an_experiment_is_run_from_a_file_of_ones_own(tmp_path: Path) -> None:
    file = EXAMPLES / "my-experiment.toml"
    done = command("experiment", "run", file, "--rounds", 1, "--seeds", 0, "--out", tmp_path, "--json")
    document = json.loads(done.stdout)
    assert document["experiment"] == "my-experiment"
    assert [item["method"] for item in document["results"]] == ["FedMGDA+", "FedAvg"]
    assert (tmp_path / "table.md").read_text().startswith("# FedMGDA+ beside FedAvg, four members\n\n")
