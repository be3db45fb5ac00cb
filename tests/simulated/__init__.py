"""Faults on one thread: the real engine with a simulated clock, network, disk and members."""
