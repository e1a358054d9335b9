"""Triton's Python back end, which continues texts with the model in `model/` beside this file.

The server runs only this file, which needs torch and transformers, but nothing of Penstock.
Requests that Triton's dynamic batcher combines are one batch here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

_DEFAULT_TOKENS = 64  # if a request gives no number


@dataclass
class _Job:
    """A prompt that is being answered."""

    ids: list[int]
    max_tokens: int
    text: str = ""


class TritonPythonModel:
    """The class that the server calls; `config.pbtxt` defines its inputs and outputs."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model once, on the device that the server gives this instance.

        Args:
            args: The server's arguments; the parameter `dtype` of `config.pbtxt` is used.
        """
        folder = Path(__file__).parent / "model"
        parameters = json.loads(args["model_config"]).get("parameters", {})
        on_gpu = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu"
        plain = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **plain)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=parameters.get("dtype", {}).get("string_value", "auto"),
            use_safetensors=True,
            **plain,
        )
        self._model = self._model.to(device).eval()
        self._context: int = self._model.config.max_position_embeddings
        self._end: int = self._tokenizer.eos_token_id

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request in order; an invalid request gets an error, the others an answer."""
        jobs: list[list[_Job] | pb_utils.TritonError] = []
        for request in requests:
            try:
                jobs.append(self._read(request))
            except ValueError as error:
                jobs.append(pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        good = [job for each in jobs if isinstance(each, list) for job in each]
        for batch in self._batches(good):
            self._answer(batch)
        return [self._response(each) for each in jobs]

    def _read(self, request: Any) -> list[_Job]:
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
            jobs.append(_Job(ids, number))
        return jobs

    def _batches(self, jobs: list[_Job]) -> Iterator[list[_Job]]:
        """Yield batches of prompts of similar length; all generate as far as the longest answer.

        A batch ends before that would take one of its prompts beyond the model's context.
        """
        batch: list[_Job] = []
        for job in sorted(jobs, key=lambda each: len(each.ids)):
            most = max(each.max_tokens for each in [*batch, job])
            if batch and len(job.ids) + most > self._context:
                yield batch
                batch = []
            batch.append(job)
        if batch:
            yield batch

    @torch.inference_mode()
    def _answer(self, jobs: list[_Job]) -> None:
        """Continue all prompts at once, each with its most likely tokens."""
        longest = max(len(job.ids) for job in jobs)
        ids = torch.full((len(jobs), longest), self._end)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):  # pad on the left, so all continue at the same place
            ids[row, longest - len(job.ids) :] = torch.tensor(job.ids)
            mask[row, longest - len(job.ids) :] = 1
        made = self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            max_new_tokens=max(job.max_tokens for job in jobs),
            do_sample=False,
            pad_token_id=self._end,
        )
        for job, row in zip(jobs, made[:, longest:].tolist(), strict=True):
            job.text = self._tokenizer.decode(row[: job.max_tokens], skip_special_tokens=True)

    def _response(self, answered: list[_Job] | Any) -> Any:
        if not isinstance(answered, list):
            return pb_utils.InferenceResponse(error=answered)
        texts = np.array([[job.text.encode()] for job in answered], dtype=object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", texts)])
