"""Network planes, on interfaces as the kernel shows them."""

import pytest

from pipelines.core.errors import UserError
from pipelines.doctor.planes import Interface, assess_planes, parse_planes, read_interface
from tests.unit.doctor.recordings import told

GIB = 1 << 30


def interface(name: str, gib: float | None = 30, *, up: bool = True, roots: str = "") -> Interface:
    speed = None if gib is None else gib * GIB
    return Interface(name, up, speed, frozenset(roots.split(",") if roots else [name]))


def judged(text: str, *interfaces: Interface, **environ: str) -> list[tuple[str, str]]:
    named = parse_planes(text)
    by_name = {each.name: each for each in interfaces}
    found = {name: by_name.get(name) for names in named.values() for name in names}
    return told(assess_planes(named, found, environ))


def test_planes_are_named():
    assert parse_planes("storage=ib4,ib5 gpu=ib0") == {"storage": ["ib4", "ib5"], "gpu": ["ib0"]}


@pytest.mark.parametrize("text", ["disk=eth0", "gpu=", "gpu"])
def test_what_is_no_plane_is_refused(text):
    with pytest.raises(UserError, match="planes are storage, gpu, inference, users"):
        parse_planes(text)


@pytest.mark.parametrize(
    ("plane", "gib", "state"),
    [
        ("storage", 100, "ok"),
        ("storage", 40, "warning"),
        ("gpu", 46, "ok"),  # more than its class is no fault
        ("gpu", 11, "warning"),
        ("inference", 1.2, "ok"),
        ("inference", 0.1, "warning"),
        ("users", 0.11, "ok"),
        ("users", 0.01, "warning"),
        ("users", None, "warning"),
    ],
)
def test_each_plane_has_its_class(plane, gib, state):
    found = judged(f"{plane}=eth0", interface("eth0", gib), NCCL_SOCKET_IFNAME="=eth0")
    assert [each for each, _ in found] == [state]


def test_the_links_of_a_plane_add_up():
    ((state, saw),) = judged("storage=a,b", interface("a", 46), interface("b", 46))
    assert (state, saw) == ("ok", "storage (a, b): links of 92 GiB/s, its class is 80-120")


def test_an_interface_that_is_down_or_missing_is_told():
    assert judged("users=eth0", interface("eth0", up=False)) == [("problem", "users: eth0 is down")]
    assert judged("users=eth9")[0] == ("problem", "users: no interface eth9 on this node")


def test_storage_and_nccl_on_one_link_are_told_also_by_vlan():
    found = judged(
        "storage=vlan7 gpu=ib0",
        interface("vlan7", 100, roots="ib0"),
        interface("ib0"),
        NCCL_SOCKET_IFNAME="ib",
    )
    assert found[-1] == ("warning", "storage and NCCL share ib0")


@pytest.mark.parametrize(
    ("told_to_nccl", "fits"),
    [
        ("", False),
        ("eth", False),
        ("ib", True),
        ("=ib0", True),
        ("=ib", False),
        ("^eth,lo", True),
        ("^ib", False),
        ("^=ib0", False),
    ],
)
def test_nccl_must_be_told_the_plane(told_to_nccl, fits):
    found = judged("gpu=ib0", interface("ib0"), NCCL_SOCKET_IFNAME=told_to_nccl)
    assert ("warning" not in [state for state, _ in found]) == fits


@pytest.fixture
def kernel(tmp_path):
    def add(name: str, speed: str, *lower: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "speed").write_text(f"{speed}\n")
        (folder / "operstate").write_text("up\n")
        for each in lower:
            (folder / f"lower_{each}").mkdir()

    add("ens1", "100000")
    add("ens2", "100000")
    add("bond0", "200000", "ens1", "ens2")
    add("bond0.7", "200000", "bond0")
    add("eth0", "-1")
    add("ib0", "-1")
    port = tmp_path / "ib0/device/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return tmp_path


def test_a_vlan_on_a_bond_leads_to_its_cards(kernel):
    found = read_interface("bond0.7", kernel)
    assert found == Interface("bond0.7", True, 25e9, frozenset({"ens1", "ens2"}))


def test_the_rate_of_infiniband_is_its_ports(kernel):
    assert read_interface("ib0", kernel) == Interface("ib0", True, 50e9, frozenset({"ib0"}))


def test_a_virtual_card_tells_no_rate(kernel):
    assert read_interface("eth0", kernel) == Interface("eth0", True, None, frozenset({"eth0"}))
    assert read_interface("eth9", kernel) is None


@pytest.mark.parametrize(("state", "up"), [("up", True), ("unknown", True), ("down", False)])
def test_a_driver_that_tells_no_state_is_taken_for_up(kernel, state, up):
    (kernel / "eth0" / "operstate").write_text(f"{state}\n")
    found = read_interface("eth0", kernel)
    assert found is not None
    assert found.up == up
