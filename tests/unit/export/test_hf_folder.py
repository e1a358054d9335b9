"""Folders that transformers and peft load, compared with the model that was registered."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.core.errors import UserError
from pipelines.core.storage import write_json
from pipelines.export.hf_folder import export_adapter, export_bf16, export_whole
from pipelines.export.source import check, new_folder
from pipelines.models import pretrained
from pipelines.models.pretrained import load_pretrained
from tests.unit.export.models import small, tokens, write_adapted, write_registered


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()(tokens()).logits.float()


@torch.no_grad()
def test_the_whole_model_is_what_was_registered(registered: Path, made: Path) -> None:
    export_whole(registered, made)
    names = {path.name for path in made.iterdir()}
    assert names == {path.name for path in registered.iterdir()} - {"MLmodel"}
    torch.testing.assert_close(
        theirs(made), load_pretrained(registered)(tokens()), atol=1e-4, rtol=1e-4
    )


def test_bf16_is_the_same_in_half_the_bytes(registered: Path, made: Path) -> None:
    export_bf16(registered, made)
    before, after = (load_file(each / "model.safetensors") for each in (registered, made))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(torch.bfloat16))
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    assert theirs(made).isfinite().all()


def test_a_model_in_several_files_stays_in_several(
    tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "FILE_BYTES", 100_000)
    source = write_registered(small(), tmp_path / "source")
    files = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(files) > 2
    export_bf16(source, made)
    assert sorted(path.name for path in made.glob("*.safetensors")) == files
    index = json.loads((made / "model.safetensors.index.json").read_text())
    sizes = [each.nbytes for name in files for each in load_file(made / name).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    torch.testing.assert_close(theirs(made), theirs(source), atol=0.5, rtol=0.1)


@torch.no_grad()
def test_an_adapter_over_its_base_is_the_registered_model(tmp_path: Path, made: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, source = write_adapted(tmp_path)
    export_adapter(source, made)
    assert json.loads((made / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "a-base"
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), made).eval()
    logits = model(tokens()).logits
    torch.testing.assert_close(logits, theirs(source), atol=1e-4, rtol=1e-4)
    assert (logits - theirs(base)).abs().max() > 0.1


def test_of_an_adapted_model_the_whole_one_has_no_adapter_beside_it(
    tmp_path: Path, made: Path
) -> None:
    _, source = write_adapted(tmp_path)
    export_whole(source, made)
    assert not list(made.rglob("*adapter*"))
    assert torch.equal(theirs(made), theirs(source))


def test_a_model_without_an_adapter_has_none_to_export(registered: Path, made: Path) -> None:
    with pytest.raises(UserError, match=r"trained without an adapter.*--format huggingface"):
        export_adapter(registered, made)


def _add(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"\x80\x04.")


def _ask_for_code(folder: Path) -> None:
    path = folder / "config.json"
    write_json(path, json.loads(path.read_text()) | {"auto_map": {"AutoModel": "evil.Model"}})


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _link(folder: Path) -> None:
    (folder / "extra.json").symlink_to("/etc/hostname")


def _climb(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    write_json(
        folder / "model.safetensors.index.json", {"weight_map": {"a": "../elsewhere.safetensors"}}
    )


REFUSED = {
    "a pickle": (_add("pytorch_model.bin"), "pytorch_model.bin: .*a pickle can run code"),
    "code": (_add("modeling.py"), "modeling.py: a model holds safetensors"),
    "remote code": (_ask_for_code, "config.json: 'auto_map' asks for code"),
    "half a file": (_truncate, "model.safetensors: not a whole safetensors file"),
    "a link": (_link, "extra.json: a link"),
    "a path outside": (_climb, "is a path that leads out of the folder"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_folder_that_can_do_harm_is_refused(what: str, registered: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(registered, source)
    spoil, line = REFUSED[what]
    spoil(source)
    with pytest.raises(UserError, match=line):
        check(source)


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    for path in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(UserError, match="exists already"), new_folder(path):
            pass
    assert (tmp_path / "full" / "mine").read_text() == "keep"


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "to") as folder:
        (folder / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
