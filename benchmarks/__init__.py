"""Benchmarks; each prints a table. `docs/performance.md` says what they measure."""
