"""`fedpareto privacy plan`: the noise that a target epsilon needs, by the accountants of the ledger and of runs."""

import math
from functools import partial
from typing import Annotated, Any

import typer

from federation.spec.accounting import (
    COARSE,
    DELTA,
    LEAST_NOISE,
    AccountingError,
    Mechanism,
    epsilon,
    gaussian_epsilon,
    least_noise,
)
from federation.text import counted
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.spec.train_section import LocalSgd


_FINE = 0.9  # of the noise by the coarse grid: the least noise by the fine grid is not below


def plan(
    rounds: Annotated[int, typer.Option(min=1, help="The rounds of the run, or of all runs together.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Noise for samples: the training samples of the member.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=0, help="train.batch_size; 0: the whole split.")] = 0,
    epochs: Annotated[int, typer.Option(min=0, help="train.epochs, in each round.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="train.steps in place of epochs. Default: one epoch.")] = 0,
    members: Annotated[
        int | None, typer.Option(min=1, help="Noise for clients: the members that reply in a round.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--epsilon", help="The epsilon that may be spent: the answer is the noise.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help=f"The noise multiplier, at least {LEAST_NOISE}: the answer is epsilon.")
    ] = None,
    delta: Annotated[float, typer.Option(help="The delta for which epsilon holds.")] = DELTA,
    as_json: JsonOption = False,
) -> None:
    """Compute the noise for an epsilon, or the epsilon of a noise.

    Of a member with 2,000 training samples that trains one epoch in each of 50 rounds, with minibatches of 64:

        fedpareto privacy plan --samples 2000 --batch-size 64 --rounds 50 --epsilon 8 --delta 1e-6

    The noise is that of `privacy.sample_noise` in a run specification, or of `noise` in an owner's policy.toml. It is
    computed as the ledger of the worker computes it, for a data set that has spent nothing. The smallest member needs
    the most noise. With --members in place of --samples it is `privacy.client_noise`, the noise that protects members.
    """
    if (samples is None) == (members is None):
        raise CommandFailure("give --samples (noise for samples) or --members (noise for clients)", code=USAGE)
    if (target is None) == (noise is None):
        raise CommandFailure("give --epsilon, to get the noise, or --noise, to get epsilon", code=USAGE)
    if not 0 < delta < 1:
        raise CommandFailure(f"--delta is between 0 and 1; got {delta:g}", code=USAGE)
    if target is not None and not 0 < target < math.inf:
        raise CommandFailure(f"--epsilon is above 0; got {target:g}", code=USAGE)
    if noise is not None and not LEAST_NOISE <= noise < math.inf:
        raise CommandFailure(f"--noise is at least {LEAST_NOISE}; got {noise:g}", code=USAGE)
    if samples is None:
        if batch_size or epochs or steps:
            raise CommandFailure("--batch-size, --epochs and --steps belong to --samples", code=USAGE)
        _for_clients(rounds, members or 0, target, noise or 0.0, delta, as_json)
        return
    with failing(ValueError, code=USAGE):
        sgd = LocalSgd.from_values(
            {"epochs": epochs or int(not steps), "steps": steps, "batch_size": batch_size, "learning_rate": 0.0}
        )
    with failing(AccountingError):
        _for_samples(rounds, samples, sgd, target, noise or 0.0, delta, as_json)


def _for_samples(
    rounds: int, samples: int, sgd: "LocalSgd", target: float | None, noise: float, delta: float, as_json: bool
) -> None:
    def noisy(multiplier: float) -> Mechanism:
        return Mechanism(multiplier, sgd.sampling_rate(samples), rounds * sgd.count(samples))

    def spent(multiplier: float, **grid: float) -> float:
        return epsilon([noisy(multiplier)], delta, **grid).value

    if target is not None:
        enough = least_noise(partial(spent, interval=COARSE), target)  # the coarse grid asks for a little more

        def within(each: float) -> float:
            return 0.0 if each >= enough else spent(each) if each >= _FINE * enough else math.inf

        noise = least_noise(within, target)
    mechanism = noisy(noise)
    total = epsilon([mechanism], delta)
    document: dict[str, Any] = {"protects": "samples", "noise": noise, "epsilon": total.value, "bound": total.bound}
    document |= {"delta": delta, "rounds": rounds, "steps": mechanism.steps, "rate": mechanism.rate}
    lines = [
        f"privacy.sample_noise = {noise:g}: epsilon = {total.value:.4g} (delta = {delta:g}; at most {total.bound:.4g} "
        f"by Renyi differential privacy)",
        f"after {counted(rounds, 'round')} of {counted(sgd.count(samples), 'step')}, each with a share of "
        f"{mechanism.rate:.4g} of {counted(samples, 'sample')}",
    ]
    if samples * delta >= 1:
        lines.append(
            f"Warning: delta = {delta:g} allows one of {samples} samples to be shown; keep it far below 1 / samples"
        )
    answer(as_json, document, *lines)


def _for_clients(rounds: int, members: int, target: float | None, noise: float, delta: float, as_json: bool) -> None:
    if target is not None:
        with failing(AccountingError):
            noise = least_noise(lambda each: gaussian_epsilon(each, rounds, delta), target)
    spent = gaussian_epsilon(noise, rounds, delta)
    moved = 2 / members
    document = {"protects": "clients", "noise": noise, "epsilon": spent, "delta": delta, "rounds": rounds}
    document |= {"members": members, "deviation": noise * moved}
    answer(
        as_json,
        document,
        f"privacy.client_noise = {noise:g}: epsilon = {spent:.4g} (delta = {delta:g}) after {counted(rounds, 'step')}",
        f"With fedavg-n and {counted(members, 'reply', 'replies')} a round, the noise on each parameter has the "
        f"standard deviation {noise * moved:.3g}; the direction as a whole is at most 1 long",
    )
