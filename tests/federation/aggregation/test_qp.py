"""The quadratic program: certified on every kind of matrix, and equal to the references."""

import warnings

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from federation.aggregation.qp import InfeasibleBoxError, UnsolvedError, box, kkt_residual, min_norm
from tests.federation.aggregation.scene import KINDS, Matrix, matrix, reference, zoo

RESIDUAL_TOLERANCE = 1e-9  # what is promised


@pytest.mark.parametrize("name", ["minnorm_simplex", "minnorm_box"])
def test_the_solutions_are_those_of_the_reference(name: str) -> None:
    for case in reference(name):
        U = np.array(case["gradients"])
        m = len(U)
        lower, upper = np.array(case["lower"]), np.array(case["upper"])
        solution = min_norm(U @ U.T, prior=np.array(case.get("lambda0", [1 / m] * m)), lower=lower, upper=upper)
        expected = case["expected"]
        longest = np.linalg.norm(U, axis=1).max()
        d = solution.weights @ U
        assert solution.residual <= RESIDUAL_TOLERANCE, case["id"]
        assert abs(d @ d - expected["norm_sq"]) <= 1e-10 * longest**2, case["id"]
        assert np.abs(d - expected["d"]).max() <= 1e-7 * longest, case["id"]
        assert solution.stationary == expected["pareto_stationary"], case["id"]
        if expected["lambda_unique"] and case["id"] not in {"near_identical", "wild_scales"}:
            assert np.abs(solution.weights - expected["lambda"]).max() <= 1e-6, case["id"]


@given(zoo, st.sampled_from([0.0, 1e-3, 0.05, 0.3, 1.0]), st.integers(0, 99))
def test_every_solution_is_feasible_and_optimal(U: Matrix, epsilon: float, seed: int) -> None:
    prior = np.random.default_rng(seed).dirichlet(np.ones(len(U)))
    lower, upper = box(prior, epsilon)
    K = U @ U.T
    solution = min_norm(K, prior=prior, lower=lower, upper=upper)
    assert solution.residual <= RESIDUAL_TOLERANCE
    assert solution.residual == kkt_residual(K, solution.weights, lower, upper)
    assert (solution.weights >= lower).all()
    assert (solution.weights <= upper).all()
    assert abs(solution.weights.sum() - 1) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [60, 250])
