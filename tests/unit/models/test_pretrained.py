import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.core.errors import UserError
from pipelines.models.config import DecoderConfig
from pipelines.models.pretrained import (
    load_pretrained,
    named_places,
    read_weights,
    save_pretrained,
)
from pipelines.models.transformer import Transformer


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Transformer:
    shape = DecoderConfig(
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        hidden=48,
        vocab_size=61,
        context_length=24,
        rope_theta=5000.0,
        tie_embeddings=request.param,
    )
    model = Transformer(shape)
    model.init_weights(seed=1)
    return model.eval()


def test_what_is_saved_is_loaded(model: Transformer, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert not list(tmp_path.glob("*.bin"))


BERT = {"model_type": "bert", "hidden_size": 32}


def broken(model: Transformer, folder: Path, what: str) -> None:
    """Save, then spoil."""
    save_pretrained(model, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if what == "pickle":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        weights.unlink()
    elif what == "tensor":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights)
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:500])
    elif what == "shape":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 50}))
    elif what == "type":
        config.write_text(json.dumps(BERT))
    elif what == "key":
        values = json.loads(config.read_text())
        del values["hidden_size"]
        config.write_text(json.dumps(values))
    elif what == "json":
        config.write_text("{")
    elif what == "config":
        config.unlink()
    else:
        part = "model-00001-of-00002.safetensors"
        climbs = what == "climb"
        index = {"weight_map": {"model.norm.weight": f"../{part}" if climbs else part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("pickle", "pytorch_model.bin is a pickle"),
        ("tensor", "norm.weight is missing"),
        ("cut", "can't be read"),
        ("shape", "config.json says"),
        ("type", "model_type = 'bert'; supported are"),
        ("key", r"config\.json: hidden_size = None"),
        ("json", r"config\.json: not valid JSON"),
        ("config", r"no config\.json"),
        ("part", r"model-00001-of-00002\.safetensors: missing"),
        ("climb", r"which lies outside of the folder"),
    ],
)
def test_a_bad_folder_is_one_line(model: Transformer, tmp_path: Path, what: str, line: str) -> None:
    broken(model, tmp_path, what)
    with pytest.raises(UserError, match=line) as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_weights_are_read_straight_into_their_places(model: Transformer, tmp_path: Path) -> None:
    """So that a model is never in memory twice."""
    save_pretrained(model, tmp_path)
    places = named_places(model)
    read = list(read_weights(tmp_path, model.config, places))
    assert {name for name, _ in read} == places.keys()
    assert all(tensor is places[name] for name, tensor in read)


def test_weights_of_another_type_are_converted_one_by_one(
    model: Transformer, tmp_path: Path
) -> None:
    save_pretrained(model.bfloat16(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].dtype == torch.float32
        assert torch.equal(tensor.float(), again.state_dict()[name])
