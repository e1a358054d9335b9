"""supervisord.conf as supervisord itself reads it, with a home that would need quoting."""

from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from pipelines.core.settings import load_settings
from pipelines.platform.environment import platform_environment, server_variables
from pipelines.platform.parts import NAMES
from pipelines.platform.supervisor import CONFIG, GROUP


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerOptions:
    home = tmp_path / "50% of ; the #1 it's 'home'"
    (home / "services").mkdir(parents=True)
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.setenv("PENSTOCK_RAY_PORT", "18266")
    settings = load_settings()
    environment = platform_environment(settings) | server_variables(settings, tmp_path)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(home / "services")
    options = ServerOptions()
    options.realize(["-c", str(CONFIG)])
    return options


def test_the_programs_are_the_parts_in_one_group(options: ServerOptions) -> None:
    (group,) = options.process_group_configs
    assert group.name == GROUP
    assert {program.name for program in group.process_configs} == set(NAMES)


def test_logs_lie_in_the_home_however_it_is_named(options: ServerOptions) -> None:
    services = load_settings().home / "services"
    (group,) = options.process_group_configs
    for program in group.process_configs:
        assert Path(program.stdout_logfile).absolute() == services / f"{program.name}.log"
    assert Path(options.logfile) == services / "supervisord.log"


def test_commands_hold_ports_but_no_path_of_the_home(options: ServerOptions) -> None:
    (group,) = options.process_group_configs
    commands = {program.name: program.command for program in group.process_configs}
    assert "--dashboard-port=18266" in commands["ray"].split()
    assert not any("home" in command for command in commands.values())
    assert not any("0.0.0.0" in command for command in commands.values())
