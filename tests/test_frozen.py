"""What users and their files rely on stays as it is: see frozen.py."""

from __future__ import annotations

import pytest

from tests import frozen


@pytest.mark.parametrize("name", sorted(frozen.FROZEN))
def test_is_as_it_was(name: str) -> None:
    found, expected = frozen.FROZEN[name](), frozen.stored(name)
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key] == value, key
