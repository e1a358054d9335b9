"""Where the platform's parts are: read from the environment, with one machine as the default."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.core.errors import UserError

DEFAULT_RECIPE = "stdlib-code"
PROJECT = Path(__file__).resolve().parent.parent.parent
LOOPBACK = "127.0.0.1,localhost"
GPU_POOL = "gpu_jobs"  # Airflow's pool of the tasks that compute on GPUs; a slot is a whole job
SECRETS = "secrets"  # in the home
PORTS_FILE = "ports.json"  # in the home while the platform is up: the ports that it was given


@dataclass(frozen=True)
class Settings:
    """Addresses, ports and folders; each value has its environment variable."""

    home: Path  # PENSTOCK_HOME: state that lasts, shared by Airflow's workers and Ray's nodes
    airflow_port: int  # PENSTOCK_AIRFLOW_PORT
    mlflow_port: int  # PENSTOCK_MLFLOW_PORT
    ray_port: int  # PENSTOCK_RAY_PORT: the dashboard and the Jobs API
    ray_gcs_port: int  # PENSTOCK_RAY_GCS_PORT
    airflow_url: str  # PENSTOCK_AIRFLOW_URL
    mlflow_url: str  # MLFLOW_TRACKING_URI
    ray_url: str  # RAY_API_SERVER_ADDRESS
    datasets_url: str  # PENSTOCK_DATASETS_URL: the git repository of dataset versions, path or URL
    datasets_remote: str  # PENSTOCK_DATASETS_REMOTE: their files, a folder or s3://bucket/prefix
    signing_key: Path  # PENSTOCK_SIGNING_KEY: models are signed with it; its public half is KEY.pub
    database_url: str  # PENSTOCK_DATABASE_URL: a Postgres server; empty: SQLite files in the home
    ship_code: bool  # PENSTOCK_SHIP_CODE=1: Ray's nodes import from their disks, not the workspace
    nodes_command: str  # PENSTOCK_NODES: raises and ends nodes for one run; empty: none
    metrics: bool  # PENSTOCK_METRICS=1 on Ray's nodes: training shows its curves to Prometheus

    @property
    def runs(self) -> Path:
        """One workspace a DAG run."""
        return self.home / "runs"

    @property
    def secrets(self) -> Path:
        """Passwords, tokens and keys, one file each: where PENSTOCK_SECRETS says, or in the home.

        Those of the home are readable by the owner only.
        """
        return Path(os.environ.get("PENSTOCK_SECRETS") or self.home / SECRETS)

    @property
    def ray_token_path(self) -> Path:
        """The bearer token of Ray's Jobs API."""
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", self.secrets / "ray-token"))

    @property
    def airflow_password_path(self) -> Path:
        """The password of Airflow's user `admin`."""
        return self.secrets / "airflow-password"

    @property
    def ports(self) -> dict[str, int]:
        """The ports by the environment variable that changes each."""
        return {
            "PENSTOCK_AIRFLOW_PORT": self.airflow_port,
            "PENSTOCK_MLFLOW_PORT": self.mlflow_port,
            "PENSTOCK_RAY_PORT": self.ray_port,
            "PENSTOCK_RAY_GCS_PORT": self.ray_gcs_port,
        }


def load_settings() -> Settings:
    """Read the environment; nothing is cached, so a test can change it.

    A port that the environment does not name is the one the running platform was given, so that
    only `penstock up` needs the variables.
    """
    env = os.environ
    home = Path(env.get("PENSTOCK_HOME", PROJECT / ".penstock")).expanduser().absolute()
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
        mlflow_url=env.get("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{mlflow_port}"),
        ray_url=env.get("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{ray_port}"),
        datasets_url=_place("PENSTOCK_DATASETS_URL", home / "datasets.git"),
        datasets_remote=_place("PENSTOCK_DATASETS_REMOTE", home / "dataset-store"),
        signing_key=Path(_place("PENSTOCK_SIGNING_KEY", home / SECRETS / "model-signing.pem")),
        database_url=_database("PENSTOCK_DATABASE_URL"),
        ship_code=_flag("PENSTOCK_SHIP_CODE"),
        nodes_command=os.environ.get("PENSTOCK_NODES", ""),
        metrics=_flag("PENSTOCK_METRICS"),
    )


def no_proxy_variables() -> dict[str, str]:
    """The names that bypass a proxy: those the environment gives, and the loopback's.

    Both spellings get all of them, for a client reads one of the two.
    """
    given = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')},{LOOPBACK}"
    names = dict.fromkeys(name for each in given.split(",") if (name := each.strip()))
    value = "*" if "*" in names else ",".join(names)  # some clients know `*` only on its own
    return {"no_proxy": value, "NO_PROXY": value}


def bypass_proxy_on_loopback() -> None:
    """Let this process reach the local platform directly where HTTP_PROXY is set."""
    os.environ.update(no_proxy_variables())


def _running_ports(home: Path) -> dict[str, int]:
    try:
        ports: dict[str, int] = json.loads((home / PORTS_FILE).read_text())
    except FileNotFoundError:
        return {}
    return ports


def _place(variable: str, default: Path) -> str:
    """A URL as it is given; a path made absolute, as it is used from other working directories."""
    given = os.environ.get(variable) or str(default)
    is_url = "://" in given or re.match(r"[\w.@-]+:", given)
    return given if is_url else str(Path(given).expanduser().absolute())


def _database(variable: str) -> str:
    """A server's URL, which shows in environments and logs and so may hold no password."""
    given = os.environ.get(variable) or ""
    if not given:
        return ""
    url = urlsplit(given)
    if url.password is not None or "password=" in url.query:
        raise UserError(
            f"{variable} holds a password, which others could read: leave it out, and put it into "
            "~/.pgpass or the file that PGPASSFILE names"
        )
    if url.scheme != "postgresql" or not url.hostname or url.path not in ("", "/"):
        raise UserError(
            f"{variable}={given!r}: not a Postgres server as postgresql://USER@HOST:PORT; its "
            "databases are named airflow and mlflow"
        )
    return given


def _flag(variable: str) -> bool:
    text = os.environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise UserError(f"{variable}={text!r}: neither 0 nor 1")
    return text == "1"


def _port(variable: str, default: int, running: dict[str, int]) -> int:
    text = os.environ.get(variable) or str(running.get(variable, default))
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UserError(f"{variable}={text!r}: not a port number between 1 and 65535")
    return int(text)
