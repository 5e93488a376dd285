"""Runs the benchmarks one after the other, and puts their figures into the documentation.

    python -m benchmarks.run_all [--quick] [--only=NAME ...] [--soak] [--document=FILE]

Nothing else should run meanwhile; each table says how much of the machine others used.
"""

import argparse
import pathlib
import subprocess
import sys
import time

from benchmarks import harness, report

BENCHMARKS = (
    "benchmarks.batcher",
    "benchmarks.transport",
    "benchmarks.table",
    "benchmarks.learner",
    "benchmarks.inference",
    "benchmarks.end_to_end",
    "benchmarks.graphs",
    "benchmarks.beside_plain",
    "benchmarks.actor_memory",
)
SOAK = "benchmarks.soak"


def main() -> int:
    """Runs them; returns the exit status, 1 where one failed."""
    parser = argparse.ArgumentParser(description="Run all benchmarks.")
    harness.add_size(parser)
    parser.add_argument("--only", action="append", help="a benchmark; repeat (default: all)")
    parser.add_argument("--soak", action="store_true", help="also watch memory for ten minutes")
    parser.add_argument("--figures", type=pathlib.Path, default=pathlib.Path(report.FIGURES))
    parser.add_argument(
        "--document",
        type=pathlib.Path,
        help=f"fill this document (default with full size: {report.DOCUMENT})",
    )
    arguments = parser.parse_args()
    modules = [*BENCHMARKS, *([SOAK] if arguments.soak else [])]
    if arguments.only:
        modules = [f"benchmarks.{name}" for name in arguments.only]
        unknown = sorted(set(modules) - {*BENCHMARKS, SOAK})
        if unknown:
            parser.error(f"unknown benchmark {', '.join(unknown)}")
    arguments.figures.mkdir(parents=True, exist_ok=True)
    size = [] if arguments.size == "full" else [f"--{arguments.size}"]
    began = time.monotonic()
    failed = []
    for module in modules:
        name = module.rpartition(".")[2]
        print(f"\n== {name}", flush=True)
        target = arguments.figures / f"{name}.json"
        command = [sys.executable, "-m", module, *size, f"--json={target}"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"\nall in {(time.monotonic() - began) / 60:.1f} minutes")
    document = arguments.document
    if document is None and arguments.size == "full":
        document = pathlib.Path(report.DOCUMENT)  # Only figures that may be quoted go there.
    if document is not None:
        report.update(arguments.figures, document)
        print(f"figures are in {document}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
