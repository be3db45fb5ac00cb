"""Verifies a bundle offline: an outsider recomputes a run from signed facts.

The verifier reads a file, and needs neither a coordinator nor its database. It computes the Gram matrices and the
models with code of its own (`arithmetic`), so that it does not repeat mistakes of the coordinator. `federation.record`
opens the envelopes and compares what belongs together. `federation.aggregation` has the rules, which are pure functions
of K, and the conversation of a private round.
"""
