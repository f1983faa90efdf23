"""The channel that answers come back on carries whatever a solution writes there. Reading it never raises."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.sandbox import CallOutcome
from sandboxes.box import call_outcome
from sandboxes.runner import values

TAGS = st.sampled_from(["i", "f", "c", "b", "a", "d", "t", "s", "z", "o", "v", "e", "m", ""])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0x1", "nan", "zz"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TAGS, inner, max_size=2),
    max_leaves=12,
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers() | st.text(), inner),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(TAGS, ANYTHING, max_size=2) | ANYTHING)
@settings(max_examples=500)
def test_no_frame_breaks_the_reader(frame: Any) -> None:
    for data in values.unpack_frames(values.pack_frame(frame)):
        assert isinstance(call_outcome(data), CallOutcome)


@given(st.lists(st.binary(max_size=40)))
def test_no_bytes_break_the_reader(chunks: list[bytes]) -> None:
    stream = b"".join(struct.pack("!I", len(chunk)) + chunk for chunk in chunks)
    for cut in (stream, stream[1:], stream[:-1]):
        for data in values.unpack_frames(cut):
            assert isinstance(call_outcome(data), CallOutcome)


@given(PLAIN)
def test_honest_answers_arrive_as_they_are(value: Any) -> None:
    (frame,) = values.unpack_frames(values.pack_frame({"v": values.encode(value)}))
    outcome = call_outcome(frame)
    assert outcome.error is None
    assert outcome.value == value
    assert type(outcome.value) is type(value)


def test_many_honest_keys_are_not_refused() -> None:
    for keys in (range(20_000), [n << 20 for n in range(20_000)], [2**n for n in range(900)], map(str, range(20_000))):
        value = dict.fromkeys(keys, 1)
        assert values.decode(json.loads(json.dumps(values.encode(value)))) == value
