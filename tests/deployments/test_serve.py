"""`alignment serve` as a person starts it, and a chat with what it serves: one server for all tests of this file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from deployments.cli.main import app
from rlhf_core.chat.encoding import decode_completion, encode_prompt, load_tokenizer, stop_token_ids
from rlhf_core.config.engines.rollout import SamplingConfig
from rlhf_core.errors import StageError
from rlhf_core.inference.chat import Chat, ChatModel
from tests.rlhf_core.stages.supervised_runs import base_model
from tests.services import LOOPBACK, free_ports

pytestmark = pytest.mark.endurance("architectures")

TOKEN = "the-token"
GREEDY = SamplingConfig(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("model"), hidden=64, tied=False).folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[httpx.Client]:
    """A client with the token. At the end Ctrl-C ends the command with all its processes, and nothing is left."""
    (port,), temporary = free_ports(1), Path(tempfile.mkdtemp(prefix="serve-"))  # a short path, for sockets
    rollout = ["--rollout", "cpu_cache_gib=0.05", "--rollout", "threads=1"]
    command = [sys.executable, "-m", "deployments.cli.main", "serve", str(folder), "--port", str(port), *rollout]
    environment = {
        **os.environ, "ALIGNMENT_SERVE_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parents[2]),
        "TMPDIR": str(temporary), "ALIGNMENT_STACK_DIR": str(temporary / "no stack"),
    }  # fmt: skip
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        ) as process,
        httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=60) as client,
    ):
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "it answers" in line:
                    break
            assert said == [f"loading {folder}\n", "it answers; Ctrl-C ends it\n"]
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            yield client
            processes = [process, *psutil.Process(process.pid).children(recursive=True)]
            assert len(processes) >= 3  # the command, the server, its engine
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
            _, alive = psutil.wait_procs(processes[1:], timeout=20)  # Python's resource trackers outlive their process
            assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
            assert list(temporary.iterdir()) == []
            assert TOKEN not in output
            assert f"url      http://{LOOPBACK}:{port}/v1\n" in output
        finally:
            process.kill()
            shutil.rmtree(temporary)


@pytest.mark.slow("starts vLLM's server")
def test_only_its_health_is_told_without_the_token(server: httpx.Client) -> None:
    asked = ("/health", "/v1/models", "/metrics", "/docs", "/version")
    known = [server.get(path).status_code for path in asked]
    assert known == [200] * 5
    for header in ("", "Bearer", f"Bearer {TOKEN}x", TOKEN):
        unknown = [server.get(path, headers={"Authorization": header}).status_code for path in asked]
        assert unknown == [200, 401, 401, 401, 401]


def greedy(folder: Path, messages: list[dict[str, str]]) -> str:
    """What transformers replies."""
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([encode_prompt(tokenizer, messages)])
    stop = list(stop_token_ids(tokenizer))
    whole = model.generate(prompt, do_sample=False, max_new_tokens=GREEDY.max_tokens, eos_token_id=stop)
    return decode_completion(tokenizer, whole[0, prompt.shape[1] :].tolist())


def test_it_replies_as_the_model_does(server: httpx.Client, folder: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    request = {"model": str(folder), "messages": messages, "temperature": 0, "max_tokens": GREEDY.max_tokens}
    answer = server.post("/v1/chat/completions", json=request).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == greedy(folder, messages) != ""


@pytest.fixture
def talking(server: httpx.Client, folder: Path) -> Callable[[], ChatModel]:
    return lambda: ChatModel(str(folder), load_tokenizer(folder), server, GREEDY, max_length=64)


def script(models: list[ChatModel], *lines: str, interactive: bool = True, **options: Callable[[str], None]) -> str:
    """What a chat writes that is told `lines`."""
    told, written = iter(lines), []

    def read() -> str:
        try:
            return next(told)
        except StopIteration:
            raise EOFError from None

    Chat(models, "", read, options.get("write", written.append), interactive).run()
    return "".join(written)


def test_models_side_by_side_each_continue_their_own_conversation(
    talking: Callable[[], ChatModel], folder: Path
) -> None:
    first, second = talking(), talking()
    reply = greedy(folder, [{"role": "user", "content": "hello"}])
    assert script([first], "hello", interactive=False) == f"{reply}\n"
    output = script([first, second], "hello", "", "again", "/exit", "never said")
    turns = [{"role": "user", "content": "hello"}]
    turns += [{"role": "assistant", "content": greedy(folder, turns)}, {"role": "user", "content": "again"}]
    turns += [{"role": "assistant", "content": greedy(folder, turns)}]
    assert first.messages == second.messages == turns
    assert output.count(f"[{folder}]") == 4
    assert output.count(turns[-1]["content"]) >= 2


def test_commands_begin_the_conversation_again(talking: Callable[[], ChatModel]) -> None:
    model = talking()
    script([model], "hello", "/reset")
    assert model.messages == []
    assert "error: the chat template refuses a conversation" in script([model], "/system be kind", "hello")
    assert model.messages == [{"role": "system", "content": "be kind"}]
    assert "there is no command /rest (did you mean `/reset`?)" in script([model], "/rest")


def test_what_fails_ends_a_script_and_not_a_conversation(talking: Callable[[], ChatModel]) -> None:
    model = talking()
    assert "error: the conversation has" in script([model], "x" * 99, "hello")
    assert [message["content"] for message in model.messages][::2] == ["hello"]
    with pytest.raises(StageError, match=r"tokens, and .* reads 64 with its reply: /reset begins a new one"):
        script([model], "x" * 99, interactive=False)


def test_ctrl_c_cuts_a_reply_off(talking: Callable[[], ChatModel]) -> None:
    model = talking()
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    script([model], "hello", "again", write=write)
    assert "(the reply is cut off, and no part of the conversation)" in written[1]
    assert [message["content"] for message in model.messages][::2] == ["again"]


def test_a_request_that_the_server_refuses_is_an_error(server: httpx.Client, folder: Path) -> None:
    other = ChatModel("another", load_tokenizer(folder), server, GREEDY, max_length=64)
    with pytest.raises(StageError, match=r"another: the server refuses the conversation .*does not exist"):
        list(other.reply("hello"))


@pytest.mark.slow("starts an engine")
@pytest.mark.usefixtures("forked")
def test_generate_says_how_far_it_is_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deployments.cli.sampling.end_in_order", lambda: None)  # of this process's signals
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    asked = ["generate", str(folder), "--lines", "--max-tokens", "4", "--rollout", "cpu_cache_gib=0.05"]
    done = CliRunner().invoke(app, asked, input="hello\n")
    assert (done.exit_code, capfd.readouterr().err) == (0, "")
    assert done.stderr == f"1 prompts; loading {folder}\n1 of 1 prompts completed\n"
    assert [row["prompt"] for row in map(json.loads, done.stdout.splitlines())] == [
        [{"role": "user", "content": "hello"}]
    ]
