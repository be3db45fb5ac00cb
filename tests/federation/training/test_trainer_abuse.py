"""External trainers that write what no trainer should: each order is declined with a reason, and the worker goes on."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from federation.spec.train_section import LocalSgd
from federation.training import TrainingStopped
from federation.training.external import ExternalTrainer
from federation.training.reasons import reason_of
from tests.federation.training.scene import Start, starting
from tests.few import few_of
from tests.harness import wait_for
from tests.trained import train

BASE = np.zeros(3, dtype=np.float32)
SGD = LocalSgd(epochs=1, batch_size=0, learning_rate=1.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from starting(tmp_path)


def trained(trainer: ExternalTrainer, stopped: Callable[[], bool] = lambda: False) -> list[float]:
    shares: list[float] = []
    train(trainer, BASE, SGD, measure=False, progress=shares.append, stopped=stopped)
    return shares


def reason(act: Callable[[], object]) -> str:
    """The reason of the decline; empty where nothing failed."""
    try:
        act()
    except Exception as error:  # which of them is what the test asks
        str(error).encode()  # a decline is sent
        return reason_of(error) or repr(error)
    return ""


# --- floods


def test_a_process_that_writes_between_orders_is_blocked_and_does_not_grow_the_worker(
    start: Start, tmp_path: Path
) -> None:
    written = tmp_path / "written"
    written.write_text("0")
    trainer = start(f"""
answer()
for count in range(200 if kind == "evaluate" else 0):
    say(bytes(12), type="progress", id=id, share=0.5, words="x" * 100_000)
    open({str(written)!r}, "w").write(str(count))
""")
    trainer.measure(BASE, ("train",))
    assert trainer._process is not None
    child = psutil.Process(trainer._process.popen.pid)
    wait_for(lambda: int(written.read_text() or 0) and child.status() == psutil.STATUS_SLEEPING, "a full pipe")
    assert int(written.read_text()) < 10
    assert trained(trainer) == []


@pytest.mark.parametrize("id_", few_of(["id - 1", "'other'", "None", "[]", "float('nan')"], "id - 1"))
def test_messages_of_other_orders_do_not_postpone_the_end_of_a_silent_process(start: Start, id_: str) -> None:
    trainer = start(f"while True: say(type='progress', id={id_}, share=0.5)", silence=0.2)
    assert reason(lambda: trained(trainer)) == "trainer:silent"


def test_a_process_that_floods_its_progress_after_a_stop_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("federation.training.external._GRACE_SECONDS", 0.2)
    trainer = start("while True: say(type='progress', id=id, share=0.5)")
    with pytest.raises(TrainingStopped):
        trained(trainer, stopped=lambda: True)


# --- each field of each message

DEEP = "[" * 100_000 + "]" * 100_000
VALUES = {
    "huge": "1" + "0" * 400,
    "endless": "1" * 5000,
    "negative": "-1",
    "large": str(2**63),
    "nan": "NaN",
    "infinity": "Infinity",
    "overflow": "1e400",
    "true": "true",
    "null": "null",
    "text": '"x"',
    "surrogate": r'"\ud800"',
    "list": "[1]",
    "nested": "[" * 900 + "]" * 900,
    "deep": DEEP,
    "object": '{"a": {"a": 1}}',
}
MESSAGES: dict[str, dict[str, str]] = {
    "progress": {"id": "ID", "share": "0.5"},
    "model": {"id": "ID", "bytes": "12"},
    "scores": {"id": "ID", "scores": '{"loss": 1.0}'},
    "score": {"id": "ID", "scores": '{"loss": VALUE}'},
    "diverged": {"id": "ID", "step": "3"},
    "error": {"id": "ID", "message": '"x"', "reason": '"no-data"', "ends": "true"},
    "stopped": {"id": "ID"},
}
READIES = {"id": "0", "samples": '{"train": 10}', "abilities": '["repeatable"]', "device": '"cpu"', "bytes": "0"}
MISSING = "missing"
KNOWN = {
    *("", "trainer:protocol", "trainer:result", "trainer:error", "trainer:silent", "training-diverged", "no-data"),
    *("trainer:died", "x"),
}


def line(kind: str, fields: dict[str, str], field: str, value: str) -> str:
    """A message, as Python source of bytes, with another value of a field."""
    kind_text = value if field == "type" else json.dumps("scores" if kind == "score" else kind)
    texts = {"type": kind_text, **fields}
    if field == "score":
        texts["scores"] = texts["scores"].replace("VALUE", value)
    elif field != "type":
        texts[field] = value
    if value == MISSING:
        del texts["scores" if field == "score" else field]
    return "{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}"


CASES = [
    (kind, field, name)
    for kind, fields in MESSAGES.items()
    for field in ("type", *(("score",) if kind == "score" else fields))
    for name in (*VALUES, MISSING)
    if not (kind == "score" and field == "type")
]
FEW = (
    *(("score", "score", "huge"), ("progress", "share", "huge"), ("error", "message", "surrogate")),
    *(("model", "bytes", "nested"), ("error", "reason", "nested"), ("diverged", "step", "huge")),
)


@pytest.mark.parametrize("case", few_of(CASES, *FEW), ids="-".join)
def test_each_value_of_each_field_gives_a_known_reason_and_the_next_order_is_done(
    start: Start, tmp_path: Path, case: tuple[str, str, str]
) -> None:
    kind, field, name = case
    mark, text = tmp_path / "mark", line(kind, MESSAGES[kind], field, VALUES.get(name, MISSING))
    (tmp_path / "line").write_text(text)
    asked = "evaluate" if kind in ("scores", "score") else "train"
    trainer = start(
        f"""
