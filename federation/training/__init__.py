"""Local work at a member: training from a base model, and evaluation. The same assignment gives the same bytes.

On one machine and thread count, the result depends on (base, work, seed, round, client, data) alone: every random
choice comes from a seed derived from these, the optimiser starts afresh, and only deterministic kernels run. So a
worker that died in the middle, or that is asked twice, hands in the same update.
"""
