"""What an endpoint counts of its requests, in Prometheus' text format."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class ServingMetrics:
    """Requests, their times and how many are being answered, by the version that answers."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._registry = CollectorRegistry()
        self._answers = Counter(
            "penstock_serve_answers",
            "Answers that ended, by their HTTP status",
            ["version", "status"],
            registry=self._registry,
        )
        self._first = self._seconds("first_byte", "until the first byte of the engine's answer")
        self._whole = self._seconds("answer", "until the end of the engine's answer")
        self._in_flight = Gauge(
            "penstock_serve_in_flight",
            "Requests that are being answered",
            ["version"],
            registry=self._registry,
        )

    def refused(self, version: int, status: int) -> None:
        """Count a request that no engine answered."""
        self._answers.labels(version, status).inc()

    def timer(self, version: int) -> "Timer":
        """Begin to time a request."""
        return Timer(self._answers, self._first, self._whole, version)

    def text(self, in_flight: Mapping[int, int]) -> bytes:
        """Return all figures.

        Args:
            in_flight: The requests that are being answered now, by version.
        """
        from prometheus_client import generate_latest

        self._in_flight.clear()
        for version, number in in_flight.items():
            self._in_flight.labels(version).set(number)
        return generate_latest(self._registry)

    def _seconds(self, name: str, until: str) -> "Histogram":
        from prometheus_client import Histogram

        return Histogram(
            f"penstock_serve_{name}_seconds",
            f"Seconds from a request {until}",
            ["version"],
            registry=self._registry,
            buckets=_SECONDS,
        )


class Timer:
    """The times of one request."""

    def __init__(
        self, answers: "Counter", first: "Histogram", whole: "Histogram", version: int
    ) -> None:
        self._answers, self._first, self._whole, self._version = answers, first, whole, version
        self._began = time.perf_counter()
        self._has_begun = False

    def has_sent(self) -> None:
        """Note that a part of the answer came from the engine."""
        if not self._has_begun:
            self._has_begun = True
            self._first.labels(self._version).observe(time.perf_counter() - self._began)

    def has_ended(self, status: int) -> None:
        """Note the end of the answer."""
        self._whole.labels(self._version).observe(time.perf_counter() - self._began)
        self._answers.labels(self._version, status).inc()