if kind == {asked!r} and not os.path.exists({str(mark)!r}):
    open({str(mark)!r}, "w").close()
    text = open({str(tmp_path / "line")!r}).read().replace('"ID"', "ID").replace("ID", str(id))
    write(text.encode() + b"\\n")
    write(bytes(12)) if '"bytes": 12' in text else None
    if {kind!r} in ("progress", "stopped") or {field!r} == "id": answer()
else:
    answer()
""",
        silence=2.0,
    )
    acts = {"evaluate": lambda: trainer.measure(BASE, ("train",)), "train": lambda: trained(trainer)}
    found = reason(acts[asked])
    assert found in KNOWN, found
    if kind == "score":
        accepted = {"negative", "large", "nan", "infinity", "overflow", "null"}
        assert (found == "") == (name in accepted)
    assert reason(acts["train"]) == ""


def test_the_share_of_a_progress_is_a_share(start: Start) -> None:
    trainer = start(
        "for share in (0.25, float('nan'), float('inf'), -1, True, 'x'): say(type='progress', id=id, share=share)\n"
        "answer()"
    )
    assert trained(trainer) == [0.25, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "case",
    few_of(
        [(field, name) for field in ("type", *READIES) for name in (*VALUES, MISSING)],
        ("abilities", "nested"),
        ("device", "surrogate"),
    ),
    ids="-".join,
)
def test_each_value_of_each_field_of_ready_is_taken_or_refused_in_words(
    start: Start, tmp_path: Path, case: tuple[str, str]
) -> None:
    field, name = case
    (tmp_path / "line").write_text(line("ready", READIES, field, VALUES.get(name, MISSING)))
    ready = f"write(open({str(tmp_path / 'line')!r}).read().encode() + b'\\n')"
    made: list[ExternalTrainer] = []
    found = reason(lambda: made.append(start("answer()", ready=ready, silence=1.0)))
    assert found in ("", "trainer:protocol", "trainer:silent")
    if made:
        assert 0 <= made[0].samples <= 2**53
        made[0].device.encode()


@pytest.mark.parametrize(
    "samples", few_of(["10 ** 400", "2 ** 53 + 1", "-1", "1.5", "True", "None", "'x'", "[]"], "2 ** 53 + 1", "True")
)
def test_a_number_of_samples_that_cannot_be_is_refused(start: Start, samples: str) -> None:
    ready = f"say(type='ready', id=0, samples={{'train': {samples}}})"
    assert reason(lambda: start("answer()", ready=ready)) == "trainer:protocol"


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ("write(b'\\xff\\xfe{}\\n')", "trainer:protocol"),
        ("write(b'{\"type\": \"model\", \"id\": \"\\xed\\xa0\\x80\"}\\n')", "trainer:protocol"),
        ("write('{\"type\": \"model\"}\\n'.encode('utf-16'))", "trainer:protocol"),
        ("write(b'\\n')", "trainer:protocol"),
        ("write(b'x' * (1 << 20))", "trainer:protocol"),
        ("write(b' ' * (1 << 21) + b'\\n')", "trainer:protocol"),
        pytest.param(
            "for _ in range(1 << 10): write(b'x' * (1 << 20))", "trainer:protocol", marks=pytest.mark.full
        ),
    ],
)  # fmt: skip
def test_bytes_that_are_no_message_end_the_process(start: Start, writes: str, expected: str) -> None:
    assert reason(lambda: trained(start(writes))) == expected


def test_a_score_that_is_no_number_is_refused_and_one_that_is_not_finite_is_a_divergence(start: Start) -> None:
    def loss(value: Any) -> str:
        trainer = start(f"say(type='scores', id=id, scores={{'loss': {value}}}) if kind == 'evaluate' else answer()")
        return reason(lambda: train(trainer, BASE, SGD))

    values = ("10 ** 400", "'1'", "[1.0]", "True", "float('nan')", "float('inf')", "None")
    assert [loss(value) for value in values] == [
        "trainer:protocol",
        *["trainer:result"] * 3,
        *["training-diverged"] * 3,
    ]
