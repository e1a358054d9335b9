"""dvc.yaml says what the code says."""

import ast
from pathlib import Path

import yaml

from pipelines.core.settings import DEFAULT_RECIPE, PROJECT
from pipelines.recipe.recipe_files import dump_yaml, get_dotted, leaves, load_recipe
from pipelines.stage_cache.open_workspace import environment
from pipelines.stages.stage import Resources, find_stage

DVC = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]


def test_each_paragraph_is_of_a_stage_which_says_the_same():
    for name, said in DVC.items():
        stage = find_stage(name)
        assert stage.name == name
        module = (
            "pipelines.stages" if stage.resources is Resources.PROCESS else "ray_jobs.stage_job"
        )
        assert said["cmd"] == f"python -m {module} {name}"
        assert tuple(dep[8:] for dep in said["deps"] if dep.startswith("outputs/")) == stage.inputs
        assert callable(stage.function())
    folders = {path.parent.name for path in (PROJECT / "pipelines/stages").glob("*/__init__.py")}
    assert folders == set(DVC)


def test_the_dag_has_them_in_this_order():
    dag = ast.parse((PROJECT / "dags/llm_pipeline.py").read_text())
    calls = [node for node in ast.walk(dag) if isinstance(node, ast.Call)]
    asked = [call.args[0].value for call in calls if getattr(call.func, "id", "") == "stage_task"]
    assert [*asked, "register"] == list(DVC)


def test_each_stage_that_is_cached_has_the_fingerprint_of_its_code():
    for name, stage in DVC.items():
        if not stage.get("always_changed"):
            assert {"code.json": [name]} in stage["params"]
            assert stage["meta"]["code"][0] == find_stage(name).run


def test_dvc_yaml_fits_on_a_screen():
    assert len((PROJECT / "dvc.yaml").read_text().splitlines()) <= 80


def test_params_exist_in_the_recipe():
    recipe = load_recipe(DEFAULT_RECIPE).to_dict()
    for stage in DVC.values():
        for key in stage["params"][0]["params.yaml"]:
            get_dotted(recipe, key)


# A change of these alone changes no stage's result: paths, revisions and mixtures stand for
# content that source.json holds, workers are in environment.json, readers read alike, a price
# changes what a run cost, not what it made, and a dry run comes before the run.
KEYS_OF_NO_STAGE = {
    "adapter.init_from",
    "description",
    "data.decontamination.against",
    "data.instruction.chat_template",
    "data.name",
    "data.reader",
    "data.source.mixture",
    "data.source.path",
    "data.source.revision",
    "data.tokenizer.path",
    "model.init_from",
    "resources.dry_run",
    "resources.price_per_cpu_hour",
    "resources.price_per_gpu_hour",
    "resources.max_stage_hours",
    "resources.workers",
}


def test_every_key_of_a_recipe_is_some_stages_parameter():
    read = {key for stage in DVC.values() for key in stage["params"][0]["params.yaml"]}
    unread = {
        leaf.key
        for leaf in leaves()
        if not any(leaf.key == key or leaf.key.startswith(f"{key}.") for key in read)
    }
    assert {key for key in unread if not key.startswith("schedule.")} == KEYS_OF_NO_STAGE


def test_all_that_the_environment_names_is_some_stages_parameter():
    read = {
        key
        for stage in DVC.values()
        for group in stage["params"]
        for key in group.get("environment.json", ())
    }
    values = environment(PROJECT, load_recipe(DEFAULT_RECIPE))
    extensions = {f"extensions.{stage}" for stage in values.pop("extensions")}
    # The whole lock is there to be looked up: code.json has each stage's own packages.
    assert read | {"lock"} == set(values) | extensions


def test_params_yaml_is_the_default_recipe():
    assert (PROJECT / "params.yaml").read_text() == dump_yaml(load_recipe(DEFAULT_RECIPE))


def test_a_restored_copy_can_never_write_into_the_cache():
    config = (PROJECT / ".dvc/config").read_text()
    assert 'type = "reflink,copy"' in config


def test_the_lock_of_a_run_is_neither_committed_nor_ignored():
    assert not Path(PROJECT / "dvc.lock").exists()
    assert "dvc.lock" not in (PROJECT / ".gitignore").read_text()
