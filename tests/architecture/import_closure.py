"""Which of the project's modules a stage's command imports, directly or not.

`python tests/architecture/import_closure.py` writes them into dvc.yaml, where they are deps: a
changed line in any of them changes the stage's cache key.
"""

from pathlib import Path

import grimp
from ruamel.yaml import YAML

PROJECT = Path(__file__).resolve().parent.parent.parent
ENTRY_MODULES = {
    "preprocess": ["ray_jobs.preprocess"],
    "validate": ["pipelines.stages.validate", "pipelines.stages.runner"],
    "train": ["ray_jobs.train"],
    "evaluate": ["ray_jobs.evaluate"],
    "register": ["pipelines.stages.register", "pipelines.stages.runner"],
}


def module_files(stage: str) -> list[str]:
    """Paths of the modules that a stage imports, sorted."""
    graph = grimp.build_graph("pipelines", "ray_jobs")
    graph.remove_module("ray_jobs.ad_hoc")  # an ad-hoc job runs beside the cache, not in it
    modules = set()
    for entry in ENTRY_MODULES[stage]:
        modules |= {entry} | graph.find_upstream_modules(entry)
    return sorted(_path(module) for module in modules)


def yaml_deps(stage: str) -> list[str]:
    """The Python files among a stage's deps in dvc.yaml, sorted."""
    stages = YAML().load(PROJECT / "dvc.yaml")["stages"]
    return sorted(dep for dep in stages[stage]["deps"] if dep.endswith(".py"))


def _path(module: str) -> str:
    path = PROJECT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.relative_to(PROJECT).as_posix()


def main() -> None:
    yaml = YAML()
    document = yaml.load(PROJECT / "dvc.yaml")
    for stage, values in document["stages"].items():
        data = [dep for dep in values["deps"] if not dep.endswith(".py")]
        values["deps"] = data + module_files(stage)
    yaml.dump(document, PROJECT / "dvc.yaml")


if __name__ == "__main__":
    main()
