"""Tests of the project itself: its tree, its documents, what is shipped, the tools and the benchmarks."""
