"""The environment of the platform's processes, and the part of it that a user's shell needs."""

import os
import shlex
import sys
from pathlib import Path

from pipelines.core.settings import PROJECT, Settings, no_proxy_variables
from pipelines.platform import warm_python
from pipelines.platform.airflow_config import mlflow_database

BIN = Path(sys.prefix) / "bin"
RAY_START_HOOK = "pipelines.platform.ray_start.guard"


def client_variables(settings: Settings) -> dict[str, str]:
    """Return the variables for finding and logging in to the platform; none is a secret."""
    return {
        **no_proxy_variables(),  # every part is on the loopback
        "PENSTOCK_HOME": str(settings.home),
        "PENSTOCK_PROJECT": str(PROJECT),
        **{variable: str(port) for variable, port in settings.ports.items()},
        "AIRFLOW_HOME": str(settings.home / "airflow"),
        "MLFLOW_TRACKING_URI": settings.mlflow_url,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_ADDRESS": f"127.0.0.1:{settings.ray_gcs_port}",
        "RAY_API_SERVER_ADDRESS": settings.ray_url,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(settings.ray_token_path),
        # Without it Ray rewrites 127.0.0.1 to the host's address and listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DVC_NO_ANALYTICS": "1",
        "GX_ANALYTICS_ENABLED": "false",
    }


def platform_environment(settings: Settings) -> dict[str, str]:
    """Return a platform process's environment: this process's and ours, with our commands first."""
    environment = dict(os.environ)
    # A dozen processes import the same thousand modules: without bytecode each compiles them again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.update(client_variables(settings))
    environment["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def server_variables(settings: Settings, runtime: Path) -> dict[str, str]:
    """Return the variables that only supervisord and its programs need besides the others."""
    return {
        "PENSTOCK_RUNTIME": str(runtime),  # `down` recognizes our processes by it ...
        "SPT_NOENV": "1",  # ... if setproctitle writes no title over the environment
        "PENSTOCK_CPUS": str(max(2, os.cpu_count() or 1)),  # training asks for two workers
        "RAY_START_HOOK": RAY_START_HOOK,
        "RAY_TMPDIR": str(runtime),
        warm_python.SOCKET: str(runtime / "warm-python.sock"),
        # Ray's own 15 and 100 s are too few if Python starts slowly, on a cold or busy machine.
        "RAY_raylet_start_wait_time_s": "240",
        "RAY_agent_register_timeout_ms": "240000",
        # The default ports are fixed, so a second Ray on the machine would collide.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
        "MLFLOW_BACKEND_STORE_URI": mlflow_database(settings),
        # Clients write artifacts straight into this folder; the server only reads them.
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": (settings.home / "mlflow" / "artifacts").as_uri(),
        # Do not start eight processes for prompt optimisation and trace jobs, which we do not use.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def shell_exports(settings: Settings) -> str:
    """Return the shell lines for `eval "$(penstock env)"`."""
    lines = [f"export {k}={shlex.quote(v)}" for k, v in client_variables(settings).items()]
    return "\n".join([*lines, f'export PATH={shlex.quote(str(BIN))}:"$PATH"'])
