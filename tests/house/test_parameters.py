"""No function has too many parameters for a call to be readable: values that belong together are a dataclass."""

from __future__ import annotations

from typing import Iterator, Tuple

import pytest

from tests.house import names

MOST = 8
FORCED = {
    ("parallel/cross_entropy.py", "forward"),  # autograd passes tensors one by one, and only as arguments
    ("config/options.py", "option"),  # declares a field: each argument is a keyword, and a column of the reference
}


def crowded_functions() -> Iterator[Tuple[str, str]]:
    """Yields (file, name) of each function with more than ``MOST`` parameters, ``self`` and ``cls`` apart."""
    for path in names.modules_below():
        for function in names.functions(names.parse(path)):
            if len(names.parameters(function)) > MOST:
                yield str(path.relative_to(names.PACKAGE)), function.name


@pytest.mark.slow
def test_no_function_has_more_parameters_than_can_be_read() -> None:
    assert set(crowded_functions()) == FORCED
