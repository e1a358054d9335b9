"""Where the parts of the platform are, read from the environment; the default is one machine."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.core.cron import checked_cron
from pipelines.core.errors import UserError
from pipelines.core.product import find_project
from pipelines.core.storage import read_object

DEFAULT_RECIPE = "stdlib-code"
PROJECT = find_project() or Path.cwd()
LOOPBACK = "127.0.0.1,localhost"
GPU_POOL = "gpu_jobs"  # Airflow's pool for tasks that compute on GPUs; one slot is a whole job
BROKEN_RECIPES = "broken-recipes"  # in the home of Airflow: a DAG file that fails for each
SECRETS = "secrets"  # in the home
COLLECTION_LOCK = "gc.lock"  # in the home: held by what deletes old files, or must see none deleted
PORTS_FILE = "ports.json"  # in the home while the platform runs: the ports it uses


@dataclass(frozen=True)
class Settings:
    """Addresses, ports and folders; each value has its own environment variable."""

    home: Path  # PENSTOCK_HOME: lasting state, shared by Airflow's workers and Ray's nodes
    airflow_port: int  # PENSTOCK_AIRFLOW_PORT
    mlflow_port: int  # PENSTOCK_MLFLOW_PORT
    ray_port: int  # PENSTOCK_RAY_PORT: the dashboard and the Jobs API
    ray_gcs_port: int  # PENSTOCK_RAY_GCS_PORT
    airflow_url: str  # PENSTOCK_AIRFLOW_URL
    airflow_user: str  # PENSTOCK_AIRFLOW_USER: as whom Penstock logs in there
    mlflow_url: str  # MLFLOW_TRACKING_URI
    ray_url: str  # RAY_API_SERVER_ADDRESS
    datasets_url: str  # PENSTOCK_DATASETS_URL: the git repository of dataset versions, path or URL
    datasets_remote: str  # PENSTOCK_DATASETS_REMOTE: their files, a folder or s3://bucket/prefix
    signing_key: Path  # PENSTOCK_SIGNING_KEY: it signs models; its public key is in KEY.pub
    database_url: str  # PENSTOCK_DATABASE_URL: a Postgres server; if empty, SQLite in the home
    ship_code: bool  # PENSTOCK_SHIP_CODE=1: Ray's nodes import from their disks, not the workspace
    nodes_command: str  # PENSTOCK_NODES: starts and stops nodes for one run; empty: none
    gc_cron: str  # PENSTOCK_GC_CRON: when old files are deleted, in UTC; by default at 03:30
    metrics: bool  # PENSTOCK_METRICS=1 on Ray's nodes: training exports its curves to Prometheus
    notice: str  # PENSTOCK_NOTICE on a machine that may be taken away: who says that it will be

    @property
    def runs(self) -> Path:
        """The folder with one workspace for each DAG run."""
        return self.home / "runs"

    @property
    def secrets(self) -> Path:
        """The folder of passwords, tokens and keys: PENSTOCK_SECRETS, or a folder in the home.

        Each has its own file; only the owner can read those in the home.
        """
        return Path(os.environ.get("PENSTOCK_SECRETS") or self.home / SECRETS)

    @property
    def ray_token_path(self) -> Path:
        """The file with the bearer token of Ray's Jobs API."""
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", self.secrets / "ray-token"))

    @property
    def airflow_password_path(self) -> Path:
        """The file with the password of `airflow_user`."""
        return self.secrets / "airflow-password"

    @property
    def ports(self) -> dict[str, int]:
        """The ports, keyed by the environment variables that set them."""
        return {
            "PENSTOCK_AIRFLOW_PORT": self.airflow_port,
            "PENSTOCK_MLFLOW_PORT": self.mlflow_port,
            "PENSTOCK_RAY_PORT": self.ray_port,
            "PENSTOCK_RAY_GCS_PORT": self.ray_gcs_port,
        }


