"""What an endpoint counts of its requests, in Prometheus' text format."""

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_LAST_BYTES = 1024  # of an answer, where its number of tokens is
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
        self._shadow_answers = Counter(
            "penstock_serve_shadow_answers",
            "Answers of the shadow, by their HTTP status",
            ["version", "status"],
            registry=self._registry,
        )
        self._shadow_compared = Counter(
            "penstock_serve_shadow_compared",
            "Answers of the shadow to requests at temperature 0, by whether they are the same",
            ["version", "answer"],
            registry=self._registry,
        )
        self._shadow_left_out = Counter(
            "penstock_serve_shadow_left_out",
            "Requests that the shadow did not get, as its queue was full",
            registry=self._registry,
        )
        self._shadow_whole = self._seconds("shadow_answer", "until the end of the shadow's answer")
        self._in_flight = Gauge(
            "penstock_serve_in_flight",
            "Requests that are being answered",
            ["version"],
            registry=self._registry,
        )

    def refused(self, version: int, status: int) -> None:
        """Count a request that no engine answered."""
        self._answers.labels(version, status).inc()

    def timer(self, version: int, began: float) -> "Timer":
        """Time a request that came at `began`, by `time.perf_counter`."""
        return Timer(self._answers, self._first, self._whole, version, began)

    def shadow_left_out(self) -> None:
        """Count a request for which the shadow's queue had no room."""
        self._shadow_left_out.inc()

    def shadow_answered(
        self, version: int, status: int, seconds: float, equal: bool | None
    ) -> None:
        """Count an answer of the shadow.

        Args:
            version: The shadow's version.
            status: The HTTP status.
            seconds: How long the whole answer took.
            equal: Whether it is the first model's answer; None if that says nothing.
        """
        self._shadow_answers.labels(version, status).inc()
        self._shadow_whole.labels(version).observe(seconds)
        if equal is not None:
            self._shadow_compared.labels(version, "same" if equal else "other").inc()

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
        self,
        answers: "Counter",
        first: "Histogram",
        whole: "Histogram",
        version: int,
        began: float,
    ) -> None:
        self._answers, self._first, self._whole = answers, first, whole
        self._version, self._began = version, began
        self._first_s: float | None = None
        self._last = b""

    def has_sent(self, chunk: bytes) -> None:
        """Note a part of the answer from the engine."""
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._began
            self._first.labels(self._version).observe(self._first_s)
        self._last = (self._last + chunk)[-_LAST_BYTES:]

    def has_ended(self, status: int) -> str:
        """Note the end of the answer, and return what to write in the log.

        A stream says the number of its tokens only if its client asked for it.
        """
        seconds = time.perf_counter() - self._began
        self._whole.labels(self._version).observe(seconds)
        self._answers.labels(self._version, status).inc()
        line = f"{status} in {seconds:.2f} s"
        if self._first_s is not None:
            line += f", its first byte after {self._first_s:.2f} s"
        if found := _TOKENS.findall(self._last):
            tokens = int(found[-1])
            line += f", {tokens} tokens, {tokens / seconds:.1f} tokens/s"
        return line
