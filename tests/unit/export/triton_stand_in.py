"""What a model file uses of `triton_python_backend_utils`; the real one lives in the server."""

from threading import Event
from types import ModuleType
from typing import Any

import numpy.typing as npt


class Tensor:
    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array


class TritonError:
    INTERNAL = 1
    INVALID_ARG = 3
    CANCELLED = 7

    def __init__(self, message: str, code: int) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class InferenceResponse:
    def __init__(
        self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None
    ) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    """Keeps what is sent; as the real one, it refuses a response after the last."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.cancelled, self.final = False, Event()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.final.is_set()
        if response is not None:
            self.responses.append(response)
        if flags:
            self.final.set()


class InferenceRequest:
    def __init__(self, inputs: list[Tensor]) -> None:
        self._inputs, self.sender = inputs, ResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((each for each in request.inputs() if each.name() == name), None)


def module() -> ModuleType:
    made = ModuleType("triton_python_backend_utils")
    for each in (Tensor, TritonError, InferenceRequest, InferenceResponse):
        setattr(made, each.__name__, each)
    made.get_input_tensor_by_name = get_input_tensor_by_name  # type: ignore[attr-defined]
    made.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    return made
