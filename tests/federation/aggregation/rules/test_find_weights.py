"""FindWeights: the references, and that it walks towards the min-norm point without leaving the simplex."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.aggregation.qp import min_norm
from federation.aggregation.rules.find_weights import find_weights
from tests.federation.aggregation.scene import Matrix, reference, zoo

AUTHORS_FLOOR = 1e-4  # under the square root, in the authors' code


def test_the_weights_are_those_of_the_reference() -> None:
    for case in reference("findweights"):
        J = np.array(case["jacobian_rows"])
        keys = {"beta": case["beta"], "steps": case["K"], "raw": not case["normalise"], "floor": AUTHORS_FLOOR}
        found = find_weights(J @ J.T, np.array(case["lambda_init"]), **keys)
        assert np.abs(found - case["expected"]["lambda_out"]).max() <= 1e-9, case["id"]


@settings(max_examples=60)
@given(zoo, st.integers(0, 99), st.sampled_from([0.0, 1e-3, 0.3]))
def test_the_weights_stay_in_the_simplex_and_never_lengthen_the_direction(U: Matrix, seed: int, beta: float) -> None:
    K = U @ U.T
    before = np.random.default_rng(seed).dirichlet(np.ones(len(U)))
    after = find_weights(K, before, beta=beta, steps=50)
    assert (after >= 0).all()
    assert abs(after.sum() - 1) <= 1e-12
    scale = np.diag(K).max()
    normalized = K / np.sqrt(np.diag(K)).mean() ** 2 if scale > 0 else K
    if beta * np.linalg.eigvalsh(normalized)[-1] <= 1:  # a step that is not too long
        assert after @ K @ after <= before @ K @ before + 1e-9 * scale


def test_many_steps_reach_the_min_norm_point_and_the_default_ones_do_not() -> None:
    U = np.random.default_rng(4).standard_normal((4, 9))
    K = U @ U.T
    uniform = np.full(4, 0.25)
    exact = min_norm(K).weights
    assert np.abs(find_weights(K, uniform, beta=0.1, steps=5000) - exact).max() <= 1e-9
    assert np.abs(find_weights(K, uniform) - exact).max() > 0.01


@pytest.mark.parametrize("scale", [1e-150, 1e-6, 1e6, 1e150])
def test_the_weights_depend_on_the_scale_of_gradients_with_the_authors_floor_alone(scale: float) -> None:
    U = np.random.default_rng(1).standard_normal((3, 5))
    uniform = np.full(3, 1 / 3)
    plain = find_weights(U @ U.T, uniform)
    assert np.allclose(find_weights(U @ U.T * scale, uniform), plain, rtol=1e-9)
    floored = find_weights(U @ U.T * scale, uniform, floor=AUTHORS_FLOOR)
    assert np.allclose(floored, plain, atol=1e-3) == (scale > 1)


def test_without_a_gradient_the_weights_stay() -> None:
    assert find_weights(np.zeros((3, 3)), np.array([0.2, 0.3, 0.5])).tolist() == [0.2, 0.3, 0.5]


def test_one_objective_has_all_the_weight() -> None:
    assert find_weights(np.array([[4.0]]), np.ones(1)).tolist() == [1.0]


def test_what_is_not_symmetric_or_negative_in_an_estimate_does_not_count() -> None:
    G = np.array([[1.0, 3.0], [-1.0, 2.0]])
    even = np.full(2, 0.5)
    assert np.array_equal(find_weights(G, even), find_weights((G + G.T) / 2, even))
    indefinite = np.array([[1.0, 2.0], [2.0, 1.0]])  # its positive part is [[1.5, 1.5], [1.5, 1.5]]
    assert np.allclose(find_weights(indefinite, np.array([0.9, 0.1])), [0.9, 0.1])


@pytest.mark.parametrize(
    ("G", "before", "words"),
    [
        (np.eye(3), [0.5, 0.5], "shape"),
        (np.full((2, 2), np.nan), [0.5, 0.5], "finite"),
        (np.eye(2), [0.5, 0.6], "distribution"),
        (np.eye(2), [1.5, -0.5], "distribution"),
    ],
)
def test_what_cannot_be_is_refused(G: Matrix, before: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_weights(G, np.array(before))


def test_the_analysed_form_steps_with_the_matrix_as_it_was_estimated() -> None:
    G = np.array([[-1.0, 0.5], [0.5, 2.0]])
    before = np.array([0.5, 0.5])
    found = find_weights(G, before, beta=0.1, steps=1, raw=True)
    assert found.tolist() == pytest.approx([0.5 + 0.075, 0.5 - 0.075])  # G lambda = (-0.25, 1.25), on the simplex
