"""What serving costs, on rented devices and on one's own."""

from dataclasses import dataclass

from pipelines.planning.hardware import Hardware

_HOURS_A_MONTH = 365.25 * 24 / 12
_MONTHS_A_YEAR = 12
_MILLION = 1e6


@dataclass(frozen=True)
class Owned:
    """What a device of one's own costs; the first two figures are the owner's.

    Attributes:
        price: US dollars for a device, with its share of the machine and its network.
        kwh_price: US dollars for a kWh.
        years: Over which the price is written off.
        overhead: Power drawn by the site over that of its devices (PUE), and by the machine around
            them. 1.56 is the mean of Uptime Institute's survey of 2024.
        rack_kw_month: US dollars a month for a place in a rack, by the kW that a device draws.
            184 is the mean asking rent of 250 to 500 kW in CBRE's North America Data Center Trends
            of the second half of 2024.
    """

    price: float
    kwh_price: float
    years: float = 4.0
    overhead: float = 1.56
    rack_kw_month: float = 184.0

    def month(self, hardware: Hardware) -> float:
        """US dollars a month for one device at full load."""
        kw = hardware.watts / 1000
        power = kw * self.overhead * self.kwh_price * _HOURS_A_MONTH
        return self.price / (self.years * _MONTHS_A_YEAR) + power + kw * self.rack_kw_month


@dataclass(frozen=True)
class Costs:
    """US dollars for one replica that is always there.

    Attributes:
        instance_month: For a month.
        user_month: For a month and each sequence that it answers at once.
        million_tokens: For a million tokens of answers, at full load.
    """

    instance_month: float
    user_month: float
    million_tokens: float


def rented_month(hardware: Hardware, hourly_price: float | None) -> float | None:
    """US dollars a month for one device; None where no price is known."""
    hourly = hardware.hourly_price if hourly_price is None else hourly_price
    return None if hourly is None else hourly * _HOURS_A_MONTH


def costs(device_month: float, devices: int, users: int, tokens_per_second: float) -> Costs:
    """Of a replica of so many devices with so many users at once."""
    month = device_month * devices
    tokens = tokens_per_second * 3600 * _HOURS_A_MONTH
    return Costs(month, month / users, month / tokens * _MILLION)
