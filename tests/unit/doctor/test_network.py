"""InfiniBand and RoCE ports, from ibstat."""

from pipelines.doctor.network import judge, parse_ibstat
from tests.unit.doctor.recordings import recorded, told


def test_ports_are_read():
    ports = parse_ibstat(recorded("ibstat_h100_polling.txt"))
    assert len(ports) == 12
    polling = next(port for port in ports if port.device == "mlx5_11")
    assert (polling.kind, polling.physical, polling.rate) == ("MT4129", "Polling", 40)
    assert not polling.active
    assert polling.layer == "Ethernet"


def test_a_whole_node_is_one_line():
    ((state, saw),) = told(judge(parse_ibstat(recorded("ibstat_h100_all_active.txt"))))
    assert state == "ok"
    assert "x Ethernet 400 Gbit/s" in saw or "x InfiniBand 400 Gbit/s" in saw


def test_a_port_that_looks_for_its_cable_is_told():
    found = told(judge(parse_ibstat(recorded("ibstat_h100_polling.txt"))))
    assert ("warning", "mlx5_11 (Ethernet) looks for the other end of its cable") in found


def test_a_link_without_subnet_manager_is_told():
    found = told(judge(parse_ibstat(recorded("ibstat_no_subnet_manager.txt"))))
    assert found[0] == ("warning", "mlx5_0 (InfiniBand) has a link and no subnet manager")
    assert found[1] == ("problem", "none of 1 ports is active")


def test_a_slow_rail_is_told():
    text = recorded("ibstat_h100_all_active.txt").replace("Rate: 400", "Rate: 200", 1)
    found = told(judge(parse_ibstat(text)))
    assert [state for state, _ in found] == ["warning", "ok"]
    assert "runs at 200 Gbit/s, its like at 400" in found[0][1]