@pytest.mark.parametrize("width", [1.0, 0.5])
def test_many_rows_are_solved_to_the_same_residual(kind: str, m: int, width: float) -> None:
    U = matrix(kind, m, m // 2, seed=1)
    prior = np.full(m, 1 / m)
    lower, upper = box(prior, 1.0 if width == 1.0 else width / m)
    solution = min_norm(U @ U.T, prior=prior, lower=lower, upper=upper)
    assert solution.residual <= RESIDUAL_TOLERANCE
    assert abs(solution.weights.sum() - 1) <= 1e-12


@settings(max_examples=40)
@given(
    st.sampled_from(["random", "nearly parallel", "duplicated", "conflicting", "low rank", "shifted", "badly scaled"]),
    st.integers(2, 9),
    st.integers(0, 10**6),
    st.sampled_from([0.05, 0.3, 1.0]),
)
def test_clarabel_finds_the_same_length(kind: str, m: int, seed: int, epsilon: float) -> None:
    U = matrix(kind, m, 5, seed)
    prior = np.full(m, 1 / m)
    lower, upper = box(prior, epsilon)
    ours = min_norm(U @ U.T, prior=prior, lower=lower, upper=upper)
    import cvxpy as cp  # takes two CPU seconds

    weights = cp.Variable(m)
    problem = cp.Problem(
        cp.Minimize(cp.sum_squares(U.T @ weights)), [cp.sum(weights) == 1, weights >= lower, weights <= upper]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Solution may be inaccurate")
        problem.solve(solver=cp.CLARABEL)
    assume(problem.status == cp.OPTIMAL)  # where norms are far apart, it gives up now and then
    d = ours.weights @ U
    # That ours is not too short is what its certificate says; Clarabel's is a little too long now and then.
    assert ours.residual <= RESIDUAL_TOLERANCE
    assert d @ d <= problem.value + 1e-6 * (U * U).sum(axis=1).max()


@given(zoo)
def test_the_shortest_vector_makes_no_row_worse(U: Matrix) -> None:
    K = U @ U.T
    weights = min_norm(K).weights
    assert (K @ weights).min() >= weights @ K @ weights - 2e-9 * np.diag(K).max()


def test_one_row_takes_everything() -> None:
    for value in (0.0, 1e-300, 4.0):
        solution = min_norm(np.array([[value]]))
        assert solution.weights.tolist() == [1.0]
        assert solution.stationary == (value == 0.0)


def test_an_empty_box_returns_the_prior_as_it_is() -> None:
    prior = np.array([0.2, 0.5, 0.3])
    K = matrix("random", 3, 4, seed=0)
    lower, upper = box(prior, 0.0)
    solution = min_norm(K @ K.T, prior=prior, lower=lower, upper=upper)
    assert solution.weights.tolist() == prior.tolist()
    assert (solution.residual, solution.iterations) == (0.0, 0)


def test_the_box_lies_within_the_simplex() -> None:
    lower, upper = box(np.array([0.75, 0.25]), 0.5)
    assert (lower.tolist(), upper.tolist()) == ([0.25, 0.0], [1.0, 0.75])


@pytest.mark.parametrize("name", ["prior", "lower", "upper"])
def test_a_vector_of_another_length_or_of_what_is_not_finite_is_named(name: str) -> None:
    for values in (np.full(3, 1 / 3), np.array([np.nan, 0.5]), np.array([0.5, np.inf])):
        with pytest.raises(ValueError, match=f"{name} must be 2 finite numbers; it has shape"):
            min_norm(np.eye(2), **{name: values})


def test_identical_updates_keep_the_prior() -> None:
    prior = np.array([0.1, 0.6, 0.3])
    u = np.random.default_rng(0).standard_normal(50)
    K = np.array([u, u, u]) @ np.array([u, u, u]).T
    solution = min_norm(K, prior=prior)
    np.testing.assert_array_equal(solution.weights, prior)
    assert not solution.stationary
    rounded = np.array([0.1, 0.2, 0.7])  # their sum is 1 - 1.1e-16
    np.testing.assert_array_equal(min_norm(K, prior=rounded).weights, rounded)


def test_duplicates_share_their_weight() -> None:
    U = matrix("random", 3, 8, seed=4)
    alone = min_norm(U @ U.T)
    doubled = U[[0, 0, 1, 2]]
    together = min_norm(doubled @ doubled.T, prior=np.array([0.25, 0.25, 0.25, 0.25]))
    np.testing.assert_allclose(together.weights @ doubled, alone.weights @ U, atol=1e-12)
    assert together.weights[0] == pytest.approx(together.weights[1], abs=1e-2)
    unequal = min_norm(doubled @ doubled.T, prior=np.array([0.3, 0.2, 0.25, 0.25]))
    assert unequal.weights[0] - unequal.weights[1] == pytest.approx(0.1, abs=1e-2)


def test_zero_matrix_keeps_the_prior_and_is_stationary() -> None:
    prior = np.array([0.7, 0.3])
    solution = min_norm(np.zeros((2, 2)), prior=prior)
    assert solution.weights.tolist() == prior.tolist()
    assert solution.stationary


def test_a_zero_row_makes_the_point_stationary_unless_the_box_keeps_weight_off_it() -> None:
    U = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    K = U @ U.T
    assert min_norm(K).stationary
    lower, upper = box(np.full(3, 1 / 3), 0.1)
    assert not min_norm(K, lower=lower, upper=upper).stationary
    assert not min_norm(K, lower=np.array([0.0, 0.0, 0.1]), upper=np.array([1.0, 1.0, 0.4])).stationary


def test_a_vertex_is_reached_exactly() -> None:
    U = np.array([[1.0, 0.0], [2.0, 0.5]])
    solution = min_norm(U @ U.T)
    assert solution.weights.tolist() == [1.0, 0.0]
    assert solution.residual == 0.0


@pytest.mark.parametrize("kind", ["random", "shifted", "orthogonal"])
def test_where_the_guess_is_right_one_iteration_confirms_it(kind: str) -> None:
    prior = np.full(11, 1 / 11)
    lower, upper = box(prior, 0.05)
    for seed in range(5):
        U = matrix(kind, 11, 8, seed)
        assert min_norm(U @ U.T, prior=prior, lower=lower, upper=upper).iterations == 1


def test_a_weight_whose_bounds_meet_stays_there() -> None:
    lower, upper = np.array([0.25, 0.0, 0.0]), np.array([0.25, 1.0, 1.0])
    solution = min_norm(np.diag([1.0, 4.0, 8.0]), lower=lower, upper=upper)
    assert solution.weights.tolist() == pytest.approx([0.25, 0.5, 0.25], abs=1e-12)
    assert solution.iterations == 1


@pytest.mark.parametrize(("kind", "d", "seed"), [("wildly scaled", 4, 1232), ("badly scaled", 2, 25)])
def test_rounding_does_not_bind_and_release_the_same_weights_again_and_again(kind: str, d: int, seed: int) -> None:
    U = matrix(kind, 10, d, seed)
    assert min_norm(U @ U.T).iterations < 100


def test_a_solution_at_the_edge_of_its_box_lies_within_it() -> None:
    for seed in (841, 842, 843):
        U = matrix("low rank", 2, 6, seed)
        lower, upper = box(np.full(2, 0.5), 0.3)
        solution = min_norm(U @ U.T, lower=lower, upper=upper)
        assert (solution.weights >= lower).all()
        assert (solution.weights <= upper).all()


def test_bounds_may_sum_to_one_but_for_rounding() -> None:
    upper = np.array([0.5, 0.5 - 1e-13])
    assert min_norm(np.diag([1.0, 2.0]), upper=upper).weights.tolist() == upper.tolist()


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ([0.6, 0.6], [1.0, 1.0], "lower bounds sum to 1.2"),
        ([0.0, 0.0], [0.4, 0.4], "upper bounds to 0.8"),
        ([0.5, 0.0], [0.4, 1.0], "bounds of row 0 cross"),
        ([0.2, 0.1, 0.5], [0.2, 0.9, 0.4], "bounds of row 2 cross: 0.5 > 0.4"),
    ],
)
def test_an_infeasible_box_is_named(lower: list[float], upper: list[float], message: str) -> None:
    with pytest.raises(InfeasibleBoxError, match=message):
        min_norm(np.eye(len(lower)), lower=np.array(lower), upper=np.array(upper))


