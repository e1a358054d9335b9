"""`python -m tests.gpu_acceptance [--fake] [--out FOLDER] [PART ...]`: `make gpu-acceptance`."""

import argparse
import sys
from pathlib import Path

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.core.settings import load_settings
from tests.gpu_acceptance.acceptance_parts import PARTS, named
from tests.gpu_acceptance.flow import Flow
from tests.gpu_acceptance.result_table import accepted, table


def main() -> int:
    """Run the parts, or those that are named; 1 where one failed or misses what it must reach."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_acceptance")
    parser.add_argument("--fake", action="store_true", help="the same flow on a CPU, tiny models")
    parser.add_argument("--out", type=Path, help="folder for the results, and to go on from")
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(names))
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in names]:
        parser.error(f"no part is called {unknown[0]}; there are {', '.join(names)}")
    parts = [named(name) for name in arguments.parts] or PARTS
    out = arguments.out or load_settings().home / f"gpu-acceptance{'-fake' * arguments.fake}"
    try:
        results = Flow(
            out.resolve(), arguments.fake, lambda line: print(line, file=sys.stderr)
        ).run(parts)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    print(table(results))
    return 0 if accepted(results) else 1


if __name__ == "__main__":
    sys.exit(main())