def load_settings() -> Settings:
    """Read the settings from the environment; nothing is cached, so a test can change them.

    A port that the environment does not set is that of the running platform, so that only
    `penstock up` needs the variables.
    """
    env = os.environ
    home = _home()
    running = _running_ports(home)
    airflow_port = _port("PENSTOCK_AIRFLOW_PORT", 8080, running)
    mlflow_port = _port("PENSTOCK_MLFLOW_PORT", 5000, running)
    ray_port = _port("PENSTOCK_RAY_PORT", 8265, running)
    return Settings(
        home=home,
        airflow_port=airflow_port,
        mlflow_port=mlflow_port,
        ray_port=ray_port,
        ray_gcs_port=_port("PENSTOCK_RAY_GCS_PORT", 6379, running),
        airflow_url=env.get("PENSTOCK_AIRFLOW_URL", f"http://127.0.0.1:{airflow_port}"),
        airflow_user=env.get("PENSTOCK_AIRFLOW_USER") or "admin",
        mlflow_url=env.get("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{mlflow_port}"),
        ray_url=env.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{ray_port}"),
        datasets_url=_place("PENSTOCK_DATASETS_URL", home / "datasets.git"),
        datasets_remote=_place("PENSTOCK_DATASETS_REMOTE", home / "dataset-store"),
        signing_key=Path(_place("PENSTOCK_SIGNING_KEY", home / SECRETS / "model-signing.pem")),
        database_url=_database("PENSTOCK_DATABASE_URL"),
        ship_code=_flag("PENSTOCK_SHIP_CODE"),
        nodes_command=os.environ.get("PENSTOCK_NODES", ""),
        gc_cron=_cron("PENSTOCK_GC_CRON", "30 3 * * *"),
        metrics=_flag("PENSTOCK_METRICS"),
        notice=env.get("PENSTOCK_NOTICE", ""),
    )


def _home() -> Path:
    if given := os.environ.get("PENSTOCK_HOME"):
        return Path(given).expanduser().absolute()
    if find_project() is None:
        raise UserError(
            f"{PROJECT} is in no project: `penstock init FOLDER` makes one, and commands run in it"
        )
    return PROJECT / ".penstock"


def no_proxy_variables() -> dict[str, str]:
    """Return variables that bypass the proxy for the environment's hosts and for the loopback.

    Both spellings list all hosts, because a client reads only one of the two.
    """
    given = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')},{LOOPBACK}"
    names = dict.fromkeys(name for each in given.split(",") if (name := each.strip()))
    value = "*" if "*" in names else ",".join(names)  # some clients accept only a lone `*`
    return {"no_proxy": value, "NO_PROXY": value}


def bypass_proxy_on_loopback() -> None:
    """Let this process reach the local platform directly even if HTTP_PROXY is set."""
    os.environ.update(no_proxy_variables())


def _running_ports(home: Path) -> dict[str, int]:
    try:
        return read_object(home / PORTS_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _place(variable: str, default: Path) -> str:
    """Return the variable's URL unchanged, or its path made absolute for other working folders."""
    given = os.environ.get(variable) or str(default)
    is_url = "://" in given or re.match(r"[\w.@-]+:", given)
    return given if is_url else str(Path(given).expanduser().absolute())


def _database(variable: str) -> str:
    """Return a server's URL, which environments and logs show, so it must not hold a password."""
    given = os.environ.get(variable) or ""
    if not given:
        return ""
    url = urlsplit("")
    with suppress(ValueError):  # a bracket alone, say, which the last error tells
        url = urlsplit(given)
    if url.password is not None or "password=" in url.query:
        raise UserError(
            f"{variable} holds a password, which others could read: remove it, and put it into "
            "~/.pgpass or the file that PGPASSFILE names"
        )
    if url.scheme != "postgresql" or not url.hostname or url.path not in ("", "/"):
        raise UserError(
            f"{variable}={given!r}: this is not a Postgres server URL such as "
            "postgresql://USER@HOST:PORT; its databases are named airflow and mlflow"
        )
    return given


def _flag(variable: str) -> bool:
    text = os.environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise UserError(f"{variable}={text!r}: it must be 0 or 1")
    return text == "1"


def _cron(variable: str, default: str) -> str:
    text = os.environ.get(variable) or default
    try:
        return text if text == default else checked_cron(text)
    except ValueError as error:
        raise UserError(f"{variable}={text!r}: {error}") from None


def _port(variable: str, default: int, running: dict[str, int]) -> int:
    text = os.environ.get(variable) or str(running.get(variable, default))
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise UserError(f"{variable}={text!r}: it must be a port number from 1 to 65535")
    return int(text)
