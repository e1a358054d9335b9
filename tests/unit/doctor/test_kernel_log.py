"""Xid messages in the kernel's log."""

from pipelines.doctor.kernel_log import Xid, assess_kernel_log, parse_xids
from tests.unit.doctor.recordings import recorded, told

GSP = "dmesg_xid_119.txt"


def test_a_gpu_whose_firmware_hangs_is_told():
    ((state, saw),) = told(assess_kernel_log(parse_xids(recorded(GSP))))
    assert state == "warning"
    assert saw.startswith("Xid 119 of 0000:9b:00, 1 times in the log, at last: pid=2024380")


def test_messages_of_all_ages_are_read():
    """With and without PCI: or process, as drivers since 2012 wrote them."""
    text = (
        "[ 4909.922970] NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d 00000104\n"
        "[ 276.3] NVRM: Xid (PCI:0000:01:00): 79, pid=1122, GPU has fallen off the bus.\n"
        "[ 276.4] NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.\n"
        "[ 999.9] NVRM: Xid (PCI:0000:01:00): 13, pid=7, name=python, Graphics Exception\n"
    )
    counts = {xid: len(words) for xid, words in parse_xids(text).items()}
    assert counts == {Xid("0000:01:00", 13): 2, Xid("0000:01:00", 79): 1, Xid("a GPU", 79): 1}


def test_what_programs_cause_is_no_fault_of_a_gpu():
    text = "NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=python, MMU Fault\n" * 3
    assert told(assess_kernel_log(parse_xids(text))) == [
        ("ok", "no Xid of a sick GPU in the log; of programs: 3 x Xid 31")
    ]
    assert told(assess_kernel_log(parse_xids("eth0: link up\n"))) == [
        ("ok", "no Xid of a sick GPU in the log")
    ]
