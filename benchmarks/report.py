"""Puts the figures of benchmarks into a document, so that each is printed by a command.

    python -m benchmarks.report [--figures=runs/benchmarks] [--document=docs/performance.md]

What stands between `<!-- results: NAME -->` and `<!-- end of results -->` is replaced by the tables
of `NAME.json`; a benchmark without such a file keeps what it has.
"""

import argparse
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from benchmarks import harness

FIGURES = "runs/benchmarks"
"""Where figures are kept."""

DOCUMENT = "docs/performance.md"
"""Where they are shown."""

_SECTION = re.compile(
    r"(?P<begin><!-- results: (?P<name>\w+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)


def fill(document: str, reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a document with the results of `reports` in their places.

    Args:
      document: Markdown with markers.
      reports: what benchmarks wrote as JSON, by name.

    Raises:
      ValueError: a report has no place.
    """
    places = {match["name"] for match in _SECTION.finditer(document)}
    missing = sorted(set(reports) - places)
    if missing:
        raise ValueError(f"the document has no place for the results of {', '.join(missing)}")

    def replace(match: re.Match[str]) -> str:
        report = reports.get(match["name"])
        if report is None:
            return match[0]
        return f"{match['begin']}\n{to_markdown(report)}\n{match['end']}"

    return _SECTION.sub(replace, document)


def to_markdown(report: Mapping[str, Any]) -> str:
    """Returns the tables of a report, and the line that says how it was measured."""
    tables = "\n".join(
        f"**{table['title']}**\n\n{harness.render(table, markdown=True)}\n"
        for table in report["tables"]
    )
    return f"{tables}\n_{harness.describe_run(report)}._\n"


def read_reports(folder: pathlib.Path) -> dict[str, Any]:
    """Returns all reports in a folder by name."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        reports[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return reports


def update(folder: pathlib.Path, document: pathlib.Path) -> list[str]:
    """Fills a document from a folder of reports; returns the names of those it has used."""
    reports = read_reports(folder)
    text = document.read_text(encoding="utf-8")
    document.write_text(fill(text, reports), encoding="utf-8")
    return list(reports)


def main() -> None:
    """Parses the command line and fills the document."""
    parser = argparse.ArgumentParser(description="Put figures into the documentation.")
    parser.add_argument("--figures", type=pathlib.Path, default=pathlib.Path(FIGURES))
    parser.add_argument("--document", type=pathlib.Path, default=pathlib.Path(DOCUMENT))
    arguments = parser.parse_args()
    names = update(arguments.figures, arguments.document)
    print(f"{arguments.document}: {', '.join(names) or 'no figures found'}")


if __name__ == "__main__":
    main()
