"""Dockerfiles are read as BuildKit reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.sandbox.dockerfile import instructions, last_workdir, with_base


@pytest.mark.parametrize(
    ("dockerfile", "folder"),
    [
        ("FROM x\nWORKDIR /app", "/app"),
        ("\ufeffFROM x\r\nWORKDIR /app\r\nWORKDIR sub\r\n", "/app/sub"),
        ("from x as a\nworkdir /a\nFROM a\nRUN ls", "/a"),
        ("FROM x AS a\nWORKDIR /a\nFROM y\nRUN ls", None),
        ("FROM --platform=linux/amd64 x AS A\nWORKDIR /a\nFROM a\nWORKDIR b", "/a/b"),
        ('FROM x\nWORKDIR "/my app"', "/my app"),
        ("FROM x\nWORKDIR '/my app'", "/my app"),
        ("FROM x\nWORKDIR /my\\ app", "/my app"),
        ("FROM x\nWORKDIR /my app", "/my app"),
        ("FROM x\nWORKDIR \\\n  /app", "/app"),
        ("FROM x\nRUN a \\\n# WORKDIR /no\n\n  && b\nWORKDIR /app", "/app"),
        ("FROM x\nRUN echo \\\nWORKDIR /no\nWORKDIR /app", "/app"),
        ("# escape=`\nFROM x\nRUN dir C:\\\nWORKDIR /app", "/app"),
        ("FROM x\nWORKDIR /app\nRUN cat > q.sql <<'E'\nSELECT a\nFROM users\nE\n", "/app"),
        ("FROM x\nWORKDIR /app\nRUN cat > notes <<E\nWORKDIR /etc\nE\n", "/app"),
        ("FROM x\nCOPY <<-E /a\n\tWORKDIR /etc\n\tE\nWORKDIR /app", "/app"),
        ("FROM x\nCOPY <<a <<b /to/\nWORKDIR /1\na\nWORKDIR /2\nb\nWORKDIR /app", "/app"),
        ("FROM x\nWORKDIR /app\nRUN cat <<'END OF FILE'\nWORKDIR /no\nEND OF FILE\nRUN ls", "/app"),
        ("FROM x\nWORKDIR /app\nRUN cat <<\"it's so\" > /x\nWORKDIR /no\nit's so\nRUN ls", "/app"),
        ("FROM x\nWORKDIR /app\nCOPY <<-E'O F' /a\n\tWORKDIR /no\n\tEO F\n", "/app"),
        ("FROM x\nWORKDIR /app\nRUN cat <<END\\ OF\nWORKDIR /no\nEND OF\n", "/app"),
        ("FROM x\nRUN echo 'a <<E b'\nWORKDIR /app\nE", "/app"),
        ('FROM x\nRUN sh -c"cat <<E"\nWORKDIR /app\nE', "/app"),
        ("FROM x\nRUN echo $((1<<2)) <<< word\nWORKDIR /app", "/app"),
        ("FROM x\nRUN cat <<E\nno end\nWORKDIR /app", "/app"),
        ("FROM x\nENV A=<<E\nWORKDIR /app\nE", "/app"),
        ("FROM x\nRUN echo 'it\nWORKDIR /app", "/app"),
        ("FROM x\nWORKDIR /app\nENTRYPOINT WORKDIR /no", "/app"),
        ("FROM x", None),
        ("", None),
    ],
)
def test_the_folder_of_the_last_stage(dockerfile: str, folder: str | None) -> None:
    assert last_workdir(dockerfile) == folder


def test_a_base_is_replaced_in_instructions_only() -> None:
    dockerfile = (
        "FROM --platform=x \\\n  python:3 AS a\r\nRUN cat <<E\nFROM users\nE\nCOPY --from=a / /\nFROM python:3 # x"
    )
    assert with_base(dockerfile, "own\\1") == dockerfile.replace("python:3", "own\\1")


@given(st.text(st.sampled_from("FROM RUN<\\\n'\"E #=a")))
def test_any_text_is_read(text: str) -> None:
    spans = [(each.start, each.end) for each in instructions(text)]
    assert spans == sorted(spans)
    assert all(start < end <= text.count("\n") + 1 for start, end in spans)
    with_base(text, "own")
    last_workdir(text)
