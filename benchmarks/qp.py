"""The quadratic program over the simplex: CPU time and KKT residual of our solver and of others.

The others are PIQP, whose guess ours begins with, followed by one exact step in place of our active set; Clarabel
(through cvxpy); and quadprog. K, for each of `--sizes` (members), is of six kinds that are made up and of two rounds of
simulated runs. `federation.aggregation.qp.kkt_residual` computes each solver's residual, after weights below 1e-9 are
set to 0 and the sum is restored to 1. A solver that is not installed is "not measured".
"""

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import piqp  # type: ignore[import-untyped]  # it has no stubs
from measuring import Document, cases, progress, timed
from numpy.typing import NDArray
from sqlalchemy import select

from coordinator.home import CoordinatorHome
from federation.aggregation.qp import kkt_residual, min_norm
from storage.models import Round

Matrix = NDArray[np.float64]
FORMS = {
    "full": {"sizes": "10 100 500", "repeats": 11, "simulated": 10},
    "quick": {"sizes": "10 100"},
    "smallest": {"sizes": "10", "repeats": 1, "simulated": 0},
}
RUN = """
name = "benchmark"
task = "digits"
rounds = {rounds}
algorithm.name = "fedmgda+"
train = {{ epochs = 0, steps = 5, batch_size = 10 }}
evaluate = {{ every = 0, splits = ["train"] }}
simulation = {{ clients = {m}, partition = "dirichlet:0.3" }}
"""


def measure(sizes: str, repeats: int, simulated: int) -> Document:
    """K of simulated runs is that of the first round and of round `simulated`; 0 is none."""
    solvers = {"ours": ours, "PIQP, step": polished, "clarabel": clarabel, "quadprog": quadprog}
    rows = []
    for (m,) in cases(sizes):
        progress(f"m = {m}")
        grams = {kind: U @ U.T for kind, U in kinds(m).items()}
        grams |= {f"digits, round {rounds}": collected(m, rounds) for rounds in ((1, simulated) if simulated else ())}
        for kind, K in grams.items():
            row: Document = {"m": m, "K": kind}
            for name, solve in solvers.items():
                found = solved(solve, K, min(repeats, 3) if m == 500 else repeats)
                row |= {f"{name} {what}": value for what, value in found.items()}
            rows.append(row)
    return {"solvers": rows}


def collected(m: int, rounds: int) -> Matrix:
    """K, shape (m, m), of the last round of a run with m clients."""
    from fedpareto.face.simulated import simulate

    with TemporaryDirectory() as parent:
        directory = Path(parent, "home")
        simulate(RUN.format(m=m, rounds=rounds), home=directory, device="cpu", threads=1, progress=lambda _: None)
        home = CoordinatorHome.load(directory)
        with home.open_database(durable=False).read() as session:
            digest = str(session.scalars(select(Round.gram).filter_by(number=rounds - 1)).one())
        K: Matrix = np.load(io.BytesIO(home.open_blobs(None, durable=False).read(digest)))
    return K


def kinds(m: int) -> dict[str, Matrix]:
    """The updates of each kind that is made up, (m, 2m), or (m, m / 5) for those of low rank."""
    rng = np.random.default_rng(m)
    U = rng.standard_normal((m, 2 * m))
    common = rng.standard_normal(2 * m)
    return {
        "random": U,
        "nearly parallel": common + 1e-3 * U,
        "duplicated": U[np.arange(m) // 2],
        "conflicting": np.where(np.arange(m)[:, None] % 2 == 0, common, -common) + 0.1 * U,
        "badly scaled": (common + U) * 10.0 ** rng.uniform(-4, 4, (m, 1)),
        "low rank": U[:, : m // 5],
    }


def ours(K: Matrix) -> Matrix:
    return min_norm(K).weights


def polished(K: Matrix) -> Matrix:
    """PIQP's point, then the exact minimum over the rows that it gives a weight; variables are scaled as ours are."""
    m, norms = len(K), np.sqrt(np.diag(K))
    a = norms.min() / norms
    C = K / norms / norms[:, None] + 8 * np.finfo(np.float64).eps * m * np.eye(m)
    solver = piqp.DenseSolver()
    solver.settings.eps_abs = solver.settings.eps_rel = 1e-10
    solver.setup(C, np.zeros(m), a[None, :], np.ones(1), None, None, None, np.zeros(m), np.full(m, np.inf))
    solver.solve()
    free = solver.result.x > solver.result.z_bl
    y = np.linalg.solve(C[np.ix_(free, free)], a[free])
    weights = np.zeros(m)
    weights[free] = a[free] * y / (a[free] @ y)
    return weights


def clarabel(K: Matrix) -> Matrix:
    import cvxpy as cp

    m = len(K)
    scale = np.diag(K).max()
    weights = cp.Variable(m, nonneg=True)
    objective = cp.quad_form(weights, cp.psd_wrap(K / scale))
    cp.Problem(cp.Minimize(objective), [cp.sum(weights) == 1]).solve(solver=cp.CLARABEL)
    return np.asarray(weights.value)


def quadprog(K: Matrix) -> Matrix:
    import quadprog as qp

    m = len(K)
    constraints = np.column_stack([np.ones(m), np.eye(m)])
    bounds = np.concatenate([[1.0], np.zeros(m)])
    return np.asarray(qp.solve_qp(K / np.diag(K).max(), np.zeros(m), constraints, bounds, 1)[0])


def solved(solve: Callable[[Matrix], Matrix], K: Matrix, repeats: int) -> dict[str, Any]:
    """The median CPU time in ms and the residual; None if the solver is not installed, "failed" if it fails."""
    zeros, ones = np.zeros(len(K)), np.ones(len(K))
    try:
        weights = solve(K)  # imports modules and fills caches
        times = [1e3 * timed(lambda: solve(K), time.process_time) for _ in range(repeats)]
    except ImportError:
        return {"ms": None, "residual": None}
    except Exception:
        return {"ms": "failed", "residual": "failed"}
    weights = np.where(weights < 1e-9, 0.0, weights)
    return {"ms": statistics.median(times), "residual": kkt_residual(K, weights / weights.sum(), zeros, ones)}
