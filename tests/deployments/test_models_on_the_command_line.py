"""`alignment generate`, `chat`, `serve` and `merge`: which model is meant, and what is refused before one is loaded."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.cli.sampling import written
from rlhf_core.artifacts.manifest import Kind
from rlhf_core.artifacts.opening import open_store
from rlhf_core.artifacts.repository import ArtifactRepository
from rlhf_core.chat.templates import TEMPLATE_FILE
from rlhf_core.models.folders.folder import copy_tokenizer
from tests.rlhf_core.artifacts.manifests import manifest
from tests.rlhf_core.stages.supervised_runs import base_model
from tests.services import LOOPBACK

pytestmark = pytest.mark.parts

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("model"), hidden=64).folder


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As peft saves it by itself: it names its base."""
    made = tmp_path_factory.mktemp("adapter") / "lora"
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(str(folder)), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    adapted.save_pretrained(str(made))
    return made


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactRepository:
    """The store of the commands, which run in an empty folder."""
    monkeypatch.setenv("ALIGNMENT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ALIGNMENT_STACK_DIR", str(tmp_path / "no stack"))
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return ArtifactRepository(open_store(str(tmp_path / "store")))


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], input="")
    assert done.exit_code == 1, done.output
    return done.stderr.strip().splitlines()[-1]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=IDS).logits
    return found


