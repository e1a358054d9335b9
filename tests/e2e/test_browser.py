"""What a person sees, in headless Chromium against the real Airflow and MLflow."""

import re
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here; on Debian: apt-get install chromium"
)


@pytest.fixture(scope="module")
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def test_a_person_logs_in_sees_the_green_run_and_opens_its_mlflow_run(page, platform, first_run):
    settings = platform.settings
    run_id = first_run["dag_run_id"]

    page.goto(settings.airflow_url)
    page.fill("input[name=username]", "admin")
    page.fill("input[name=password]", settings.airflow_password_path.read_text().strip())
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"^(?!.*login).*$"))

    page.goto(f"{settings.airflow_url}/dags/llm_pipeline/runs/{run_id}")
    page.get_by_role("heading", name=run_id).wait_for()
    page.get_by_text("6 Task Instances").wait_for()
    assert page.get_by_text("Success", exact=True).count() == 7  # the run and its six tasks

    page.goto(f"{settings.airflow_url}/dags/llm_pipeline/runs/{run_id}/tasks/train/details")
    link = page.get_by_role("link", name="MLflow run")
    address = link.get_attribute("href")
    assert first_run["mlflow_run_id"] in address

    page.goto(address)
    page.get_by_text(run_id).first.wait_for()
    page.get_by_text("bits_per_byte").first.wait_for()


def test_the_training_task_links_to_its_ray_job(page, platform, first_run):
    page.goto(
        f"{platform.settings.airflow_url}/dags/llm_pipeline/runs/"
        f"{first_run['dag_run_id']}/tasks/train/details"
    )
    address = page.get_by_role("link", name="Ray job").get_attribute("href")
    assert address.startswith(f"{platform.settings.ray_url}/#/jobs/penstock-")


def test_the_data_gate_links_to_its_data_docs(page, platform, first_run):
    page.goto(
        f"{platform.settings.airflow_url}/dags/llm_pipeline/runs/"
        f"{first_run['dag_run_id']}/tasks/validate/details"
    )
    page.goto(page.get_by_role("link", name="Data Docs").get_attribute("href"))
    page.frame_locator("iframe").get_by_text("expectations hold").wait_for()
