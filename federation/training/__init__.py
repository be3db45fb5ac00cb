"""Local work at a member: training from a base model, and evaluation. The same assignment gives the same bytes.

What is computed depends on (base, work, seed, round, client, data) alone, on one machine and thread count: every
random choice comes from a seed derived from these, the optimiser starts afresh, and only deterministic kernels run.
A worker that died in the middle, or one that is asked twice, hands in the very same update.
"""
