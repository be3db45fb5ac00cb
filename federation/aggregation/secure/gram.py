"""The Gram matrix that a rule sees in a private round."""

import numpy as np

from federation.aggregation.interface import Matrix

LEAST = 2.0**-12
"""The least eigenvalue: with it the weights of a rule are unique, so that every processor finds the same ones."""


def positive(G: Matrix) -> Matrix:
    """The nearest matrix with eigenvalues of at least `LEAST`, scaled to ones on its diagonal, (m, m).

    The openings of G have noise, which can make eigenvalues negative.
    """
    # Section 4: for the rule alone. The checks take G as it was opened: here, what a liar has shifted can be smoothed
    # away.
    values, vectors = np.linalg.eigh((G + G.T) / 2)
    nearest = (vectors * np.maximum(values, LEAST)) @ vectors.T
    lengths = np.sqrt(np.diag(nearest))
    # Section 4: ones on the diagonal again: raised eigenvalues make members longer, and a rule would weigh them by it.
    scaled: Matrix = nearest / np.outer(lengths, lengths)
    return scaled
