"""Training's curves as gauges of Ray's own metrics, which each node's agent shows to Prometheus."""

from ray.util.metrics import Gauge

from pipelines.training.metrics import StepMetrics


class Gauges:
    """A gauge for each curve, `ray_penstock_train_loss` and its like, labelled with the run."""

    def __init__(self, run: str) -> None:
        self._run = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def show(self, metrics: StepMetrics) -> None:
        """Show a point, as long as Ray does: for two of its reports, 20 s by default."""
        for curve, value in (metrics.curves() | {"train/step": metrics.step}).items():
            name = gauge_name(curve)
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, tag_keys=tuple(self._run))
            self._gauges[name].set(value, self._run)


def gauge_name(curve: str) -> str:
    """Return the gauge's name of a curve as MLflow has it; Ray puts `ray_` before it."""
    return f"penstock_{curve.replace('/', '_')}"
