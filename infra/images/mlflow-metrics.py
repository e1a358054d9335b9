"""Shows Prometheus what an MLflow server counts: mlflow-metrics.py PORT.

The server's own /metrics asks for a login.
"""

import sys
import threading

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)  # of the folder PROMETHEUS_MULTIPROC_DIR
start_http_server(int(sys.argv[1]), registry=registry)
threading.Event().wait()
