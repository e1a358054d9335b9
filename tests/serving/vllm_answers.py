"""vLLM's engine over folders, for its environment's Python: jobs from stdin, answers to a file."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # each model gets a process of its own here

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def answer(job: dict[str, Any], place: Path) -> None:
    """Write the ids of each prompt and of its answer, by the adapter first where there is one.

    Of ids to score, the log-probability of each but the first goes to a file of its own.
    """
    model = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        enable_lora=job["adapter"] is not None,
        max_lora_rank=32,  # where a matrix holds queries, keys and values, their ranks add up
        max_num_seqs=8,
    )
    greedy = SamplingParams(temperature=0, max_tokens=job["tokens"])
    adapter = job["adapter"] and LoRARequest("adapter", 1, job["adapter"])
    found = model.generate(job["prompts"], greedy, lora_request=adapter)
    if adapter:
        found += model.generate(job["prompts"], greedy)
    if job["talk"]:
        found += model.chat([job["talk"]], greedy)
    ids = [([*each.prompt_token_ids], [*each.outputs[0].token_ids]) for each in found]
    (place / job["name"]).write_text(json.dumps(ids))
    if job["scored"]:
        told = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        found = model.generate([{"prompt_token_ids": each} for each in job["scored"]], told)
        scores = [
            [by_id[id_].logprob for id_, by_id in pairs[1:]]
            for pairs in (
                [*zip(each.prompt_token_ids, each.prompt_logprobs, strict=True)] for each in found
            )
        ]
        (place / f"{job['name']}-scores").write_text(json.dumps(scores))


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # vLLM is imported once
    for job in json.load(sys.stdin):
        process = fork.Process(target=answer, args=(job, Path(sys.argv[1])))
        process.start()
        process.join()
