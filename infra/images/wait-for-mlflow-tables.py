"""Waits until the tables of MLflow and of its users are of this version: see prepare-mlflow.sh."""

import os
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

import sqlalchemy
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

PATIENCE_S = float(os.environ.get("PATIENCE_S", "600"))
# The folder of each part's migrations, and the table in which it keeps how far they are.
PARTS = {
    "store/db_migrations": "alembic_version",
    "server/auth/db/migrations": "alembic_version_auth",
}


def missing(engine: sqlalchemy.Engine) -> list[str]:
    """Return the parts whose tables are of another version, or not there."""
    mlflow = Path(
        str(distribution("mlflow").locate_file("mlflow"))
    )  # not imported: that takes seconds
    found = []
    with engine.connect() as connection:
        for part, table in PARTS.items():
            context = MigrationContext.configure(connection, opts={"version_table": table})
            wanted = ScriptDirectory(str(mlflow / part)).get_heads()
            if set(context.get_current_heads()) != set(wanted):
                found.append(part)
    return found


def main() -> None:
    """Look every two seconds, for ten minutes."""
    engine = sqlalchemy.create_engine(os.environ["MLFLOW_BACKEND_STORE_URI"])
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            parts = missing(engine)
        except sqlalchemy.exc.OperationalError as error:
            parts = [f"database: {error.orig}"]
        if not parts:
            return
        if time.monotonic() > deadline:
            sys.exit(f"error: not of this version after {PATIENCE_S:.0f} s: {', '.join(parts)}")
        time.sleep(2)


if __name__ == "__main__":
    main()
