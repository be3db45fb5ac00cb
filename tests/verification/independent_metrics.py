"""The metrics of a bundle's rounds, computed from docs/reference/metrics.md, with NumPy and the independent verifier's
reader of bundles. Nothing is imported from the code that computes or checks metrics.

Not computed are numbers that only the coordinator measures, and those that need the algorithm: its own measurements,
and the entropy, `private/rule_share` and the objectives' metrics where they do not follow from the signed coefficients.
"""

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from federation.v1 import common_pb2
from tests.paths import DOCS
from tests.verification.independent_evaluation import SPLITS, Numbers, of_private_model
from tests.verification.independent_rules import divergence, entropy, lower_median, of_weights, scheduled, spent
from tests.verification.independent_verifier import File, drawn_rows, must, name_of, step_of

ROUNDED = -1e-9  # a cosine that is not below counts as none against the direction
LISTED = {*re.findall(r"^\| `(.*?)` \|", (DOCS / "reference/metrics.md").read_text(), re.M)}
NOT_COMPUTED = re.compile(
    r"bytes/down|iterations|residual|required/missing|backdoor|entropy|objective/.*|private/rule_share"
)
OF_DIRECTIONS = {"direction_norm", "descent_min", "descent_share", "stationary"}  # some rules need not measure them


@dataclass(frozen=True)
class Reply:
    """An accepted reply with its assignment."""

    digest: str
    said: Any
    order: Any

    @property
    def name(self) -> str:
        return str(self.said.client_id)

    def number(self, key: str) -> float | None:
        """A measurement; an accuracy outside [0, 1] is none."""
        value: float | None = self.said.metrics.get(key)
        is_share = value is None or key.split("/")[1] != "accuracy" or 0 <= value <= 1
        return value if is_share else None

    def samples(self, split: str) -> float:
        return max(float(self.said.metrics.get(f"{split}/samples", 0.0)), 0.0)


@dataclass
class Round:
    """The replies that the step depends on, those that measure the new model, and what all replies have sent."""

    deciding: list[Reply] = field(default_factory=list)
    measuring: list[Reply] = field(default_factory=list)
    sent: Numbers = field(default_factory=lambda: {"bytes/up": 0.0, "bytes/refused": 0.0})


def opened(record: Any) -> Round:
    """The replies of a round, by their phases."""
    found = Round()
    for phase in record.phases:
        for exchange in phase.exchanges:
            order = common_pb2.AssignmentManifest.FromString(exchange.assignment.manifest)
            for answer in exchange.answers:
                if not answer.HasField("receipt"):
                    continue
                said = common_pb2.ReplyManifest.FromString(answer.reply.manifest)
                accepted = common_pb2.ReceiptManifest.FromString(answer.receipt.manifest).accepted
                found.sent["bytes/up"] += said.payload_bytes
                found.sent["bytes/refused"] += 0 if accepted else said.payload_bytes
                reply = Reply(name_of(answer.reply), said, order)
                if accepted and not phase.decides:
                    found.measuring.append(reply)
                elif accepted and phase.attempt == record.attempt:
                    found.deciding.append(reply)
    return found


# --- the step


