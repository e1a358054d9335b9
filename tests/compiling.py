"""Which tests a path with a space leaves out."""

import pytest
import torch

needs_a_linker = pytest.mark.skipif(
    " " in torch.__file__, reason="torch can't link what it compiles from a path with a space"
)
