import json

import pytest

from pipelines.core.errors import UserError
from pipelines.registry.integrity import check_folder


@pytest.fixture
def model(folders):
    return folders[0]


def refused(model):
    with pytest.raises(UserError) as error:
        check_folder(model, "m@1")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_a_run_registers_is_let_in(model):
    (model / "adapter").mkdir()
    (model / "adapter" / "adapter_config.json").write_text('{"auto_mapping": null}')
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"auto_map": 3}}}')  # a token
    (model / "merges.txt").write_text("a b\n")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "uncommitted.diff").write_bytes(b"diff --git a/x b/x\n\xe9")
    check_folder(model, "m@1")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "weights.pt", "model.pkl", "evil.py", "run", "MLmodel.exe"]
)
def test_a_pickle_or_program_is_refused_by_name(model, name):
    (model / name).write_bytes(b"\x80\x04.")
    assert refused(model).startswith(f"m@1: {name}: a model holds safetensors, JSON and text only")


def test_a_pickle_under_a_name_that_is_let_in(model):
    for name in ("tokenizer.json", "README.md", "model-2.safetensors", "uncommitted.diff"):
        (model / name).write_bytes(b"\x80\x04\x95\x0b\x00")
        assert refused(model).startswith(f"m@1: {name}: ")
        (model / name).unlink()


@pytest.mark.parametrize("length", [0, 7, 60, -1])
def test_a_truncated_file_of_weights(model, length):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    assert refused(model).startswith("m@1: model.safetensors: not a whole safetensors file: ")


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json", "sub/config.json"])
def test_a_configuration_that_asks_for_remote_code(model, where):
    (model / "sub").mkdir()
    (model / where).write_text(json.dumps({"text": {"auto_map": {"AutoConfig": "evil--x.C"}}}))
    assert refused(model) == f"m@1: {where}: 'auto_map' asks for code to be imported; remove it"


@pytest.mark.parametrize("path", ["../other/model.safetensors", "/etc/passwd", "sub/w.safetensors"])
def test_an_index_that_climbs_out_of_the_folder(model, path):
    index = {"weight_map": {"weight": path}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"index.json: '{path}' is a path that leads out of the folder" in refused(model)


def test_an_index_that_names_what_is_missing_or_is_none(model):
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "model-2.safetensors"}}')
    assert "'model-2.safetensors' is missing" in refused(model)
    index.write_text("[]")
    assert "it has no 'weight_map'" in refused(model)


def test_a_link_is_refused_whatever_it_names(model):
    (model / "LICENSE.md").symlink_to(model / "config.json")
    assert refused(model) == "m@1: LICENSE.md: a link or a device cannot be part of a model"


def test_what_is_no_json(model):
    (model / "config.json").write_text("{")
    assert refused(model).startswith("m@1: config.json: not valid JSON: ")
