"""No key that forge-env reads is in what a command writes: files, stdout, stderr; however it got there."""

from __future__ import annotations

import base64
import html
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

import forge_env as fe
from forge_env import redaction
from forge_env.cli.main import main
from forge_env.config import load_config
from forge_env.policy import Reply
from forge_env.run import Run
from forge_env.run import metrics as metrics_module
from forge_env.run.contract import Clause
from forge_env.run.metrics import check_loggers
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message

Capture = pytest.CaptureFixture[str]
ENVIRONMENT = f"{__name__}:Leaky"
SECRETS = {
    name: f"{name}-Pl4nted/s3cret+{number:02d}"
    for number, name in enumerate(
        [
            *("own-variable", "openai", "wandb", "hub", "cloud", "proxy"),
            *("extra", "header", "path", "option", "query", "password"),
        ]
    )
} | {"path": "sk-pathPl4ntedS3cret08"}
"""By the way in."""
VARIABLES = ("MY_ENDPOINT", "OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY")


class LeakyConfig(fe.ToolEnvironmentConfig):
    """Its options."""

    judge_token: str = ""
    """Key of a judge."""


class Leaky(fe.ToolEnvironment):
    """Writes everything that it knows wherever it can."""

    config: LeakyConfig
    config_class = LeakyConfig
    rubric = fe.Rubric(fe.rewards.exact_match)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="What is 2 + 2?", gold="4", data={"answer": "4"}, split=split)

    def num_tasks(self, split: str) -> int | None:
        return 6

    async def setup(self, task: fe.Task) -> None:
        print("setup", everything(self.config.judge_token))
        print("setup", everything(self.config.judge_token), file=sys.stderr)
        logging.getLogger("environments.leaky").warning("%s", everything(self.config.judge_token))
        if task.id.endswith("-3"):
            raise RuntimeError(everything(self.config.judge_token))

    @fe.tool
    async def look(self) -> str:
        """Look at all."""
        return everything(self.config.judge_token)


def everything(token: str) -> str:
    """The variables of the test and a token, as they are and encoded."""
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    return "\n".join(["", repr(values), json.dumps(values), *encoded(token)])


def encoded(text: str) -> list[str]:
    """The usual spellings of a text."""
    content = text.encode()
    basic = base64.b64encode(b"user:" + content).decode()
    plain = [text, json.dumps(text)[1:-1], quote(text, safe=""), html.escape(text), content.hex()]
    return [*plain, base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode(), basic]


class Echo(BaseHTTPRequestHandler):
    """An endpoint that repeats the request, with its headers, in every part of its answers."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._send(404, {"error": {"message": str(self.headers)}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = f"{self.path} {self.headers} {json.dumps(body)}"
        all_of_it = "\n".join(encoded(self.headers["authorization"].removeprefix("Bearer "))) + known
        status = int(body["model"]) if body["model"] != "talk" else 200
        if status != 200:
            self._send(status, {"error": {"message": all_of_it}})
            return
        first = not any(message["role"] == "tool" for message in body["messages"])
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        bad = {"id": all_of_it, "type": "function", "function": {"name": "look", "arguments": json.dumps(all_of_it)}}
        message = {"role": "assistant", "content": all_of_it, "reasoning_content": all_of_it}
        message |= {"tool_calls": [call, bad]} if first else {}
        self._send(200, {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    def _send(self, status: int, data: Mapping[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status, self.headers.get("authorization"))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def planted(clean_environ: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The secrets of the environment."""
    clean_environ.setenv("MY_ENDPOINT", SECRETS["own-variable"])
    clean_environ.setenv("OPENAI_API_KEY", SECRETS["openai"])
    clean_environ.setenv("WANDB_API_KEY", SECRETS["wandb"])
    clean_environ.setenv("HF_TOKEN", SECRETS["hub"])
    clean_environ.setenv("AWS_SECRET_ACCESS_KEY", SECRETS["cloud"])
    clean_environ.setenv("HTTPS_PROXY", f"http://me:{quote(SECRETS['proxy'], safe='')}@127.0.0.1:9")
    return clean_environ