@pytest.mark.parametrize(
    ("K", "message"),
    [
        (np.zeros((0, 0)), "at least one row"),
        (np.zeros((2, 3)), "square"),
        (np.full((2, 2), np.nan), "finite"),
        (-np.eye(2), "no Gram matrix"),
    ],
)
def test_what_is_no_gram_matrix_is_refused(K: Matrix, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        min_norm(K)


def test_an_indefinite_matrix_is_solved_to_the_residual_or_refused() -> None:
    rng = np.random.default_rng(0)
    refused = []
    for _ in range(50):
        A = rng.standard_normal((6, 6))
        K = A + A.T
        np.fill_diagonal(K, np.abs(np.diag(K)))
        try:
            assert min_norm(K).residual <= RESIDUAL_TOLERANCE
        except UnsolvedError as error:
            least = np.linalg.eigvalsh(K / np.diag(K).max()).min()
            refused.append((f"Is K a Gram matrix? Its least eigenvalue is {least:.1e} of", str(error)))
    assert refused
    assert all(words in message for words, message in refused)


def test_the_shortest_vector_of_orthogonal_rows_is_found_over_sixteen_decades() -> None:
    K = np.diag(10.0 ** np.linspace(-16, 16, 9))
    weights = 1 / np.diag(K)
    weights /= weights.sum()
    found = min_norm(K)
    assert found.weights @ K @ found.weights == pytest.approx(weights @ K @ weights, rel=1e-9)


def test_a_small_box_of_rows_that_depend_on_each_other_keeps_the_sum_over_many_decades() -> None:
    for seed in (18, 25, 27, 29, 32):
        rng = np.random.default_rng(seed)
        U = rng.normal(size=(10, 3)) * 10.0 ** rng.uniform(-12, 12, (10, 1))
        found = min_norm(U @ U.T, upper=np.full(10, 0.2))
        assert found.residual <= 1e-9
        assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_rows_far_shorter_than_what_the_box_forces_share_the_rest() -> None:
    K = np.diag([4e14, 5e13, 6e-16, 9e-13])
    found = min_norm(K, prior=np.array([0.02, 0.3, 0.34, 0.34]), lower=np.array([0.02, 0.0, 0.0, 0.0]))
    assert found.weights[:2].tolist() == pytest.approx([0.02, 0.0], abs=1e-12)
    assert found.weights[3] > 0.05


@pytest.mark.parametrize("weights", [[np.nan, np.nan], [0.4, 0.4], [0.05, 0.95], [0.95, 0.05]])
def test_weights_that_are_not_numbers_or_outside_the_box_are_not_certified(weights: list[float]) -> None:
    lower, upper = np.array([0.1, 0.0]), np.array([0.9, 1.0])
    assert kkt_residual(np.eye(2), np.array(weights), lower, upper) == float("inf")
