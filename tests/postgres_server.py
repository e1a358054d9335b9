"""A real Postgres of a test's own, which asks for a password; a second one can take its place."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pipelines.core.machine import free_port

DATABASES = ("airflow", "mlflow")
_USER = "penstock"


class PostgresServer:
    """Its databases are there and empty.

    Attributes:
        port: Where it listens, and whoever takes its place.
        password: Of the user that PENSTOCK_DATABASE_URL names.
    """

    def __init__(self, folder: Path) -> None:
        """Start it in an empty folder."""
        # Postgres refuses to run as root, and so do its files to be root's.
        self._owner = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._folder = folder
        self._data = folder / "first"
        self.port, self.password = free_port(), secrets.token_urlsafe()
        password_file = folder / "password"
        password_file.write_text(self.password)
        for path in (folder, password_file):
            shutil.chown(path, self._owner)
        initdb = ["initdb", f"--username={_USER}", f"--pwfile={password_file}"]
        self._run(*initdb, "--auth=scram-sha-256", "--no-sync", f"--pgdata={self._data}")
        self.start()
        login = {"password": self.password, "autocommit": True}
        with psycopg.connect(f"{self.url}/postgres", **login) as connection:
            for name in DATABASES:
                connection.execute(f"CREATE DATABASE {name}")

    @property
    def url(self) -> str:
        """As PENSTOCK_DATABASE_URL has it."""
        return f"postgresql://{_USER}@127.0.0.1:{self.port}"

    @property
    def pgpass(self) -> str:
        """A line of the file that PGPASSFILE names."""
        return f"127.0.0.1:{self.port}:*:{_USER}:{self.password}\n"

    def rows(self, database: str, query: str) -> list[tuple[object, ...]]:
        """What a query finds."""
        with psycopg.connect(f"{self.url}/{database}", password=self.password) as connection:
            return connection.execute(query).fetchall()

    def start(self) -> None:
        """Start it again where it was."""
        self._control(self._data, f"--options={self._options(self.port)}", "start")

    def stop(self) -> None:
        """End it at once, as a crash does."""
        self._control(self._data, "--mode=immediate", "stop")

    def replicate(self) -> "Replica":
        """Start a second server that has each commit before a client is told of it."""
        return Replica(self)

    def _take_over(self, data: Path) -> None:
        self._data = data
        self.start()

    def _options(self, port: int) -> str:
        return f"-h 127.0.0.1 -p {port} -k {self._folder} -F"  # -F: no fsync

    def _control(self, data: Path, *arguments: str) -> None:
        control = ["pg_ctl", f"--pgdata={data}", "--wait", f"--log={data}.log"]
        self._run(*control, *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        runuser = ["runuser", "-u", self._owner, "--"] if os.geteuid() == 0 else []
        # Not captured: a server that is started keeps the files open.
        with (self._folder / "commands.log").open("ab") as log:
            subprocess.run(
                [*runuser, str(_program(program)), *arguments],
                check=True,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=os.environ | {"PGPASSWORD": self.password},
            )


class Replica:
    """Follows another server, and may take its place."""

    def __init__(self, first: PostgresServer) -> None:
        """Copy what the first one has, and follow it."""
        self._first, self._data = first, first._folder / "second"
        self._port = free_port()
        where = ["--host=127.0.0.1", f"--port={first.port}", f"--username={_USER}"]
        copied = ["--wal-method=stream", "--write-recovery-conf", f"--pgdata={self._data}"]
        first._run("pg_basebackup", *where, *copied, "--no-sync", "--checkpoint=fast")
        first._control(self._data, f"--options={first._options(self._port)}", "start")
        with psycopg.connect(
            f"{first.url}/postgres", password=first.password, autocommit=True
        ) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")

    def take_over(self) -> None:
        """The first server dies, and this one answers at its address with all that it had told."""
        self._first.stop()
        self._first._control(self._data, "promote")
        self._first._control(self._data, "--mode=immediate", "stop")  # it changes its port
        with (self._data / "postgresql.auto.conf").open("a") as file:
            file.write("synchronous_standby_names = ''\n")  # nobody follows it
        self._first._take_over(self._data)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Skips the test where no Postgres is installed."""
    if not _program("initdb"):
        pytest.skip("no Postgres is installed (on Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="penstock-postgres-") as folder:
        server = PostgresServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()


def _program(name: str) -> str | None:
    """A program of the server; Debian keeps them off PATH."""
    folders = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
