"""Text generation, either greedy or sampled with a temperature and a seed."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pipelines.evaluation.text_codec import TextCodec
from pipelines.models.served import Model, held_model


def generate(
    model_folder: Path,
    prompts: Sequence[str],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
) -> list[str]:
    """Continue each prompt by at most `max_tokens` tokens, or fewer if the model ends the text.

    Args:
        model_folder: A folder with weights, config.json and tokenizer files.
        prompts: Each prompt is the beginning of a document; it may be empty.
        max_tokens: The maximum length of each continuation.
        temperature: 0 takes the likeliest token; 1 samples from the model's own distribution.
        seed: The seed of the sampling; a continuation does not depend on the other prompts.
        chat: Whether a prompt is a user's message and the continuation the assistant's answer.

    Returns:
        The continuations, without their prompts.
    """
    codec = TextCodec(model_folder)
    model = held_model(model_folder)
    stops = {codec.end_id, *(codec.special_ids if chat else ())}
    texts = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(seed)
        start = codec.encode_question(prompt) if chat else codec.encode([prompt])[0][:-1]
        # In training, every document came after an end token.
        ids = [codec.end_id, *start.tolist()]
        ids = _continue(model, ids, stops, max_tokens, temperature, generator)
        texts.append(codec.decode(ids))
    return texts


@torch.inference_mode()
def _continue(
    model: Model,
    prompt: list[int],
    stops: set[int],
    max_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[int]:
    """Return the new ids after `prompt`; the model sees only the last context_length ids."""
    ids = list(prompt)
    device = next(model.parameters()).device
    for _ in range(max_tokens):
        window_BS = torch.tensor([ids[-model.config.context_length :]], device=device)  # noqa: N806
        # Sample on the CPU, so that a seed gives the same text on every device.
        token = _choose(model(window_BS)[0, -1].float().cpu(), temperature, generator)
        if token in stops:
            break
        ids.append(token)
    return ids[len(prompt) :]


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:  # noqa: N803
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = (logits_V / temperature).softmax(dim=-1)  # noqa: N806
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