def check_clean(folder: Path, capfd: Capture, *, given: tuple[str, ...] = ()) -> str:
    """No secret is in a file of `folder` but the `given` ones, or was shown; returns what was shown."""
    out, err = capfd.readouterr()
    texts = {"stdout": out.encode(), "stderr": err.encode()}
    texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in given}
    assert len(texts) > 2
    found = [
        (where, name, form)
        for where, content in texts.items()
        for name, secret in SECRETS.items()
        for form in [*(form.rstrip("=") for form in encoded(secret)), encoded(secret)[-1][8:-4]]
        if form.encode() in content
    ]
    assert not found
    return out + err


def evaluation(endpoint: str, tmp_path: Path, model: str) -> list[str]:
    """The command of one with all secrets that it can have."""
    file = tmp_path / "evaluation.yaml"
    environment = {"name": ENVIRONMENT, "options": {"judge_token": SECRETS["option"]}}
    headers = {"Authorization": f"Bearer {SECRETS['header']}"}
    file.write_text(yaml.safe_dump({"environments": [environment], "extra": {"headers": headers}}))
    command = ["eval", str(file), "--model", model, f"--base-url={endpoint}/{SECRETS['path']}/v1", "--retries=1"]
    command += [f"extra.api_key={SECRETS['extra']}", "--api-key-env=MY_ENDPOINT", "--first-delay-s=0"]
    return [*command, "--out", str(tmp_path / "out")]


@pytest.mark.parametrize(("model", "code"), [("talk", 1), ("401", 1), ("400", 1), ("500", 1)])
def test_an_evaluation_writes_none(
    model: str, code: int, endpoint: str, tmp_path: Path, planted: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert main([*evaluation(endpoint, tmp_path, model), "--debug"]) == code
    shown = check_clean(tmp_path, capfd, given=("evaluation.yaml",))
    assert "(redacted MY_ENDPOINT)" in shown + (tmp_path / "out/run.log").read_text()
    if model == "talk":
        recorded = (tmp_path / "out/trajectories/eval.jsonl").read_text()
        for name in ("MY_ENDPOINT", "WANDB_API_KEY", "extra.api_key", "base_url", "HTTPS_PROXY"):
            assert f"(redacted {name})" in recorded


def test_resuming_needs_secrets(endpoint: str, tmp_path: Path, planted: pytest.MonkeyPatch, capfd: Capture) -> None:
    command = evaluation(endpoint, tmp_path, "talk")
    assert main(command) == 1
    capfd.readouterr()
    again = ["eval", "--out", str(tmp_path / "out"), "--resume"]
    assert main(again) == 2
    assert "base_url, extra.headers.Authorization, extra.api_key" in capfd.readouterr().err
    assert main(["eval", "--rescore", str(tmp_path / "out")]) == 2
    assert "let the environment read it from an environment variable" in capfd.readouterr().err
    again += [f"--base-url={endpoint}/{SECRETS['path']}/v1"]
    assert main(again) == 2
    err = capfd.readouterr().err
    assert "base_url" not in err
    assert "extra.headers.Authorization, extra.api_key, environments.0.options.judge_token" in err
    assert main([*command, "--resume"]) == 1, "the sample with the bug is played again"
    assert "bug" in check_clean(tmp_path, capfd, given=("evaluation.yaml",))


@pytest.mark.parametrize(
    "address",
    [
        f"http://127.0.0.1:9/v1?api-key={SECRETS['query']}",
        f"http://127.0.0.1:9/v1#{SECRETS['query']}",
        f"http://user:{SECRETS['password']}@127.0.0.1:9/v1",
        f"http://user:{quote(SECRETS['password'], safe='')}@127.0.0.1:9/v1",
        f"user:{SECRETS['password']}@127.0.0.1:9/v1",
        f"127.0.0.1:9/v1?api_key={SECRETS['query']}",
    ],
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_addresses_that_hold_one_are_refused(
    address: str, by_variable: bool, tmp_path: Path, planted: pytest.MonkeyPatch, capfd: Capture
) -> None:
    planted.chdir(tmp_path)
    (tmp_path / "empty").touch()
    planted.setenv("OPENAI_BASE_URL", address if by_variable else "")
    given = [] if by_variable else ["--base-url", address]
    assert main(["eval", ENVIRONMENT, "-m", "m", *given]) == 2
    shown = check_clean(tmp_path, capfd)
    assert "would not be sent" in shown or "did you mean http://127.0.0.1:9/v1?" in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", SECRETS["openai"]],
        ["--api_key_env", SECRETS["openai"]],
        ["--api-key-env", "hf_AbcdefPl4ntedS3cret"],
        [f"vllm_args=[--api-key, {SECRETS['openai']}]"],
        [f"--extra.token={SECRETS['extra']}", "--no-such-key", "1"],
        [f"extra={{token: {SECRETS['extra']}"],
    ],
)
def test_refusals_show_none(words: list[str], tmp_path: Path, planted: pytest.MonkeyPatch, capfd: Capture) -> None:
    (tmp_path / "empty").touch()
    assert main(["eval", ENVIRONMENT, "-m", "m", *words, "--out", str(tmp_path / "out")]) == 2
    assert "hf_Abcdef" not in check_clean(tmp_path, capfd)


