"""InfiniBand and RoCE ports, from ibstat."""

import pytest

from pipelines.doctor.network import assess_network, parse_ibstat, read_ports
from tests.unit.doctor.recordings import recorded, told


def test_ports_are_read():
    ports = parse_ibstat(recorded("ibstat_h100_polling.txt"))
    assert len(ports) == 12
    polling = next(port for port in ports if port.device == "mlx5_11")
    assert (polling.kind, polling.physical, polling.rate) == ("MT4129", "Polling", 40)
    assert not polling.active
    assert polling.layer == "Ethernet"


def test_a_whole_node_is_one_line():
    ((state, saw),) = told(assess_network(parse_ibstat(recorded("ibstat_h100_all_active.txt"))))
    assert state == "ok"
    assert "x Ethernet 400 Gbit/s" in saw or "x InfiniBand 400 Gbit/s" in saw


def test_a_port_that_looks_for_its_cable_is_told():
    found = told(assess_network(parse_ibstat(recorded("ibstat_h100_polling.txt"))))
    assert ("warning", "mlx5_11 (Ethernet) looks for the other end of its cable") in found


def test_a_link_without_subnet_manager_is_told():
    found = told(assess_network(parse_ibstat(recorded("ibstat_no_subnet_manager.txt"))))
    assert found[0] == ("warning", "mlx5_0 (InfiniBand) has a link and no subnet manager")
    assert found[1] == ("problem", "none of 1 ports is active")


def test_a_slow_rail_is_told():
    text = recorded("ibstat_h100_all_active.txt").replace("Rate: 400", "Rate: 200", 1)
    found = told(assess_network(parse_ibstat(text)))
    assert [state for state, _ in found] == ["warning", "ok"]
    assert "runs at 200 Gbit/s, its like at 400" in found[0][1]


@pytest.fixture
def kernel(tmp_path):
    """Files of a port, as gpud's recording of an H100's has them."""

    def add(device: str, state: str, physical: str, rate: str) -> None:
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (tmp_path / device / "hca_type").write_text("MT4129\n")
        texts = {"state": state, "phys_state": physical, "rate": rate, "link_layer": "InfiniBand"}
        for name, text in texts.items():
            (port / name).write_text(f"{text}\n")

    add("mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    add("mlx5_1", "2: INIT", "5: LinkUp", "400 Gb/sec (4X NDR)")
    add("mlx5_2", "1: DOWN", "3: Disabled", "")
    return tmp_path


def test_without_ibstat_the_kernels_files_tell(kernel):
    assert told(assess_network(list(read_ports(kernel)))) == [
        ("warning", "mlx5_1 (InfiniBand) has a link and no subnet manager"),
        ("ok", "1 x InfiniBand 400 Gbit/s; 1 ports are disabled"),
    ]
