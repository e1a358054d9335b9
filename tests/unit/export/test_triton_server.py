"""The repository against Triton's published schema, and its model file run as the server does."""

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from pipelines.core.errors import UserError
from pipelines.export.triton_server import Kind, config_text, export_triton, triton_name
from tests.unit.export import triton_stand_in
from tests.unit.export.models import CONTEXT, PROMPTS, small, write_registered
from tests.unit.export.triton_started import greedy, read_config, request, start, texts


@pytest.fixture(scope="module")
def repository(registered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    export_triton(registered, path, "my model", 3, "python")
    return path


def test_the_repository_is_laid_out_as_triton_wants_it(repository: Path) -> None:
    config = read_config(repository / "my-model" / "config.pbtxt")
    assert config.name == "my-model"  # the folder's, or the server refuses to load it
    assert config.backend == "python"
    assert config.dynamic_batching.max_queue_delay_microseconds > 0
    assert config.max_batch_size > 1  # 0 would say that there are no batches
    assert config.version_policy.latest.num_versions == 1
    assert config.instance_group[0].kind == ModelInstanceGroup.KIND_AUTO
    assert [(each.name, each.optional) for each in config.input] == [
        ("text_input", False),
        ("max_tokens", True),
    ]
    assert [each.name for each in config.output] == ["text_output"]
    version = repository / "my-model" / "3"
    assert {path.name for path in version.iterdir()} == {
        "__pycache__",
        "model",
        "model.py",
        "triton_rows.py",
        "triton_streams.py",
    }


def test_a_model_that_streams_is_decoupled(registered: Path, tmp_path: Path) -> None:
    version = export_triton(registered, tmp_path, "m", 1, "python-stream")
    config = read_config(version.parent / "config.pbtxt")
    assert config.model_transaction_policy.decoupled
    assert not config.HasField("dynamic_batching")  # a request must not wait to join a batch
    assert [(each.name, each.optional) for each in config.input] == [
        ("text_input", False),
        ("max_tokens", True),
        ("stream", True),
    ]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_name_can_not_break_the_config(kind: Kind) -> None:
    name = 'a" } backend: "évil\n'
    assert text_format.Parse(config_text(name, kind), ModelConfig()).name == name
    assert triton_name("my/model v1.2") == "my-model-v1.2"
    assert triton_name("../größe") == "-gr--e"


@pytest.mark.parametrize("name", ["llama-100k", "gpt2-124m", "pythia-160m"])
def test_the_python_back_end_gives_the_tokens_of_generate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever requests come in one batch, and however long each is."""
    source = write_registered(small(name), tmp_path / "source")
    version = export_triton(source, tmp_path / "repository", "m", 1, "python")
    model = start(version, monkeypatch)
    asked = [3, 12, 7, 9]
    expected = [greedy(source, prompt, n) for prompt, n in zip(PROMPTS, asked, strict=True)]
    assert len(set(expected)) == len(expected)
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    together = model.execute([request(PROMPTS[part], asked[part]) for part in parts])
    assert [texts(each) for each in together] == [expected[part] for part in parts]


@pytest.mark.parametrize("name", ["llama-100k", "gpt2-124m"])
def test_a_long_answer_beside_a_long_prompt_stays_within_the_context(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_registered(small(name), tmp_path / "source")
    model = start(export_triton(source, tmp_path / "r", "m", 1, "python"), monkeypatch)
    prompts, asked = ["ab", "y" * (CONTEXT - 2), "abc"], [CONTEXT - 4, 2, 5]
    (response,) = model.execute([request(prompts, asked)])
    expected = [greedy(source, prompt, n) for prompt, n in zip(prompts, asked, strict=True)]
    assert texts(response) == expected


def test_a_wrong_request_spoils_no_other(
    repository: Path, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = start(repository / "my-model" / "3", monkeypatch)
    texts_B1, most_B1 = np.array([[b"\xff"]], dtype=object), np.array([[5]], np.int32)
    long, good, none, huge, no_text, no_utf8 = model.execute(
        [
            request(["x" * CONTEXT], [5]),
            request(["ab"], [5]),
            request(["ab"], [0]),
            request(["ab"], [2**31 - 1]),
            triton_stand_in.InferenceRequest([triton_stand_in.Tensor("max_tokens", most_B1)]),
            triton_stand_in.InferenceRequest([triton_stand_in.Tensor("text_input", texts_B1)]),
        ]
    )
    assert long.error().code() == triton_stand_in.TritonError.INVALID_ARG
    assert long.error().message() == (
        "text_input has 32 tokens and max_tokens is 5, but the model sees 32 in all"
    )
    assert texts(good) == [greedy(registered, "ab", 5)]
    assert "max_tokens is 0" in none.error().message()
    assert "max_tokens is 2147483647" in huge.error().message()
    assert no_text.error().message() == "text_input is missing; it is the text to continue"
    assert no_utf8.error().message().startswith("text_input must be UTF-8 text: ")
    assert len(texts(model.execute([request([""], [4])])[0])) == 1


def test_the_config_chooses_the_weights_type(
    registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = export_triton(registered, tmp_path, "m", 1, "python")
    path = tmp_path / "m" / "config.pbtxt"
    path.write_text(path.read_text().replace('"auto"', '"bfloat16"'))
    assert start(version, monkeypatch)._rows.dtype == torch.bfloat16
    export_triton(registered, tmp_path, "m", 2, "python")
    assert '"bfloat16"' in path.read_text()  # what a user tuned stays
    assert sorted(each.name for each in (tmp_path / "m").iterdir()) == ["1", "2", "config.pbtxt"]


def test_a_server_that_polls_sees_one_change(
    registered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads a model anew after any change in its folder; Python's bytecode would be one."""
    version = export_triton(registered, tmp_path, "m", 1, "python")
    before = sorted((tmp_path / "m").rglob("*"))
    start(version, monkeypatch)
    during: list[Path] = []

    def export_whole(_: Path, folder: Path) -> None:
        assert folder.parent.parent == tmp_path  # it skips a hidden folder beside the models
        assert folder.parent.name.startswith(".")
        during.extend(sorted((tmp_path / "m").rglob("*")))

    monkeypatch.setattr("pipelines.export.triton_server.export_whole", export_whole)
    export_triton(registered, tmp_path, "m", 2, "python")
    assert during == before


def test_vllm_is_told_where_the_model_lies(registered: Path, tmp_path: Path) -> None:
    version = export_triton(registered, tmp_path, "m", 4, "vllm")
    assert json.loads((version / "model.json").read_text())["model"] == f"{version}/model"
    assert (version / "model" / "model.safetensors").is_file()
    assert read_config(tmp_path / "m" / "config.pbtxt").backend == "vllm"
    there = export_triton(registered, tmp_path, "n", 4, "vllm", Path("/models"))
    assert json.loads((there / "model.json").read_text())["model"] == "/models/n/4/model"


def test_a_version_that_is_there_and_another_back_end_are_refused(
    registered: Path, tmp_path: Path
) -> None:
    export_triton(registered, tmp_path, "m", 1, "python")
    with pytest.raises(UserError, match="exists already"):
        export_triton(registered, tmp_path, "m", 1, "python")
    with pytest.raises(UserError, match="of the kind python, not vllm"):
        export_triton(registered, tmp_path, "m", 2, "vllm")
    with pytest.raises(UserError, match="of the kind python, not python-stream"):
        export_triton(registered, tmp_path, "m", 2, "python-stream")
    export_triton(registered, tmp_path, "n", 1, "python-stream")
    export_triton(registered, tmp_path, "n", 2, "python-stream")
    with pytest.raises(UserError, match="of the kind python-stream, not python;"):
        export_triton(registered, tmp_path, "n", 3, "python")
    assert not (tmp_path / "m" / "2").exists()


def test_the_model_file_needs_nothing_of_penstock(repository: Path) -> None:
    for path in (repository / "my-model" / "3").glob("*.py"):
        assert not re.search("^(import|from) pipelines", path.read_text(), re.MULTILINE)