def shortest(K: np.ndarray) -> float:
    """The length of the shortest vector in the convex hull: of the shortest in the affine hull of each subset."""
    best = float(np.diag(K).min(initial=np.inf))
    for size in range(2, len(K) + 1):
        for some in map(list, itertools.combinations(range(len(K)), size)):
            system = np.block([[K[np.ix_(some, some)], np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            weights = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0][:size]
            if weights.min() >= -1e-12:
                best = min(best, float(weights @ K[np.ix_(some, some)] @ weights))
    return math.sqrt(max(best, 0.0))


def conflicts(K: np.ndarray, prefix: str) -> Numbers:
    lengths = np.sqrt(np.diag(K))
    pairs = [(i, j) for j in range(len(K)) for i in range(j) if K[i, j] < 0]
    cosines = [K[i, j] / (lengths[i] * lengths[j]) for i, j in pairs]
    return {
        f"{prefix}conflicts": len(pairs),
        f"{prefix}conflict_depth": min(cosines, default=0.0),
        f"{prefix}conflict_mean": float(np.mean(cosines)) if cosines else 0.0,
    }


def direction(products: np.ndarray, norm: float, lengths: np.ndarray) -> Numbers:
    """The length of d, and its cosines with the updates of this round that are not zero."""
    cosines = [
        product / (one * norm) if norm else 0.0 for product, one in zip(products, lengths, strict=True) if one > 0
    ]
    not_against = [cosine >= ROUNDED for cosine in cosines]
    return {
        "direction_norm": norm,
        "descent_min": min(cosines, default=1.0),
        "descent_share": float(np.mean(not_against)) if cosines else 1.0,
    }


def by_coordinates(file: File, replies: Sequence[Reply]) -> np.ndarray | None:
    """The direction of a median or a trimmed mean, if the bundle has the updates."""
    rows = [file.rows(reply.said.payload) for reply in replies]
    algorithm = file.run["algorithm"]
    if any(row is None for row in rows) or algorithm["name"] not in ("median", "trimmed-mean") or "pre" in algorithm:
        return None
    assert not set(algorithm) - {"name", "prior", "byzantine"}, f"not computed here: {algorithm}"
    values = np.sort([row for several in rows for row in several or ()], axis=0)
    trim = algorithm.get("byzantine", 0) if algorithm["name"] == "trimmed-mean" else (len(values) - 1) // 2
    mean: np.ndarray = values[trim : len(values) - trim].mean(axis=0)
    return mean


def rate_of(file: File, step: Any) -> Numbers:
    """The rate of the schedule; a line search chooses a factor of it. With "auto" see `of_step`."""
    rate = scheduled(file.run, step.round)
    if not step.rate or file.run["algorithm"]["name"] == "fedmdfg":
        return {"step/rate": step.rate or rate}  # without a direction, nothing moves
    must(math.isclose(step.rate, rate, rel_tol=1e-12), f"the rate is {step.rate!r}, not {rate!r}")
    return {"step/rate": rate}


def bounded(file: File, step: Any, lengths: Sequence[float], direction: float) -> Numbers:
    """The rate of "auto": no step is longer than the lower median of the members' lengths."""
    bound = min(1.0, lower_median(lengths) / direction) if direction else 1.0
    return {"step/rate": scheduled(file.run, step.round) * bound}


def of_step(file: File, step: Any, replies: Sequence[Reply], steps: int) -> Numbers:
    """The metrics of a step, and how K and the signed step give them; `steps` counts those so far."""
    server, privacy = file.run.get("server", {}), file.run.get("privacy", {})
    found: Numbers = {}
    epsilons = [reply.said.privacy.epsilon for reply in replies if reply.said.privacy.epsilon]
    if epsilons:
        found["epsilon/samples"] = max(epsilons)
    if server.get("learning_rate") != "auto":
        found |= rate_of(file, step)
    if privacy.get("client_noise"):
        return found | {"epsilon/clients": spent(privacy, steps)}
    built_in = ":" not in step.code[0].class_name  # a rule of another package need not measure its direction
    if built_in:
        found["stationary"] = float(not step.rate and step.result_model == step.base_model)
    if len(file.objectives) > 1:
        found |= {f"weight/{part.objective}": part.weight for part in step.weights}
    if privacy.get("secure", "off") != "off":
        rows = file.rows(step.combined)
        last = step.secure[-1]
        found |= {"private/members": len(last.survivors), "private/blur": privacy.get("blur", 1.0)}
        if file.run["algorithm"]["name"].startswith("fedavg"):  # plain averaging, also after dropouts
            found |= {"entropy": entropy(np.array(last.coefficients)), "private/rule_share": 1.0}
        if rows is not None:
            found["direction_norm"] = float(np.linalg.norm(rows[0]))
            if server.get("learning_rate") == "auto":
                shown = {reply.name: reply.said.metrics["norm"] for reply in replies if "norm" in reply.said.metrics}
                found |= bounded(file, step, [shown[name] for name in last.survivors], found["direction_norm"])
        return found
    by_digest = {reply.digest: reply for reply in replies}
    named = [by_digest[one] for one in step.replies if one in by_digest]
    own = [row.name for reply in named for row in reply.said.rows if row.name != "buffers"]
    gram = file.blob(step.gram)
    must(gram is not None, "the bundle has no K")
    K, c = np.load(io.BytesIO(gram or b""), allow_pickle=False), np.array(step.coefficients)
    drawn = drawn_rows(file.run, step, len(own))
    must(len(K) == len(drawn) if drawn else len(K) >= len(own), "the rows of K")
    updates = K[: len(own), : len(own)]
    found |= conflicts(updates, "")
    if len(updates) <= 12:  # each subset is tried
        longest = math.sqrt(float(np.diag(updates).max(initial=0.0)))
        found["stationarity"] = shortest(updates)
        found["stationarity/relative"] = found["stationarity"] / longest if longest else 0.0
    lengths = np.sqrt(np.array(step.squared_norms) if drawn else np.diag(updates))
    if server.get("learning_rate") == "auto":
        d = math.sqrt(max(c @ K @ c, 0.0))
        ends = np.cumsum([sum(row.name != "buffers" for row in reply.said.rows) for reply in named])
        found |= bounded(file, step, [lower_median(one) for one in np.split(lengths, ends[:-1]) if len(one)], d)
    if not built_in:
        pass
    elif drawn and len(c):
        U = np.array([row for reply in named for row in file.rows(reply.said.payload) or ()])
        if len(U):
            found |= direction(U @ (c @ U), float(np.linalg.norm(c @ U)), lengths)
    elif len(c) == len(K) and len(c):
        found |= direction((K @ c)[: len(own)], math.sqrt(max(c @ K @ c, 0.0)), lengths)
    elif (middle_of := by_coordinates(file, named)) is not None:
        U = np.array([row for reply in named for row in file.rows(reply.said.payload) or ()])
        found |= direction(U @ middle_of, float(np.linalg.norm(middle_of)), lengths)
    if built_in and len(c) == len(own) == (len(own) if drawn else len(K)):
        found |= of_weights(file.run["algorithm"], c, lengths)
    if file.run["algorithm"]["name"] == "fedcmoo-pref":
        names = [part.objective for part in step.weights]
        claims = {name: claimed(replies, name) for name in names}
        losses = {name: sum(values) / len(values) for name, values in claims.items()}
        found["preference/divergence"] = divergence(file.run["algorithm"], file.objectives, losses)
    if file.run["algorithm"]["name"] == "fsmgda" and not file.run["algorithm"].get("prior"):
        # lambda' G lambda, for G of the objectives' averaged updates, each over the members that sent one
        names = [part.objective for part in step.weights]
        average = np.array([[(one == name) / max(own.count(name), 1) for one in own] for name in names])
        G, weights = average @ updates @ average.T, np.array([part.weight for part in step.weights])
        found["objective/stationarity"] = math.sqrt(max(weights @ G @ weights, 0.0))
        found |= conflicts(G, "objective/")
    return found


def claimed(replies: Iterable[Reply], objective: str) -> list[float]:
    """The losses of the model before that members claim of an objective, one of each member: its first."""
    by_member: dict[str, float] = {}
    for reply in serving(replies, objective):
        if objective in reply.said.losses:
            by_member.setdefault(reply.name, reply.said.losses[objective])
    return [*by_member.values()]


# --- the model


def spread(values: Sequence[float]) -> Numbers:
    """Mean, spread and tails of the members' accuracies."""
    a = np.sort(np.array(values))
    tail, mean = max(len(a) * 5 // 100, 1), a.sum() / len(a)
    variance = ((a - mean) ** 2).sum() / len(a)

    def percentile(p: float) -> float:
        place = p * (len(a) - 1)
        low = math.floor(place)
        return float(a[low] + (place - low) * (a[min(low + 1, len(a) - 1)] - a[low]))

    return {
        "mean": mean,
        "variance": variance,
        "std": math.sqrt(variance),
        "worst": a[0],
        "best": a[-1],
        "worst5": a[:tail].sum() / tail,
        "best5": a[len(a) - tail :].sum() / tail,
        "p5": percentile(0.05),
        "p95": percentile(0.95),
        "jain": jain(values),
    }


def jain(values: Sequence[float]) -> float:
    squares = len(values) * sum(value**2 for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def weighted(pairs: Sequence[tuple[float, float]]) -> Numbers:
    """The mean weighted by samples; none without samples."""
    total = sum(samples for _, samples in pairs)
    return {"weighted": sum(value * samples for value, samples in pairs) / total} if total else {}


def told(replies: Iterable[Reply], key: str) -> list[float]:
    return [value for reply in replies if (value := reply.number(key)) is not None]


def serving(replies: Iterable[Reply], objective: str) -> list[Reply]:
    return [reply for reply in replies if objective in reply.order.objectives]


def of_model(file: File, replies: Sequence[Reply], before: Sequence[Reply]) -> Numbers:
    """The metrics of a model that members have measured in the clear."""
    found: Numbers = {"evaluated": len(replies)}
    several = file.objectives if len(file.objectives) > 1 else []
    split = next((one for one in SPLITS if told(replies, f"{one}/accuracy")), "")
    if split:
        key = f"{split}/accuracy"
        claimed = [reply for reply in replies if reply.number(key) is not None]
        found |= {f"accuracy/{name}": value for name, value in spread(told(replies, key)).items()}
        pairs = [(reply.number(key) or 0.0, reply.samples(split)) for reply in claimed]
        found |= {f"accuracy/{name}": value for name, value in weighted(pairs).items()}
        for name in several:
            if values := told(serving(replies, name), f"{key}/{name}"):
                found[f"accuracy/objective/{name}"] = sum(values) / len(values)
    losses = {one: told(replies, f"{one}/loss") for one in SPLITS}
    found |= {f"loss/{one}": sum(values) / len(values) for one, values in losses.items() if values}
    for name, one in itertools.product(several, SPLITS):
        if values := told(serving(replies, name), f"{one}/loss/{name}"):
            found[f"loss/{one}/{name}"] = sum(values) / len(values)
    first = next((values for values in losses.values() if values), [])
    if first and not split:
        found |= {"loss/worst": max(first), "loss/jain": jain(first)}
    for metric in file.about.metrics:
        found |= of_metric(replies, metric)
    if file.run.get("algorithm", {}).get("name") != "afl":
        found |= improved(replies, before)
    return found


def of_metric(replies: Sequence[Reply], metric: Any) -> Numbers:
    """The metrics of one of the task's own, on the first split that was measured."""
    for split in SPLITS:
        whole = f"{split}/{metric.name}"
        keys = sorted({key for reply in replies for key in reply.said.metrics if (key + "/").startswith(whole + "/")})
        found: Numbers = {}
        for key in keys:
            pairs = [(reply.said.metrics[key], reply.samples(split)) for reply in replies if key in reply.said.metrics]
            values, name = [value for value, _ in pairs], f"metric/{key.removeprefix(f'{split}/')}"
            ends = (min(values), max(values)) if metric.better == "higher" else (max(values), min(values))
            found |= {f"{name}/mean": sum(values) / len(values), f"{name}/worst": ends[0], f"{name}/best": ends[1]}
            found |= {f"{name}/{of}": value for of, value in weighted(pairs).items()}
        if found:
            return found
    return {}


def improved(replies: Iterable[Reply], before: Iterable[Reply]) -> Numbers:
    """The share of the participants whose training loss did not rise."""
    old = {reply.name: reply.said.metrics["train/loss"] for reply in before if "train/loss" in reply.said.metrics}
    new = {
        reply.name: reply.said.metrics.get("train/loss", math.inf)
        for reply in replies
        if "train/loss" in reply.said.metrics or reply.samples("train")
    }
    both = [math.isfinite(new[name]) and new[name] <= old[name] for name in old if name in new]
    return {"improved": sum(both) / len(both)} if both else {}


# --- a run


@dataclass
class Stopping:
    """The value by which a run is stopped, over its rounds."""

    stop: Mapping[str, Any]
    higher: bool
    values: list[float] = field(default_factory=list)

    def after(self, measured: Sequence[tuple[float, float]]) -> Numbers:
        """The metrics after a round whose members measured these values with so many samples."""
        values = [value for value, _ in measured]
        if not values:
            return {}
        of = self.stop.get("of", "mean")
        value = {
            "mean": sum(values) / len(values),
            "worst": min(values) if self.higher else max(values),
            "weighted": weighted(measured).get("weighted", math.nan),
        }[of]
        if not math.isfinite(value):
            return {}
        self.values.append(value)
        signed = [one if self.higher else -one for one in self.values]
        bar, since = signed[0], 0
        for one in signed[1:]:
            better = one > bar + self.stop.get("improvement", 0.0)
            bar, since = (one, 0) if better else (bar, since + 1)
        return {"stop/value": value, "stop/best": max(signed) * (1 if self.higher else -1), "stop/since": since}


def rounds(path: Path) -> Iterator[tuple[dict[str, float], list[Numbers], bool]]:
    """Of each round: the metrics on record, the possible ones by the page, and whether no other may be there."""
    file = File(path)
    stop, privacy = file.run.get("stop", {}), file.run.get("privacy", {})
    better = {metric.name: metric.better for metric in file.about.metrics} | {"accuracy": "higher", "loss": "lower"}
    kept = Stopping(stop, better.get(stop.get("metric", "").partition("/")[0]) == "higher")
    hidden = privacy.get("secure", "off") != "off" and "evaluation" not in privacy.get("disclose", ())
    splits = file.run.get("evaluate", {}).get("splits", ["train", "validation", "test"])
    revoked = {entry.subject for entry in file.log.entries if entry.action == "client.revoked"}
    steps = 0
    for record in file.rounds:
        steps += record.HasField("step")
        found, recorded = opened(record), dict(record.metrics)
        last = record.number == file.about.rounds - 1 and file.about.state in ("STOPPED", "FAILED")
        if last and "bytes/up" not in recorded:  # the run ended within the round
            found.sent, found.measuring = {}, []
        if record.HasField("step"):
            of_all = of_step(file, step_of(record), found.deciding, steps) | found.sent
        elif file.run.get("kind") == "evaluate" and record.state == "COMPLETED":
            of_all = found.sent
        else:
            yield recorded, [found.sent], True
            continue
        if not found.measuring:
            yield recorded, [of_all], True
        elif hidden:
            measured = of_private_model(file, found.measuring, splits)
            yield recorded, [of_all | measured], privacy["secure"] == "sum" and not stop
        else:
            key = f"{stop.get('split', 'validation')}/{stop.get('metric', '')}"
            possible = []
            for gone in {frozenset[str](), frozenset(revoked)}:
                counted = [reply for reply in found.measuring if reply.name not in gone]
                values = [(reply.number(key), reply.samples(key.partition("/")[0])) for reply in counted]
                told_values = [(value, samples) for value, samples in values if value is not None]
                stops = kept.after(told_values) if stop else {}
                possible.append(of_all | of_model(file, counted, found.deciding) | stops)
            yield recorded, possible, True


def problems(recorded: Mapping[str, float], expected: Mapping[str, float]) -> Iterator[str]:
    """The differences between the metrics on record and those of the page."""
    for name, value in expected.items():
        if math.isfinite(value) and not math.isclose(recorded.get(name, math.nan), value, rel_tol=1e-6, abs_tol=1e-8):
            yield f"{name} is {recorded.get(name)}, not {value}"


def check(path: Path) -> set[str]:
    """Compares the metrics of a bundle with those of the page. Returns the names that were compared.

    Raises Wrong: a metric has another value, is missing, or is on record and nothing gives it.
    """
    compared: set[str] = set()
    for number, (recorded, possible, complete) in enumerate(rounds(path)):
        differences = [[*problems(recorded, one)] for one in possible]
        must(min(map(len, differences)) == 0, f"round {number}: {min(differences, key=len)}")
        expected = possible[[len(one) for one in differences].index(0)]
        compared |= {*expected}
        for name in {*recorded} & LISTED if complete else ():
            known = name in expected or NOT_COMPUTED.fullmatch(name) or name in OF_DIRECTIONS
            must(known, f"round {number}: nothing gives {name}")
    return compared
