"""The README.md of a registered model: what it is, what it was measured at, what it is not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.recipe import Recipe
from pipelines.core.recipe_files import dump_yaml
from pipelines.core.records import EvaluateRecord, PreprocessRecord, TrainRecord

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
  - penstock
  - {family}
---

# {name}

{description}

A decoder of {parameters:,} parameters, trained by Penstock with the recipe `{recipe}`
({steps:,} steps, {tokens:,} tokens).{start}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)  # where this file lies
tokenizer = AutoTokenizer.from_pretrained(folder)
```

## Measured

{documents:,} held-out documents, {bytes:,} bytes of text; fewer bits per byte are better.

| model | bits per byte |
|---|---|
{results}

Perplexity per token: {perplexity:.2f}. It depends on the tokenizer; bits per byte do not.

## Data

| split | documents | bytes of text | tokens |
|---|---|---|---|
| train | {train.documents:,} | {train.bytes:,} | {train.tokens:,} |
| validation | {validation.documents:,} | {validation.bytes:,} | {validation.tokens:,} |

Source: `{source}`. Exact duplicates are dropped; the splits share no document. Vocabulary:
{vocabulary:,} (`{tokenizer}`).

## Limits

- {use}
  What it writes may be wrong, biased or copied from the training data.
- It sees {context:,} tokens at a time.
- Nothing but the figures above was measured; they are of text from the same source.
- The licence of the weights follows from the licences of the training data.

## Lineage

Commit `{commit}`{dirty}; recipe fingerprint `{fingerprint}`; model content `{model_hash}`.
The whole record is `lineage.json` beside this file.

<details><summary>Recipe</summary>

```yaml
{yaml}```

</details>
"""

_TEXT = "It continues text like its training data and nothing else: it follows no instructions."
_CHAT = "It answers prompts like those of its training data, by the tokenizer's chat template."


def model_card(
    recipe: Recipe,
    preprocess: PreprocessRecord,
    train: TrainRecord,
    evaluate: EvaluateRecord,
    run: Mapping[str, Any],
    family: str,
) -> str:
    """A model card in Hugging Face's format; `run` is the content of run.json."""
    dataset = preprocess.dataset
    return _TEMPLATE.format(
        family=family,
        name=recipe.registration.model_name,
        description=recipe.description or "A language model.",
        parameters=train.parameters,
        recipe=recipe.name,
        start=_start(recipe),
        use=_CHAT if recipe.data.instruction.kind != "none" else _TEXT,
        steps=train.steps,
        tokens=train.tokens,
        documents=evaluate.documents,
        bytes=evaluate.bytes,
        results=_results(evaluate),
        perplexity=evaluate.perplexity,
        train=dataset.train,
        validation=dataset.validation,
        source=dataset.label or recipe.data.source.path or "the Python standard library",
        vocabulary=dataset.vocab_size,
        tokenizer=recipe.data.tokenizer.kind,
        context=recipe.data.sequence_length,
        commit=run.get("git_commit", "unknown"),
        dirty=" with uncommitted changes" if run.get("dirty") else "",
        fingerprint=recipe.fingerprint(),
        model_hash=train.model_hash,
        yaml=dump_yaml(recipe),
    )


def _start(recipe: Recipe) -> str:
    """What the weights were before, and how they were changed."""
    if recipe.model.init_from is None:
        return ""
    text = f" Training started from `{Path(recipe.model.init_from).name}`"
    if recipe.adapter.kind == "none":
        return f"{text}."
    method = {"lora": "LoRA", "qlora": "QLoRA"}[recipe.adapter.kind]
    return (
        f"{text}, whose weights\n{method} left as they were; the adapter is merged here, and in "
        "`adapter/` it lies alone, in peft's\nformat."
    )


def _results(evaluate: EvaluateRecord) -> str:
    rows = [f"| **this model** | **{evaluate.bits_per_byte:.4f}** |"]
    rows += [f"| this model on {name} | {value:.4f} |" for name, value in evaluate.datasets.items()]
    rows += [f"| {name} | {value:.4f} |" for name, value in sorted(evaluate.baselines.items())]
    return "\n".join(rows)
