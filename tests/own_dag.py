"""The DAG of docs/orchestration.md, which knows nothing of Penstock but the operator."""

from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "orchestration.md"
OWN_DAG = _PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
