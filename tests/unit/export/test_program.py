"""The graph as it was written, against transformers, on shapes that it was not traced on."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipelines.export import program
from pipelines.export.program import FILES, ProgramError, export_program, load_program
from tests.unit.export.models import CONTEXT, END, small, write_registered

MACHINE = (b"site-packages", str(Path(__file__).parents[3]).encode())


@torch.no_grad()
def logits(folder: Path, ids_BS: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids_BS).logits


@pytest.fixture(scope="module")
def folders(registered: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind."""
    made = {}
    for kind in FILES:
        made[kind] = tmp_path_factory.mktemp(kind)
        assert export_program(registered, made[kind], kind) < 1e-3
    return made


def is_the_model(path: Path, source: Path) -> None:
    run = load_program(path)
    generator = torch.Generator().manual_seed(1)
    for shape in [(1, 1), (1, CONTEXT), (5, 13)]:
        ids_BS = torch.randint(0, END, shape, generator=generator)
        torch.testing.assert_close(run(ids_BS), logits(source, ids_BS), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", list(FILES))
def test_any_batch_and_length(kind: str, folders: dict[str, Path], registered: Path) -> None:
    is_the_model(folders[kind] / FILES[kind], registered)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2-124m", "onnx"),
        ("qwen3-0.6b", "onnx"),
        ("mistral-7b", "torch-export"),
        ("phi3-mini-4k", "onnx"),
        ("gemma3-1b", "onnx"),
        ("gemma3-1b", "torch-export"),
        ("gpt-oss-20b", "torch-export"),
    ],
)
def test_other_families(name: str, kind: program.Kind, tmp_path: Path, made: Path) -> None:
    two_kinds = name in ("gemma3-1b", "gpt-oss-20b")
    kinds = {"sliding_window": 4, "full_attention_every": 2} if two_kinds else {}
    source = write_registered(small(name, layers=1 + len(kinds), **kinds), tmp_path / "source")
    export_program(source, made, kind)
    is_the_model(made / FILES[kind], source)


def test_padding_on_the_right_changes_nothing(folders: dict[str, Path]) -> None:
    run = load_program(folders["onnx"] / FILES["onnx"])
    ids_BS = torch.full((2, 9), END)
    ids_BS[:, :6] = torch.arange(12).view(2, 6)
    torch.testing.assert_close(run(ids_BS)[:, :6], run(ids_BS[:, :6]), atol=1e-4, rtol=1e-4)


def test_a_pt2_holds_no_pickle_and_no_path_of_this_machine(folders: dict[str, Path]) -> None:
    with zipfile.ZipFile(folders["torch-export"] / FILES["torch-export"]) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    for name, content in contents.items():
        assert not content.startswith((b"\x80", b"PK")), name  # pickles, and torch's zips of them
        assert not any(path in content for path in MACHINE), name
    (weights,) = (json.loads(c) for n, c in contents.items() if n.endswith("weights_config.json"))
    assert len(weights["config"]) > 10
    assert not any(each["use_pickle"] for each in weights["config"].values())


def test_onnx_names_what_goes_in_and_out(folders: dict[str, Path]) -> None:
    import onnx

    made = folders["onnx"]
    graph = onnx.load(made / "model.onnx", load_external_data=False).graph
    (given,), (gotten,) = graph.input, graph.output
    assert (given.name, gotten.name) == ("input_ids", "logits")
    assert [each.dim_param for each in given.type.tensor_type.shape.dim] == ["batch", "sequence"]
    assert not any(path in (made / "model.onnx").read_bytes() for path in MACHINE)
    assert (made / "tokenizer.json").is_file()


def test_a_graph_that_computes_something_else_is_an_error(
    registered: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_program
    monkeypatch.setattr(program, "load_program", lambda path: lambda ids: real(path)(ids) * 1.01)
    with pytest.raises(ProgramError, match=r"off by .* from the model's"):
        export_program(registered, made, "torch-export")
