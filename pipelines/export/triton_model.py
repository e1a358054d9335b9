"""Triton's Python back end, which continues texts with the model in `model/` beside this file.

The server runs only this file and its neighbours `triton_rows.py` and `triton_streams.py`, which
need torch and transformers, but nothing of Penstock. What `config.pbtxt` says decides how answers
leave. If the model is decoupled, a request for a stream has a response for each piece of the text,
and new requests join those being answered. If it is not, each request has one response, and those
that Triton's dynamic batcher combines are answered together.
"""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer
from triton_rows import Job, Rows, decoded
from triton_streams import Request, Streams, send_error, texts_response

_DEFAULT_TOKENS = 64  # if a request gives no number


class TritonPythonModel:
    """The class that the server calls; `config.pbtxt` defines its inputs and outputs."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model once, on the device that the server gives this instance.

        Args:
            args: The server's arguments. Of `config.pbtxt`, the parameter `dtype` is used, and
                the largest batch and the transaction policy.
        """
        folder = Path(__file__).parent / "model"
        config = json.loads(args["model_config"])
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        plain = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **plain)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=config.get("parameters", {}).get("dtype", {}).get("string_value", "auto"),
            use_safetensors=True,
            **plain,
        )
        self._context: int = model.config.max_position_embeddings
        self._end: int = self._tokenizer.eos_token_id
        self._rows = Rows(model.to(device).eval(), self._end)
        self._streams: Streams | None = None
        if config.get("model_transaction_policy", {}).get("decoupled"):
            self._streams = Streams(self._rows, config["max_batch_size"])

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer each request; an invalid request gets an error, the others an answer.

        Returns:
            The responses in order; None if the model is decoupled, which answers later.
        """
        if self._streams is not None:
            for request in requests:
                self._start(request, self._streams)
            return None
        jobs: list[list[Job] | pb_utils.TritonError] = []
        for request in requests:
            try:
                jobs.append(self._read(request))
            except ValueError as error:
                jobs.append(pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        if good := [job for each in jobs if isinstance(each, list) for job in each]:
            self._rows.answer(good)
        return [self._response(each) for each in jobs]

    def finalize(self) -> None:
        """Stop; the server calls this when every request has its last response."""
        if self._streams is not None:
            self._streams.stop()

    def _start(self, request: Any, streams: Streams) -> None:
        """Begin to answer a request of a decoupled model."""
        sender = request.get_response_sender()
        try:
            jobs = self._read(request)
            asked = pb_utils.get_input_tensor_by_name(request, "stream")
            in_pieces = asked is not None and bool(asked.as_numpy().any())
            if in_pieces and len(jobs) > 1:
                raise ValueError(f"stream is for one text; text_input has {len(jobs)}")
        except ValueError as error:
            send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
        else:
            streams.add(Request(sender, jobs, self._tokenizer, in_pieces))

    def _read(self, request: Any) -> list[Job]:
        """Return the prompts of a request, [B, 1] of bytes, with the number of tokens for each."""
        given = pb_utils.get_input_tensor_by_name(request, "text_input")
        if given is None:  # with an optional input, the server only counts the inputs
            raise ValueError("text_input is missing; it is the text to continue")
        texts = given.as_numpy().flatten()
        asked = pb_utils.get_input_tensor_by_name(request, "max_tokens")
        numbers = [_DEFAULT_TOKENS] * len(texts)
        if asked is not None:  # as Python's integers: a sum of numpy's can wrap around
            numbers = asked.as_numpy().flatten().tolist()
        jobs = []
        for text, number in zip(texts, numbers, strict=True):
            try:
                prompt = text.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"text_input must be UTF-8 text: {error}") from None
            # An empty prompt becomes the token that every training text began with.
            ids = self._tokenizer(prompt).input_ids or [self._end]
            if number < 1:
                raise ValueError(f"max_tokens is {number}; it must be at least 1")
            if len(ids) + number > self._context:
                raise ValueError(
                    f"text_input has {len(ids)} tokens and max_tokens is {number}, but the model "
                    f"sees {self._context} in all"
                )
            jobs.append(Job(ids, number))
        return jobs

    def _response(self, answered: list[Job] | Any) -> Any:
        if not isinstance(answered, list):
            return pb_utils.InferenceResponse(error=answered)
        return texts_response([decoded(self._tokenizer, job.made) for job in answered])
