import pytest

from pipelines.core.errors import SharedError, UnreachableError, UserError
from pipelines.parallel.process_group import one_for_all


@pytest.mark.parametrize(
    ("mine", "told"), [(UserError, SharedError), (UnreachableError, UnreachableError)]
)
def test_an_error_of_one_is_one_of_all(mine: type[UserError], told: type[UserError]) -> None:
    with pytest.raises(UserError, match=r"^a line$") as raised, one_for_all():
        raise mine("a line")
    assert raised.type is told
