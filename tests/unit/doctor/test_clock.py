"""Clocks, from chronyc and timedatectl."""

import pytest

from pipelines.doctor.clock import assess_chrony, assess_timedatectl, parse_chrony
from tests.unit.doctor.recordings import recorded, told

GOOD = recorded("chronyc_synchronised.txt")


@pytest.mark.parametrize(
    ("text", "state", "saw"),
    [
        (GOOD, "ok", "0.000003 s from AC69C04A"),
        (recorded("chronyc_not_synchronised.txt"), "problem", "chrony follows no time server"),
        (GOOD.replace("0.000003264", "4.117300000"), "warning", "the clock is 4.117300 s from"),
    ],
)
def test_chrony(text, state, saw):
    ((found, words),) = told(assess_chrony(parse_chrony(text)))
    assert found == state
    assert words.startswith(saw)


@pytest.mark.parametrize(("value", "state"), [("yes", "ok"), ("no", "problem")])
def test_systemd(value, state):
    text = f"Timezone=Etc/UTC\nLocalRTC=no\nCanNTP=yes\nNTP=yes\nNTPSynchronized={value}\n"
    assert told(assess_timedatectl(text))[0][0] == state
