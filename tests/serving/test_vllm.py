"""vLLM's engine answers with the tokens of transformers: each family, and adapters."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.export.hf_folder import export_adapter, export_whole
from tests.serving.models import (
    PROMPTS,
    SHAPES,
    TALK,
    TOKENS,
    Registered,
    answered_by_transformers,
    write_registered,
)
from tests.serving.servers import asked_of_vllm, environment, told_by_vllm

pytestmark = pytest.mark.serving
# vLLM knows adapters of these families; of the others it serves the merged weights.
ADAPTED = [shape for shape in SHAPES if shape not in ("gpt2", "gpt_neox", "gptj")]


def export(model: Registered, to: Path) -> Path:
    to.mkdir(parents=True)
    export_whole(model.folder, to)
    return to


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Registered]:
    folder = tmp_path_factory.mktemp("registered")
    made = [write_registered(shape, kind, folder) for shape in SHAPES for kind in ("chat", "lora")]
    return {each.name: each for each in made}


@pytest.fixture(scope="module")
def answered(models: dict[str, Registered], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vLLM's answers for each model that it could load."""
    environment("vllm")  # before models are written in vain
    folder = tmp_path_factory.mktemp("vllm")
    jobs = []
    for name, model in models.items():
        common = {"prompts": PROMPTS, "tokens": TOKENS, "dtype": "float32", "scored": None}
        talk = TALK if model.chat else None
        served = export(model, folder / "exports" / name)
        whole = {"name": name, "folder": str(served), "adapter": None, "talk": talk}
        jobs.append(common | whole)
        if model.base is not None and name.removesuffix("-lora") in ADAPTED:
            adapter = folder / "adapters" / name
            adapter.mkdir(parents=True)
            export_adapter(model.folder, adapter)
            beside = {"folder": str(model.base), "adapter": str(adapter), "talk": None}
            jobs.append(common | beside | {"name": f"{name}-adapter"})
    return asked_of_vllm(jobs, folder)


def read(answered: Path, name: str) -> Any:
    return [tuple(pair) for pair in told_by_vllm(answered, name)]


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_and_conversations(shape: str, models: dict[str, Registered], answered: Path) -> None:
    folder = models[f"{shape}-chat"].folder
    expected = answered_by_transformers(folder, PROMPTS) + answered_by_transformers(folder, [TALK])
    assert read(answered, f"{shape}-chat") == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_a_merged_adapter(shape: str, models: dict[str, Registered], answered: Path) -> None:
    expected = answered_by_transformers(models[f"{shape}-lora"].folder, PROMPTS)
    assert read(answered, f"{shape}-lora") == expected


@pytest.mark.parametrize("shape", ADAPTED)
def test_an_adapter_beside_its_base(
    shape: str, models: dict[str, Registered], answered: Path
) -> None:
    model = models[f"{shape}-lora"]
    assert model.base is not None
    adapted = answered_by_transformers(model.folder, PROMPTS)
    plain = answered_by_transformers(model.base, PROMPTS)
    assert adapted != plain
    assert read(answered, f"{shape}-lora-adapter") == adapted + plain
