"""A real MLflow server on SQLite, made once a session: its migrations take three seconds."""

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXPERIMENT = "unit"

_numbers = itertools.count()


def pytest_collection_finish():
    """All that was imported lives as long as the process: no collection looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory):
    from pipelines.tracking.mlflow_client import open_client

    folder = tmp_path_factory.mktemp("mlflow")
    with _mlflow_server(f"sqlite:///{folder / 'mlflow.db'}", folder / "artifacts") as uri:
        open_client(uri).create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
        yield uri


@contextmanager
def _mlflow_server(store: str, artifacts: Path) -> Iterator[str]:
    """In a thread: as a process of its own it would import MLflow once more."""
    from mlflow.server import app, handlers
    from sqlalchemy import Engine, event
    from werkzeug.serving import make_server

    @event.listens_for(Engine, "connect")
    def never_wait_for_the_disk(connection, _):
        connection.execute("PRAGMA synchronous = OFF")

    handlers.initialize_backend_stores(store, store, str(artifacts))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture
def mlflow_client(mlflow_uri, monkeypatch):
    from pipelines.tracking.mlflow_client import open_client

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return open_client()


@pytest.fixture
def mlflow_run(mlflow_client):
    """The id of a fresh run."""
    experiment = mlflow_client.get_experiment_by_name(EXPERIMENT)
    return mlflow_client.create_run(experiment.experiment_id).info.run_id


@pytest.fixture
def home(tmp_path, mlflow_client, monkeypatch):
    """A home with a key pair, as `penstock up` makes it."""
    from pipelines.core.settings import load_settings
    from pipelines.registry.signing import ensure_key_pair

    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    ensure_key_pair(load_settings().signing_key)
    return tmp_path / "home"


@pytest.fixture
def name(home):
    """Of a model that nobody registered yet."""
    return f"model-{next(_numbers)}"


@pytest.fixture
def folders(tmp_path):
    """A model, and what lies beside it."""
    import numpy as np
    from safetensors.numpy import save_file

    model, card = tmp_path / "model", tmp_path / "card"
    model.mkdir()
    card.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"weight": np.arange(64, dtype=np.float32)}, model / "model.safetensors")
    (card / "README.md").write_text("# a model")
    return [model, card]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder of a model of some thousand weights, with a tokenizer of bytes; do not change it."""
    from pipelines.data.tokens.tokenizer import byte_tokenizer, save_tokenizer
    from pipelines.models.config import DecoderConfig
    from pipelines.models.pretrained import save_pretrained
    from pipelines.models.transformer import Transformer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tokenizer(byte_tokenizer(), folder)
    shape = DecoderConfig(
        layers=1, width=16, heads=2, kv_heads=1, hidden=32, vocab_size=257, context_length=64
    )
    model = Transformer(shape)
    model.init_weights(0)
    save_pretrained(model, folder, end_of_text=256)
    return folder
