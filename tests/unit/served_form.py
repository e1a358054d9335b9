"""A model that a memory budget made int8 of."""

from pipelines.run.verdict import FormScore, RightSize


def served_as_int8(bits_per_byte: float, model_hash: str) -> RightSize:
    """In 2 of 4 GB, for 0.002 bits per byte."""
    form = FormScore(
        form="int8",
        bits_per_byte=bits_per_byte,
        lost=0.002,
        weight_bytes=10,
        serving_bytes=2_000_000_000,
        fits=True,
        good=True,
    )
    return RightSize(
        budget_gb=4,
        max_loss=0.01,
        sequences=1,
        tokens=32,
        trained_bits_per_byte=bits_per_byte - form.lost,
        forms=(form,),
        chosen=form,
        model_hash=model_hash,
    )
