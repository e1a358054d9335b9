"""What a user sees, in headless Chromium against the real Airflow, Ray and MLflow.

What the approval page shows and does is in `test_sweep.py`, which has a run that asks.
"""

import re

import pytest

from pipelines.run.records import stage_names

BAD_DOCUMENTS = 10_000_000  # more than the standard library has


@pytest.fixture(scope="module")
def failed_run(platform, first_run, webhook):
    """A run that ends at its data gate, and what `penstock run` says of it."""
    before = len(webhook)
    overrides = ["--set", f"validation.min_documents={BAD_DOCUMENTS}"]
    done = platform.penstock("run", *overrides, timeout=900)
    assert done.returncode == 2
    run_id = re.search(r"^run (\S+)", done.stdout, re.MULTILINE)[1]
    return run_id, done.stderr.strip(), before


def task_page(platform, run_id, task):
    return f"{platform.settings.airflow_url}/dags/llm_pipeline/runs/{run_id}/tasks/{task}"


def link(page, name):
    return page.get_by_role("link", name=name, exact=True).get_attribute("href")


def test_the_trigger_form_shows_the_recipes_fields_with_help_and_refuses_a_bad_value(
    page, platform, first_run, picture
):
    page.goto(f"{platform.settings.airflow_url}/dags/llm_pipeline")
    page.get_by_test_id("trigger-dag-button").click()
    page.get_by_role("button", name="Train").click()
    page.get_by_text("Optimizer steps", exact=True).wait_for()
    page.get_by_text("Peak learning rate", exact=True).wait_for()
    picture("trigger_form")
    page.locator("input[name='element_train.lr']").fill("-1")
    page.get_by_test_id("trigger-dag-submit").click()
    page.get_by_text("Invalid input for param train.lr").first.wait_for()
    page.keyboard.press("Escape")


def test_the_graph_shows_the_five_stages_behind_one_another(page, platform, first_run, picture):
    page.goto(f"{platform.settings.airflow_url}/dags/llm_pipeline/runs/{first_run['dag_run_id']}")
    page.get_by_role("button", name="Show Graph").click()
    nodes = page.locator(".react-flow__node")
    nodes.filter(has_text="register").wait_for()
    shown = [
        (box["x"], box["y"], name)
        for name in ("prepare", *stage_names())
        if (box := nodes.filter(has_text=re.compile(rf"^{name}")).first.bounding_box())
    ]
    assert [name for _, _, name in sorted(shown)] == ["prepare", *stage_names()]
    assert page.locator(".react-flow__edge").count() == len(stage_names())
    picture("graph")
    page.get_by_role("button", name="Show Grid").click()


def test_a_green_run_and_its_mlflow_run(page, platform, first_run, picture):
    settings, run_id = platform.settings, first_run["dag_run_id"]
    page.goto(f"{settings.airflow_url}/dags/llm_pipeline/runs/{run_id}")
    page.get_by_role("heading", name=run_id).wait_for()
    page.get_by_text("6 Task Instances").wait_for()
    assert page.get_by_text("Success", exact=True).count() == 7  # the run and its six tasks

    page.goto(f"{task_page(platform, run_id, 'train')}/details")
    address = link(page, "MLflow run")
    assert first_run["mlflow_run_id"] in address
    page.goto(address)
    page.get_by_text(run_id).first.wait_for()
    page.get_by_text("bits_per_byte").first.wait_for()
    page.get_by_text("seconds/train").first.wait_for()
    picture("mlflow_run")


def test_the_training_task_links_to_its_ray_job(page, platform, first_run):
    page.goto(f"{task_page(platform, first_run['dag_run_id'], 'train')}/details")
    address = link(page, "Ray job")
    assert address.startswith(f"{platform.settings.ray_url}/#/jobs/penstock-")


def test_the_data_gate_links_to_its_data_docs(page, platform, first_run):
    page.goto(f"{task_page(platform, first_run['dag_run_id'], 'validate')}/details")
    page.goto(link(page, "Data Docs"))
    page.frame_locator("iframe").get_by_text("expectations hold").wait_for()


def test_a_failing_validation_shows_its_line_and_its_link(
    page, platform, failed_run, webhook, picture
):
    run_id, said, before = failed_run
    line = said.removeprefix("error: ").partition(";")[0]
    assert str(BAD_DOCUMENTS) in line.replace(",", "").replace("_", "")
    page.goto(task_page(platform, run_id, "validate"))
    page.get_by_text(line[:40]).first.wait_for()  # in the task's log
    picture("failed_validation")
    page.goto(f"{task_page(platform, run_id, 'validate')}/details")
    page.goto(link(page, "Data Docs"))
    held = page.frame_locator("iframe").get_by_text("expectations hold").text_content()
    found, total = map(int, re.match(r"(\d+) of (\d+)", held).groups())
    assert found < total

    (notice,) = webhook[before:]
    assert (notice["event"], notice["run"], notice["task"]) == ("failed", run_id, "validate")
    assert notice["error"].startswith(line)
    assert set(notice["links"]) == {"run", "log", "mlflow"}
