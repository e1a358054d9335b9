from pathlib import Path

import pytest
import torch

from pipelines.core.errors import UserError
from pipelines.models.config_json import write_config
from pipelines.models.presets import PRESETS, preset
from pipelines.models.transformer import Transformer

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gemma3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "phi3-mini-4k": 3_821_079_552,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-160m": 162_322_944,
}
NANOGPT_SMALL = 804_096  # with 65 characters and block 64


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_it_says(name: str) -> None:
    shape = PRESETS[name] if PRESETS[name].vocab_size else PRESETS[name].sized(300, 16)
    with torch.device("meta"):
        model = Transformer(shape)
    assert model.parameter_count == shape.parameters
    assert shape.parameters == PUBLISHED.get(name, shape.parameters)
    write_config(shape, "float32")  # its family can say it


def test_a_name_tells_the_size() -> None:
    assert PRESETS["gpt3-175b"].parameters == pytest.approx(175e9, rel=0.005)
    assert PRESETS["gpt-j-6b"].parameters == pytest.approx(6.05e9, rel=0.001)
    assert PRESETS["llama-1b"].parameters == pytest.approx(1.07e9, rel=0.01)
    assert PRESETS["shakespeare-char"].sized(65, 64).parameters <= NANOGPT_SMALL


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean llama-1m"):
        preset("llama1m")


def test_presets_import_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, pipelines.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0
