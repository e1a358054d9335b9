"""Secrets are planted, a run goes through every stage, and then they are looked for everywhere."""

MAY_HOLD = ("secrets", "airflow/airflow.cfg")  # of the home; both are their owner's alone


def test_no_secret_leaves_its_place(platform, watched_run) -> None:
    values = {
        path.name: value
        for path in platform.settings.secrets.iterdir()
        if len(value := path.read_text().strip()) > 8
    }
    assert len(values) >= 6
    sought = {name: value.encode() for name, value in (values | watched_run.planted).items()}
    shown = {
        "arguments of processes": "\n".join(watched_run.arguments).encode(),
        "what the command printed": (watched_run.printed + watched_run.errors).encode(),
    }
    home = platform.settings.home
    for folder in (home, platform.runtime):
        for path in folder.rglob("*"):
            inside = str(path.relative_to(folder))
            if path.is_file() and not path.is_symlink() and not inside.startswith(MAY_HOLD):
                shown[str(path)] = path.read_bytes()
    assert any(name.endswith("airflow.db") for name in shown)  # XComs, and each run's conf
    assert any(name.endswith("mlflow.db") for name in shown)
    found = [
        (name, place) for name, value in sought.items() for place in shown if value in shown[place]
    ]
    assert found == []
