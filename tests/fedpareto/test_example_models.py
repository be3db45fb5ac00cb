"""The examples with models of other libraries, as their pages have them: adapters of a language model, and a U-Net."""

import math
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from federation.spec.run_sections import ParametersSpec
from federation.tasks import initial_model, task
from federation.tasks.parameters import build
from federation.training.own import run_model
from fedpareto import simulate
from fedpareto.simulation.history import History
from tests.paths import DOCS, EXAMPLES

PAGE = (DOCS / "start/adapters-and-segmentation.md").read_text()

needs_peft = pytest.mark.skipif(
    find_spec("peft") is None or find_spec("transformers") is None, reason="needs fedpareto[examples]"
)


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run_of(example: str) -> str:
    """The run specification of an example on the page."""
    (text,) = (
        text for text in re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if f'"{example}:' in text
    )
    return str(text)


def trained(example: str) -> History:
    return simulate(run_of(example), threads=1)


@needs_peft
@pytest.mark.full
def test_only_the_adapters_of_the_language_model_travel() -> None:
    notes = task("adapters:Notes")
    layout, vector = initial_model(notes, 0)
    names = [tensor.name for tensor in layout.tensors]
    adapters = [name for name in names if "lora_" in name]
    assert len(adapters) == 2 * 2 * 2  # A and B, of query and value, in each of two layers
    assert set(names) - set(adapters) == {
        f"adapted.base_model.model.classifier.modules_to_save.default.{part}" for part in ("weight", "bias")
    }
    assert all(tensor.shape in {(4, 32), (32, 4), (2, 32), (2,)} for tensor in layout.tensors)
    whole = sum(parameter.numel() for parameter in build(notes).parameters())
    assert f"The model has {whole:,} parameters, of which {len(vector):,} are sent" in PAGE
    assert notes.buffers() == ()


@needs_peft
@pytest.mark.full
def test_the_frozen_part_is_the_same_at_every_member() -> None:
    first, second = (build(task("adapters:Notes")).state_dict() for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)


@needs_peft
@pytest.mark.full
def test_a_personal_classifier_stays_and_the_adapters_of_a_run_are_put_into_the_model() -> None:
    document = run_of("adapters").replace("rounds = 6", "rounds = 1") + 'parameters.personal = ["*classifier*"]\n'
    notes, history = task("adapters:Notes"), simulate(document, threads=1)
    layout, _ = run_model(notes, 0, ParametersSpec(personal=("*classifier*",)))
    assert len(layout.tensors) == 2 * 2 * 2
    assert all("lora_" in tensor.name for tensor in layout.tensors)
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in layout.split(history.model).items()}
    model = build(notes)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    changed = {name for name, values in model.state_dict().items() if not torch.equal(values, before[name])}
    assert changed == {tensor.name for tensor in layout.tensors}


@needs_peft
@pytest.mark.full
def test_adapters_learn_what_the_frozen_model_does_not_know() -> None:
    assert trained("adapters").rounds["accuracy/mean"].tolist()[-1] > 0.95


@pytest.mark.full
def test_the_u_net_finds_discs_and_the_run_is_measured_by_dice() -> None:
    history = trained("segment")
    dice = history.rounds["metric/dice/mean"].tolist()
    assert dice[0] < 0.2
    assert max(dice) > 0.8
    assert "accuracy/mean" not in history.rounds or all(map(math.isnan, history.rounds["accuracy/mean"]))
