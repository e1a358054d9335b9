"""Who reaches whom: matrices and links as recorded."""

import pytest

from pipelines.doctor.findings import NotHereError
from pipelines.doctor.topology import assess_nvlink, assess_topology, parse_nvlink, parse_topology
from tests.unit.doctor.recordings import recorded, told


def test_the_matrix_is_read_with_the_cards_own_names():
    found = parse_topology(recorded("topo_two_sockets.txt"))
    assert found.gpus == ("GPU0", "GPU1")
    assert found.nics == ("rocep4s0f0", "rocep4s0f1", "rocep137s0f0", "rocep137s0f1")
    assert found.links["GPU0", "GPU1"] == "SYS"
    assert found.links["GPU1", "rocep137s0f1"] == "PHB"


def test_a_header_that_is_underlined_is_read():
    """As newer drivers do it, into a pipe, too."""
    header, rest = recorded("topo_two_sockets.txt").split("\n", 1)
    underlined = f"\t\x1b[4m{header.removeprefix(chr(9))}\x1b[0m\n{rest}"
    assert parse_topology(underlined) == parse_topology(recorded("topo_two_sockets.txt"))


@pytest.mark.parametrize("text", ["", "\tGPU0\tGPU1\nGPU0\t X \n", "\tGPU0\nGPU0\t\n"])
def test_a_matrix_with_holes_is_refused(text):
    with pytest.raises(ValueError):
        parse_topology(text)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "topo_dgx_a100.txt",
            [
                ("ok", "8 GPUs, every two joined by NV12"),
                ("ok", "each GPU has a network card near it"),
            ],
        ),
        (
            "topo_two_sockets.txt",
            [("ok", "2 GPUs joined by PCIe (SYS), not NVLink"), ("ok", "each GPU has a network")],
        ),
        (
            "topo_a100_far_nic.txt",
            [
                ("ok", "4 GPUs, every two joined by NV12"),
                ("warning", "no network card is near GPU0, GPU1, GPU2, GPU3"),
            ],
        ),
        (
            "topo_v100_cube.txt",
            [
                ("ok", "16 of 28 pairs of GPUs are joined by NVLink, the others by SYS"),
                ("warning", "no network card is near GPU0, GPU1, GPU4, GPU5"),
            ],
        ),
    ],
)
def test_what_is_told_of_a_machine(name, lines):
    found = told(assess_topology(parse_topology(recorded(name))))
    assert len(found) == len(lines)
    for (state, saw), (expected, start) in zip(found, lines, strict=True):
        assert (state, saw[: len(start)]) == (expected, start)


def test_all_links_up():
    ((state, saw),) = told(assess_nvlink(parse_nvlink(recorded("nvlink_a100.txt"))))
    assert (state, saw) == ("ok", "8 GPUs with 12 NVLinks each of 25 GB/s")


def test_links_that_are_down_are_told_by_gpu():
    ((state, saw),) = told(assess_nvlink(parse_nvlink(recorded("nvlink_v100_inactive.txt"))))
    assert (state, saw) == ("problem", "NVLinks are down: 2 of 6 on GPU 3")


def test_bridges_that_nobody_fitted_may_be_meant():
    text = recorded("nvlink_a100.txt").replace("Link 11: 25 GB/s", "Link 11: <inactive>")
    ((state, saw),) = told(assess_nvlink(parse_nvlink(text)))
    assert state == "warning"
    assert saw.startswith("the same number of NVLinks is down on every GPU: 1 of 12 on GPU 0")


def test_a_gpu_that_lists_fewer_links_than_its_like_is_told():
    text = recorded("nvlink_a100.txt").replace("         Link 11: 25 GB/s\n", "", 1)
    ((state, saw),) = told(assess_nvlink(parse_nvlink(text)))
    assert (state, saw) == ("problem", "GPU 0 has fewer NVLinks than others' 12")


def test_cards_without_a_bridge_have_no_links_to_lose():
    with pytest.raises(NotHereError):
        assess_nvlink(parse_nvlink(recorded("nvlink_a100_pcie_none.txt")))
