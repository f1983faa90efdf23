"""Secrets are found where they are read, and replaced however they are spelled."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forge_env import redaction
from forge_env.config.reader import Source, dump, refuse_redacted, same_settings
from forge_env.errors import UsageError
from forge_env.files import LineWriter, write_whole
from forge_env.logs import captured_output, log_to
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn, read_trajectories
from forge_env.types import Message
from forge_env.visible import one_line, shown

KEY = 'sk-Pl"ain/+\\key=0123&ü'

ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "JSON": lambda key: json.dumps(key),
    "JSON, not ASCII": lambda key: json.dumps(key, ensure_ascii=False),
    "JSON in JSON": lambda key: json.dumps(json.dumps({"a": key})),
    "repr": repr,
    "URL": lambda key: quote(key, safe=""),
    "path": quote,
    "form": quote_plus,
    "HTML": html.escape,
    "hex": lambda key: key.encode().hex(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "Basic": lambda key: base64.b64encode(f"user:{key}".encode()).decode(),
    "Basic, as the name": lambda key: base64.b64encode(f"{key}:".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"ab{key}cd".encode()).decode(),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_spelling_is_replaced(encoding: str) -> None:
    redaction.add(KEY, "API_KEY")
    text = f"before {ENCODINGS[encoding](KEY)} after"
    redacted = redaction.redact(text)
    assert "(redacted API_KEY)" in redacted
    assert (redacted[:7], redacted[-6:]) == ("before ", " after")


@given(
    key=st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Z"]), min_size=8, max_size=40),
    before=st.binary(max_size=5),
    after=st.binary(max_size=5),
)
def test_a_secret_is_not_readable_in_the_base64_of_a_longer_text(key: str, before: bytes, after: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redaction, "_forms", [])
        patch.setattr(redaction, "_names", {})
        redaction.add(key, "KEY")
        if redaction.MARK.search(key):
            return
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            redacted = redaction.redact(encode(before + key.encode() + after).decode())
            assert "(redacted KEY)" in redacted
            assert len(redaction.MARK.sub("", redacted)) <= len(base64.b64encode(before + after)) + 8


def test_a_short_secret_is_replaced_only_behind_bearer() -> None:
    redaction.add("EMPTY", "OPENAI_API_KEY")
    assert redaction.redact("EMPTY list, Authorization: Bearer EMPTY") == (
        "EMPTY list, Authorization: Bearer (redacted OPENAI_API_KEY)"
    )


@pytest.mark.parametrize(
    ("settings", "secrets"),
    [
        ({"api_key": "abcdef-123456"}, ["abcdef-123456"]),
        ({"judge": {"apiKey": "abcdef-123456"}}, ["abcdef-123456"]),
        ({"headers": {"X-Api-Key": "abcdef-123456"}}, ["abcdef-123456"]),
        ({"headers": {"Authorization": "Bearer qwert-123456"}}, ["qwert-123456"]),
        ({"headers": {"authorization": "Basic dXNlcjpwYTU1d29yZA=="}}, ["dXNlcjpwYTU1d29yZA", "pa55word"]),
        ({"servers": [{"password": "two words 1"}, {"password": "p|pe<less>"}]}, ["two words 1", "p|pe<less>"]),
        ({"note": "the key is sk-proj-Abcdef123456"}, ["sk-proj-Abcdef123456"]),
        ({"url": "https://me:pa55word@host/x"}, ["pa55word"]),
        ({"url": "wss://host/x?token=abcdef-123456&n=1"}, ["abcdef-123456"]),
        ({"url": "https://host/token/abcdef-123456/x"}, ["abcdef-123456"]),
        ({"url": "https://ghp_Abcdef123456@host/x"}, ["ghp_Abcdef123456"]),
    ],
)
def test_settings_tell_their_secrets(settings: dict[str, object], secrets: list[str]) -> None:
    Source("", settings)
    for secret in secrets:
        assert secret not in redaction.redact(f"an error with {secret} in it")
        assert secret not in dump(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_token": "<|im_end|>"},
        {"max_tokens": 20000000},
        {"model": "hf-internal-testing/tiny-random-gpt2"},
        {"model": "sk-learn-agents"},
        {"key": "question"},
        {"url": "ssh://longname@host"},
        {"url": "https://huggingface.co/datasets/openai/gsm8k?page=3"},
    ],
)
def test_other_settings_are_no_secrets(settings: dict[str, object]) -> None:
    Source("", settings)
    assert yaml.safe_load(dump(settings)) == settings


def test_variables_tell_theirs_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wandb-0123456789")
    monkeypatch.setenv("PGPASSWORD", "pg-0123456789")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:proxy-0123456789@proxy:3128")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    redaction.learn_environment()
    text = f"wandb-0123456789 pg-0123456789 http://me:proxy-0123456789@proxy {tmp_path}"
    assert redaction.redact(text) == (
        f"(redacted WANDB_API_KEY) (redacted PGPASSWORD) http://me:(redacted HTTPS_PROXY)@proxy {tmp_path}"
    )


def test_recorded_settings_hide_secrets_of_any_length_and_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"extra": {"api_key": "abc", "top_k": 4}, "options": {"judge": ["sk-proj-Abcdef123456"]}}
    Source("", given)
    recorded = yaml.safe_load(dump(given))
    assert recorded["extra"] == {"api_key": "(redacted api_key)", "top_k": 4}
    assert same_settings(recorded, given)
    assert not same_settings(recorded, {**given, "extra": {"api_key": "abc", "top_k": 5}})
    refuse_redacted(given)
    with pytest.raises(UsageError, match=r"extra\.api_key, options\.judge\.0: secrets are not recorded") as error:
        refuse_redacted(recorded)
    assert "extra.api_key=VALUE" in str(error.value.fix)


def test_token_ids_stay_while_texts_are_redacted(tmp_path: Path) -> None:
    ids = np.zeros(12, np.int32)  # "AAAAAAAA" in base64
    redaction.add("AAAAAAAA", "ODD_KEY")
    reply = Reply(Message(role="assistant", content="it is AAAAAAAA"), ids[:4], ids, ids.astype(np.float32), ids)
    episode = Trajectory("a", "toy", "t", turns=[Turn([Message(role="user", content="AAAAAAAA?")], reply)])
    with TrajectoryWriter(tmp_path / "eval.jsonl") as writer:
        writer.write(episode)
    (read,) = read_trajectories(tmp_path / "eval.jsonl")
    assert read.turns[0].message.content == "it is (redacted ODD_KEY)"
    assert read.turns[0].reply.token_ids.tolist() == ids.tolist()
    assert read.turns[0].reply.prompt_ids.tolist() == ids[:4].tolist()
    assert episode.turns[0].message.content == "it is AAAAAAAA", "what is in memory is as it was"


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    redaction.add("1234567890", "PIN_TOKEN")
    with LineWriter(tmp_path / "x.jsonl") as writer:
        writer.append(b'{"n":1234567890,"s":"1234567890"}')
        writer.append(b"[1234567890")
    write_whole(tmp_path / "x.json", '{"n": 1234567890, "s": "1234567890"}')
    first, second = (tmp_path / "x.jsonl").read_text().splitlines()
    assert json.loads(first) == json.loads((tmp_path / "x.json").read_text())
    assert json.loads(first) == {"n": 1234567890, "s": "(redacted PIN_TOKEN)"}
    assert second == "[(redacted PIN_TOKEN)", "what is not JSON is redacted as text"


def test_texts_without_secrets_are_left_as_they_are(tmp_path: Path) -> None:
    redaction.add("abcdef-123456", "KEY")
    line = b'{"a" : "\\u00e9", "a": 1e400}'
    with LineWriter(tmp_path / "x.jsonl") as writer:
        writer.append(line)
    assert (tmp_path / "x.jsonl").read_bytes() == line + b"\n"


def test_logs_and_captured_output_hold_none(tmp_path: Path) -> None:
    redaction.add("abcdef-123456", "KEY")
    with captured_output(tmp_path / "run.log") as terminal, log_to(tmp_path / "run.log"):
        print("printed abcdef-123456")
        terminal.write("shown abcdef-123456\n")
        try:
            raise ValueError("abcdef-123456")
        except ValueError:
            logging.getLogger("forge_env.x").exception("failed with %s", "abcdef-123456")
    text = (tmp_path / "run.log").read_text()
    assert text.count("(redacted KEY)") == 4
    assert "abcdef-123456" not in text


def test_a_text_is_redacted_before_it_is_cut() -> None:
    redaction.add("abcdef-123456", "K")
    for text in (one_line("x" * 8 + " abcdef-123456", 20), shown("x" * 8 + "abcdef-123456" * 9, 20)):
        assert "abcdef-" not in text
