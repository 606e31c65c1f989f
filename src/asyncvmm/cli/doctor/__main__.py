"""``python -m asyncvmm.cli.doctor [--json]``: the doctor where typer and rich are not installed."""

from __future__ import annotations

import argparse
import sys

import msgspec

from asyncvmm._errors import ArgumentError
from asyncvmm.cli.doctor.examination import examine


def main() -> int:
    """Print the report; return 1 if the device cannot work."""
    parser = argparse.ArgumentParser(prog="python -m asyncvmm.cli.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    options = parser.parse_args()
    try:
        report = examine(options.device)
    except ArgumentError as error:
        parser.error(str(error))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        for line in report.lines:
            sys.stdout.write(f"{line.state:8} {line.name}: {line.figure}\n")
            if line.advice:
                sys.stdout.write(f"{'':8} {line.advice}\n")
        sys.stdout.write(f"{report.device} {'works' if report.works else 'cannot work'} here\n")
    return 0 if report.works else 1


if __name__ == "__main__":
    sys.exit(main())
