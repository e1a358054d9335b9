"""What befalls a training run, for whoever keeps its logbook."""

from pipelines.run.logbook import Kind


class Events:
    """Told on every process alike; this one keeps nothing."""

    def begun(self, step: int) -> None:
        """Training begins, or goes on from the checkpoint after `step`."""

    def note(
        self,
        kind: Kind,
        key: str,
        cause: str,
        done: str,
        *,
        step: int | None = None,
        seconds_lost: float | None = None,
    ) -> None:
        """Something happened.

        Args:
            kind: As in the logbook.
            key: Of the event: another note with the same one is the same event.
            cause: Why.
            done: What was done about it.
            step: Optimizer steps done by then.
            seconds_lost: Of every process, spent on what has to be done again.
        """

    def ended(self, step: int, model_hash: str) -> None:
        """The last step is done, and the model of it is written."""
