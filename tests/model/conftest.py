"""Reference models that several test modules use, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model.reference import Reference, make_reference

MakeReference = Callable[..., Reference]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MakeReference:
    """reference(family, **fields): a small model of transformers; the same arguments give the same object."""
    made: dict[str, Reference] = {}

    def make(family: str, **fields: Any) -> Reference:
        key = repr((family, fields))
        if key not in made:
            made[key] = make_reference(tmp_path_factory.mktemp(family), family, fields)
        return made[key]

    return make
