"""Verifies the record of a run: that of a bundle offline, and that of a coordinator's database.

The verifier needs neither a coordinator nor its database: a bundle is a file, and the audit of a coordinator gives it
the rounds that it has opened. It computes the Gram matrices and the models with code of its own (`arithmetic`), so that
it does not repeat mistakes of the coordinator. `federation.record` opens the envelopes and compares what belongs
together. `federation.aggregation` has the rules, which are pure functions of K, and the conversation of a private
round.
"""
