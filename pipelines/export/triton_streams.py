"""Requests to a decoupled model of Triton's Python back end, answered by a thread, token by token.

It lies beside `model.py` on the server.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from triton_rows import Job, Pieces, Rows, decoded


def texts_response(texts: Sequence[str]) -> Any:
    """Return a response with the texts, [B, 1] of bytes."""
    array = np.array([[text.encode()] for text in texts], dtype=object)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", array)])


def send_error(sender: Any, message: str, code: int) -> None:
    """Send an error as the last response of a request."""
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Request:
    """A request that is being answered."""

    def __init__(self, sender: Any, jobs: list[Job], tokenizer: Any, streams: bool) -> None:
        self.jobs = jobs
        self.over = False  # it has its last response
        self._sender, self._tokenizer = sender, tokenizer
        self._pieces = Pieces(tokenizer) if streams else None
        self._sent_text = False

    def give_up_if_cancelled(self) -> None:
        """End the request if its client is gone."""
        if self._sender.is_cancelled():
            self.fail("the client cancelled the request", pb_utils.TritonError.CANCELLED)

    def answer(self) -> None:
        """Send what there is to send after another token of each text."""
        ended = all(job.ended for job in self.jobs)
        texts: list[str] = []
        if self._pieces is not None:
            piece = self._pieces.next(self.jobs[0])
            if piece or (ended and not self._sent_text):  # a client expects at least one response
                texts = [piece]
        elif ended:
            texts = [decoded(self._tokenizer, job.made) for job in self.jobs]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0
        if texts:
            self._sender.send(texts_response(texts), flags)
            self._sent_text = True
        elif ended:
            self._sender.send(flags=flags)
        self.over = ended

    def fail(self, message: str, code: int) -> None:
        """End the request with an error."""
        self.over = True
        for job in self.jobs:
            job.ended = True
        send_error(self._sender, message, code)


class Streams:
    """The requests of a model and the thread that answers them; new ones join between two tokens.

    Args:
        rows: The model; only the thread uses it.
        most: How many texts are answered at a time; the requests beyond it wait.
    """

    def __init__(self, rows: Rows, most: int) -> None:
        self._rows, self._most = rows, most
        self._waiting: deque[Request] = deque()
        self._stops = False
        self._changed = Condition()  # guards the two above
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Answer a request as soon as there is room for it."""
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        running: list[Request] = []
        while True:
            with self._changed:
                while not (running or self._waiting or self._stops):
                    self._changed.wait()
                if self._stops:
                    return
                new = self._take()
            running = self._make_a_token(running, new)

    def _take(self) -> list[Request]:
        """Return the waiting requests that there is room for, in order."""
        taken: list[Request] = []
        room = self._most - len(self._rows.jobs)
        while self._waiting and len(self._waiting[0].jobs) <= room:
            taken.append(self._waiting.popleft())
            room -= len(taken[-1].jobs)
        return taken

    def _make_a_token(self, running: list[Request], new: list[Request]) -> list[Request]:
        """Make a token of each text and send what can be sent; return the unfinished requests."""
        for request in [*running, *new]:
            _attempt([request], request.give_up_if_cancelled)
        self._rows.drop_ended()
        _attempt(running, self._rows.step)
        self._rows.drop_ended()
        if joining := [job for request in new if not request.over for job in request.jobs]:
            _attempt(new, lambda: self._rows.join(joining))
        unfinished = [request for request in [*running, *new] if not request.over]
        for request in unfinished:
            _attempt([request], request.answer)
        self._rows.drop_ended()
        return [request for request in unfinished if not request.over]


def _attempt(requests: Sequence[Request], action: Callable[[], None]) -> None:
    """Do something for requests; if it fails, they end with the error, and no other one does."""
    try:
        action()
    except Exception as error:  # whatever it is, the thread goes on
        first = next(iter(str(error).splitlines()), "")
        for request in requests:
            if not request.over:
                with suppress(Exception):  # a response can not be sent: nobody waits for it
                    request.fail(f"{type(error).__name__}: {first}", pb_utils.TritonError.INTERNAL)
