"""Runs one rank of a case, which it reads as JSON from its input, and prints its report as JSON."""

import json
import os
import resource
import sys
from dataclasses import asdict

from pipelines.core.errors import EXIT_USER_ERROR, UserError
from pipelines.training.dry_run.dry_run import HOST_BYTES, Case


def main() -> None:
    """Run the rank that the arguments name; a user's error exits with 2 and one line."""
    resource.setrlimit(resource.RLIMIT_DATA, (HOST_BYTES, HOST_BYTES))
    case = Case.from_json(sys.stdin.read())
    answer = os.dup(1)
    os.dup2(2, 1)  # torch writes to the output, too
    from pipelines.training.dry_run.one_rank import run_rank

    try:
        report = run_rank(case, int(sys.argv[1]))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(EXIT_USER_ERROR)
    with os.fdopen(answer, "w") as output:
        json.dump(asdict(report), output)
    os._exit(0)  # as an ending interpreter frees what torch still calls


if __name__ == "__main__":
    main()
