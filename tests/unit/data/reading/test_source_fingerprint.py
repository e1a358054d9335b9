from pathlib import Path

from pipelines.data.reading.source_fingerprint import fingerprint_inputs
from pipelines.recipe.data_section import Data


def test_evaluation_sets_count_by_the_name_that_outputs_call_them_and_by_content(
    tmp_path: Path,
) -> None:
    def facts(name: str, text: str) -> object:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "test.jsonl").write_text(text)
        data = Data.model_validate({"decontamination": {"against": [str(tmp_path / name)]}})
        return fingerprint_inputs(data)["evaluation_sets"]

    assert facts("mmlu", "one") == facts("elsewhere/mmlu", "one")
    assert facts("mmlu", "one") != facts("gsm8k", "one")
    assert facts("mmlu", "one") != facts("mmlu", "two")
