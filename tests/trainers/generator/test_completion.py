"""A completion on its way from a generator to whoever asked."""

from __future__ import annotations

import cloudpickle
import numpy as np
import pytest

from trainers.generator.types import Completion


@pytest.mark.parametrize("versions", [[], [4] * 100, [4, 4, 5], [5, 4, 5]])
def test_it_arrives_as_it_was(versions: list[int]) -> None:
    count = len(versions)
    sent = Completion(
        [1, 2], list(range(count)), np.linspace(-1, 0, count), versions, "abort", 5, text="a", metadata={"b": 1}
    )
    wire = cloudpickle.dumps(sent)
    found = cloudpickle.loads(wire)
    for name in Completion.__slots__:
        assert np.array_equal(getattr(found, name), getattr(sent, name)), name
        assert type(getattr(found, name)) is type(getattr(sent, name)), name
    assert [found.token_ids.dtype, found.logprobs.dtype, found.versions.dtype] == [np.int32, np.float32, np.int32]
    assert len(wire) < 300 + 8 * count
