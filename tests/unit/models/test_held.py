"""One model is held, for as long as its files are the same."""

import gc
import weakref
from pathlib import Path

import torch

from pipelines.models.presets import preset
from pipelines.models.pretrained import save_pretrained
from pipelines.models.served import held_model, let_go
from pipelines.models.transformer import Transformer


def write_model(folder: Path, seed: int) -> Transformer:
    model = Transformer(preset("llama-100k").sized(64, 16))
    model.init_weights(seed)
    folder.mkdir(exist_ok=True)
    save_pretrained(model, folder, end_of_text=0)
    return model


def test_a_model_is_loaded_once_until_its_files_change(tmp_path: Path) -> None:
    write_model(tmp_path / "model", 0)
    first = held_model(tmp_path / "model")
    assert held_model(tmp_path / "model" / ".." / "model") is first
    assert not first.training
    changed = write_model(tmp_path / "model", 1)
    found = held_model(tmp_path / "model").state_dict()
    assert all(torch.equal(found[name], each) for name, each in changed.state_dict().items())


def test_no_more_than_one_is_held_and_none_after_letting_go(tmp_path: Path) -> None:
    seen = []
    for number in range(2):
        write_model(tmp_path / str(number), number)
        seen.append(weakref.ref(held_model(tmp_path / str(number))))
    gc.collect()
    assert [each() is not None for each in seen] == [False, True]
    let_go()
    gc.collect()
    assert seen[1]() is None