async def leak(run: Run) -> None:
    """A trainer that writes everything that it knows wherever it can, and fails."""
    text = everything(run.config.environment.options["judge_token"])
    print(text)
    print(text, file=sys.stderr)
    run.stage("training", text)
    run.note(text)
    run.warn(text)
    run.contract(Clause("prompt", "doubtful", text, 1))
    run.log(1, {"reward/mean": 0.5})
    reply = Reply(Message(role="assistant", content=text), metadata={"said": text})
    run.trajectory(Trajectory("a", "leaky", "t", turns=[Turn([Message(role="user", content=text)], reply)]), "train")
    run.trained(1, [{"group": 0, "task": text}])
    await run.drain()
    run.summary["said"] = text
    raise ValueError(text.replace("\n", " "))


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_training_writes_none(debug: list[str], recipe: Path, planted: pytest.MonkeyPatch, capfd: Capture) -> None:
    recipe.write_text(
        f"environment:\n  name: {ENVIRONMENT}\n  options:\n    judge_token: {SECRETS['option']}\n"
        f"method: {__name__}:leak\n"
    )
    planted.delenv("MY_ENDPOINT")  # nothing in a run reads it, and its name tells nothing
    planted.setattr("forge_env.view.report.write_reward_curve", lambda folder: True)
    assert main(["train", "recipe.yaml", "--name", "first", *debug]) == 1
    run = recipe.parent / "runs/first"
    shown = check_clean(recipe.parent, capfd, given=("recipe.yaml",))
    assert "(redacted" in shown
    for file in ("summary.json", "contract.jsonl", "trained.jsonl", "trajectories/train.jsonl", "run.log"):
        assert "(redacted WANDB_API_KEY)" in (run / file).read_text(), file
    assert main(["train", str(run / "config.yaml"), "--resume"]) == 2
    assert "environment.options.judge_token" in capfd.readouterr().err
    again = ["train", str(run / "config.yaml"), "--resume", f"environment.options.judge_token={SECRETS['option']}"]
    assert main([*again, *debug]) == 1
    assert "changed on resume" not in check_clean(recipe.parent, capfd, given=("recipe.yaml",))


def test_a_netrc_tells_its_passwords(tmp_path: Path, planted: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {SECRETS['password']}\n")
    planted.setenv("NETRC", str(tmp_path / "netrc"))
    planted.setattr(metrics_module, "find_spec", lambda name: object())
    check_loggers(load_config("coding_rlvr", ["logging.wandb=true"]))
    assert redaction.redact(SECRETS["password"]) == "(redacted netrc-api.wandb.ai)"
