"""Benchmarks: each prints a table. See `docs/performance.md`; `python -m benchmarks.run_all` runs all."""
