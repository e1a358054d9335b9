"""What people read of a model card; `model_card` says what goes into it."""

TEMPLATE = """\
# {name}

{description}

A decoder of {parameters:,} parameters, trained by Penstock with the recipe `{recipe}`
({steps:,} steps, {tokens:,} tokens).{start}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)  # where this file lies
tokenizer = AutoTokenizer.from_pretrained(folder)
```

## Intended use

{use}

## Measured

{documents} held-out documents, {held_out} of text; fewer bits per byte are better. Intervals hold
with 95% confidence; those in bits per byte are of a bootstrap over documents.{served}

{results}

Perplexity per token: {perplexity}. It depends on the tokenizer; bits per byte do not.

{sections}## The gate

{verdict}

## Data

{splits}

Source: `{source}`.{dataset_hash} {rejects} Duplicates: {dedup}; the splits share no document.
Personal data: {pii}. Vocabulary: {vocabulary:,} (`{tokenizer}`).

## Training

{training}

{cost}

## Limits

- What it writes may be wrong, biased or copied from the training data.
- It sees {context:,} tokens at a time.
- Nothing but the figures above was measured; those in bits per byte are of text from the source of
  the training text.
{limits_of_probes}- {license}

## Lineage

Commit `{commit}`{dirty}; recipe fingerprint `{fingerprint}`; model content `{model_hash}`.
The whole record is `lineage.json` beside this file. To train it once more from that commit, recipe
and data, N being this version's number in the registry:

    penstock models reproduce "{name}@N"

<details><summary>Recipe</summary>

```yaml
{yaml}```

</details>
"""