def test_an_adapter_is_merged_into_the_base_that_it_names(folder: Path, adapter: Path) -> None:
    done = CliRunner().invoke(app, ["merge", str(adapter)])
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{Path('lora-merged').absolute()}\n", "")
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter))
    torch.testing.assert_close(logits(Path("lora-merged")), expected(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert (logits(Path("lora-merged")) - logits(folder)).abs().max() > 0.01
    assert (Path("lora-merged") / TEMPLATE_FILE).read_text() == (folder / TEMPLATE_FILE).read_text()
    assert refused("merge", str(adapter)).endswith("lora-merged exists already: give another folder by -o")


def test_a_merged_model_of_the_current_folder_has_its_name(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(shutil.copytree(adapter, "mine")))
    Path("mine-merged").mkdir()
    assert refused("merge", ".").endswith("mine/mine-merged exists already: give another folder by -o")


def test_artifacts_are_merged_by_their_names(folder: Path, adapter: Path, repository: ArtifactRepository) -> None:
    base = repository.publish(manifest("base", "base", kind=Kind.BASE_MODEL), folder)
    made = manifest("lora", kind=Kind.ADAPTER, parents={"model": base.ref})
    made = repository.publish(made, Path(shutil.copytree(adapter, "unnamed", ignore=shutil.ignore_patterns("*.md"))))
    assert CliRunner().invoke(app, ["merge", str(made.ref), "-o", "merged"]).exit_code == 0
    assert CliRunner().invoke(app, ["merge", str(adapter), "--base", str(base.ref), "-o", "other"]).exit_code == 0
    assert torch.equal(logits(Path("merged")), logits(Path("other")))
    near = f"has no artifact or alias `sft/{made.ref.key[1:13]}` (did you mean `{made.ref}`?)"
    assert near in refused("chat", f"sft/{made.ref.key[1:13]}")
    assert refused("merge", str(base.ref)).endswith("is a whole model, no adapter: there is nothing to merge")


def test_the_adapters_own_tokenizer_is_kept_and_must_fit(folder: Path, adapter: Path, tmp_path: Path) -> None:
    """A model without a template becomes one with a template by many an adapter made elsewhere."""
    mine = Path(shutil.copytree(adapter, tmp_path / "mine"))
    copy_tokenizer(folder, mine)
    (mine / TEMPLATE_FILE).write_text("{{ messages[0].content }}")
    assert CliRunner().invoke(app, ["merge", str(mine), "-o", "merged"]).exit_code == 0
    assert Path("merged", TEMPLATE_FILE).read_text() == "{{ messages[0].content }}"
    tokenizer = (mine / "tokenizer.json").read_text().replace('"vocab": {', '"vocab": {"far beyond": 100000, ', 1)
    (mine / "tokenizer.json").write_text(tokenizer)
    assert "token 'far beyond' has the number 100000, but the model has" in refused("merge", str(mine), "-o", "wrong")
    assert not Path("wrong").exists()


def test_an_adapter_needs_its_base(adapter: Path, folder: Path) -> None:
    lost = Path(shutil.copytree(adapter, "lost"))
    text = (lost / "adapter_config.json").read_text().replace(str(folder), "somebody/base")
    (lost / "adapter_config.json").write_text(text)
    assert refused("merge", "./lost") == (
        "error: ./lost is an adapter, and the model it was trained on is not here: give --base MODEL"
    )
    assert refused("chat", str(folder), "--base", str(folder)).endswith("this is not an adapter, so omit --base")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", "./nowhere"), "error: ./nowhere: there is no such folder"),
        (("serve", "nowhere"), "error: nowhere: there is no such folder here; .* has no artifact or alias `nowhere`"),
        (
            ("chat", "some/model"),
            "error: some/model: there is no such folder here; .*: `hf download some/model --local",
        ),
        (("generate", "MODEL", "nowhere.jsonl"), "error: nowhere.jsonl: there is no such file"),
        (("generate", "MODEL", "-o", "no/such/file"), "error: --out no/such/file: there is no such folder"),
        (("generate", "MODEL"), "error: standard input: there is no prompt in it"),
        (("generate", "MODEL", "--temperature", "3"), "error: --temperature is 3.0: it must be from 0 to 2: .*greedy"),
        (("chat", "MODEL", "--rollout", "max_lenth=9"), "error: --rollout max_lenth: .*did you mean `max_length`"),
        (("chat", "MODEL", "--rollout", "compiled=2"), "error: --rollout compiled is 2: it must be true or false"),
        (
            ("chat", "MODEL", "--rollout", "max_length=[1,[2]]"),
            r"max_length is the list \[1, \[2\]\]: it must be a whole",
        ),
        (("chat", "~nobody-here/x"), "error: ~nobody-here/x: unknown user ~nobody-here"),
        (("chat", ""), "error: the name of the model is empty"),
        (("chat", "MODEL", "--rollout", "compiled"), "error: --rollout compiled: write it as key=value"),
        (
            ("chat", "MODEL", "--chat-template", "chatlm"),
            "--chat-template: there is no template `chatlm` .did you mean",
        ),
        (("chat", "BARE"), "error: bare: the tokenizer has no chat template, .*pass --chat-template, one of chatml"),
        (("serve", "CUT"), "error: cut: model.safetensors is damaged, or was not copied whole"),
        (("chat", "REWARD"), "error: reward is a reward model, which writes nothing: `alignment serve-reward`"),
    ],
)
def test_what_cannot_be_is_one_sentence(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    bare, cut, reward = (Path(shutil.copytree(folder, name)) for name in ("bare", "cut", "reward"))
    (bare / TEMPLATE_FILE).unlink()
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    config = (folder / "config.json").read_text().replace("ForCausalLM", "ForSequenceClassification")
    (reward / "config.json").write_text(config)
    places = {"MODEL": str(folder), "BARE": "bare", "CUT": "cut", "REWARD": "reward"}
    said = refused(*(places.get(argument, argument) for argument in arguments))
    assert re.search(message, said), said


def test_a_port_that_is_taken_is_refused_before_the_model_is_looked_for() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", "nowhere", "--port", str(port))
    assert said.startswith(f"error: cannot listen on {LOOPBACK}, port {port}")


@pytest.mark.endurance("chaos")
def test_what_is_interrupted_leaves_no_file(folder: Path) -> None:
    """It waits for prompts when the signal comes; `out` keeps what an earlier call wrote."""
    Path("out.jsonl").write_text("before")
    command = [sys.executable, "-m", "deployments.cli.main", "generate", str(folder), "-o", "out.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        while not list(Path().glob(".out.jsonl.*")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert os.listdir() == ["out.jsonl"]
    assert Path("out.jsonl").read_text() == "before"


def test_completions_replace_the_file_that_a_link_leads_to_and_no_device(tmp_path: Path) -> None:
    Path("real").write_text("before")
    Path("link").symlink_to("real")
    with written(Path("link")) as file:
        file.write("after")
        assert Path("real").read_text() == "before"
    assert (Path("link").is_symlink(), Path("real").read_text(), len(list(Path().iterdir()))) == (True, "after", 2)
    device = Path("/dev/null").stat().st_rdev
    with written(Path("/dev/null")) as file:
        file.write("after")
    assert Path("/dev/null").stat().st_rdev == device
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), written(Path("/dev/full")) as file:
        file.write("after")


def test_a_merged_model_without_room_leaves_nothing(adapter: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        said = refused("merge", str(adapter), "-o", "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"/model may not grow as it has to \(`ulimit -f` says how far\): raise the limit", said), said
    assert list(Path().iterdir()) == []
