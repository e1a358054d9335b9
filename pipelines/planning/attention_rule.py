"""The rule behind `train.attention: auto`, as far as it needs no device; no torch here.

FlexAttention takes every precision and model, and compiles a kernel for each mask. FlashAttention,
which `varlen_attn` calls, is a kernel made by hand for documents and windows, but it takes less:
see `why_not_flash`. In its backward pass it needs memory for 128 tokens more for each document,
and as nobody waits for their number, for as many as a sample may hold.
"""

from pipelines.models.config import DecoderConfig
from pipelines.recipe.recipe import Recipe

ATTENTION = "train.attention"
FLASH_CAPABILITY = (8, 0)  # Ampere
_WIDEST, _MULTIPLE = 256, 8  # features of a head
_TOKENS = 512  # of a sample for each document in it: the memory is then for a quarter more tokens


def is_divided(recipe: Recipe, config: DecoderConfig) -> bool:
    """Return whether documents or a window hide some earlier tokens of a sample."""
    window = config.sliding_window
    return recipe.data.document_mask or (
        window is not None and window < recipe.data.sequence_length
    )


def why_not_flash(config: DecoderConfig | None, precision: str) -> str | None:
    """Return why FlashAttention takes no model of this shape, if known, in this precision."""
    if precision in ("fp32", "tf32"):
        return f"FlashAttention takes bf16 and fp16, but train.precision is {precision}"
    if config is not None and config.sinks:
        return "varlen_attn has no gradient for the sinks of the model's attention"
    if config is not None and (config.head_width > _WIDEST or config.head_width % _MULTIPLE):
        return (
            f"FlashAttention takes heads of a multiple of {_MULTIPLE} features, at most {_WIDEST}, "
            f"but the model's have {config.head_width}"
        )
    return None


def why_not_by_itself(recipe: Recipe, most_documents: int) -> str | None:
    """Return why `auto` leaves attention to FlexAttention on every device, or None."""
    if recipe.train.deterministic:
        return "train.deterministic is set, and FlexAttention needs no other way for that"
    length = recipe.data.sequence_length
    if most_documents * _TOKENS > length:
        return (
            f"a sample of {length} tokens may hold {most_documents} documents, for which "
            "varlen_attn's backward pass would need much memory"
        )
    return None
