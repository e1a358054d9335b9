"""The environment of the platform's processes, and the part of it that a user's shell needs."""

import os
import shlex
import sys
from pathlib import Path

from pipelines.core.settings import Settings, no_proxy_variables
from pipelines.platform.airflow_config import mlflow_database

BIN = Path(sys.prefix) / "bin"
RAY_START_HOOK = "pipelines.platform.ray_start.guard"


def client_variables(settings: Settings) -> dict[str, str]:
    """What any process needs to find and be let into the platform; holds no secret itself."""
    return {
        **no_proxy_variables(),  # all of it is on the loopback
        "PENSTOCK_HOME": str(settings.home),
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
    """The whole environment of a platform process: this one's, ours on top, our commands first."""
    environment = dict(os.environ)
    # A dozen processes import the same thousand modules: without bytecode each compiles them anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.update(client_variables(settings))
    environment["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def server_variables(settings: Settings, runtime: Path) -> dict[str, str]:
    """What only supervisord and its programs read, on top of `platform_environment`."""
    return {
        "PENSTOCK_RUNTIME": str(runtime),  # also how `down` knows a process for ours ...
        "SPT_NOENV": "1",  # ... unless setproctitle writes a process's title over its environment
        "PENSTOCK_CPUS": str(max(2, os.cpu_count() or 1)),  # training asks for two workers
        "RAY_START_HOOK": RAY_START_HOOK,
        "RAY_TMPDIR": str(runtime),
        # Ray's own 15 s are too few where Python starts slowly: on a cold or a busy machine.
        "RAY_raylet_start_wait_time_s": "240",
        # Fixed ports by default, which a second Ray on the machine would want too.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
        "MLFLOW_BACKEND_STORE_URI": mlflow_database(settings),
        # Clients write artifacts straight into this folder; the server only reads them.
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": (settings.home / "mlflow" / "artifacts").as_uri(),
        # Eight idle processes for prompt optimisation and trace jobs, none of which we use.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def shell_exports(settings: Settings) -> str:
    """Lines for `eval "$(penstock env)"`."""
    lines = [f"export {k}={shlex.quote(v)}" for k, v in client_variables(settings).items()]
    return "\n".join([*lines, f'export PATH={shlex.quote(str(BIN))}:"$PATH"'])
