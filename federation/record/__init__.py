"""The record of a run: what was signed in each round, and whether it belongs together.

`bindings` lists the fields that a message repeats of the one that it answers. `exchange` opens an assignment and what
its client answered, `rounds` all envelopes of a round.
"""
