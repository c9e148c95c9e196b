"""Base models that cannot be built, and incomplete model folders."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.chat.encoding import load_tokenizer
from tests.rlhf_core.recipes import (
    Change,
    Problems,
    model_folder,
    put,
)

pytestmark = pytest.mark.parts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("base", "source", "heads", value=3), "base.source: hidden_size=128 must be heads=3 times an even number"),
        (put("base", "source", "words", value=["<eos>"]), "base.source: words: <eos> is a special token already"),
    ],
)
def test_one_thing_wrong_with_a_model_from_scratch_is_one_sentence(
    problems: Problems, change: Change, expected: str
) -> None:
    said = problems(change)
    assert any(expected in problem for problem in said), said


def index(places: dict[str, str]) -> Callable[[Path], object]:
    """An index in place of the one file, or with it if that is one of its files."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        if "model.safetensors" not in places.values():
            (folder / "model.safetensors").unlink()

    return change


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def tokenizer_file(name: str, **settings: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | settings))


def with_mark(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())


def config(**settings: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def sampling(**settings: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(settings))


def only(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text("{}")

    return change


def shared_number(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["b"] = vocabulary["a"]
    path.write_text(json.dumps(content))


def more_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["extra", "<image>"])
    tokenizer.save_pretrained(folder)


def loop(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


def _link_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blob")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            "base.source.path: model: there is no config.json in this folder, so it is not a model folder",
        ),
        (
            config(model_type="gpt_neox"),
            "base.source.path: model: the weights are not those of config.json (GPTNeoXForCausalLM): missing are "
            "gpt_neox.embed_in.weight, gpt_neox.final_layer_norm.bias, gpt_neox.final_layer_norm.weight and 25 more; "
            "model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight and "
            "17 more belong to another model: give config.json and weights of one model",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "model: config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model: config.json does not name a model_type"),
        (
            lambda folder: (folder / "config.json").write_text(
                '{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}'
            ),
            "model: config.json names Python code of the model's own (`auto_map`), which is never run, and "
            "transformers has no language model of its model_type",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model: model.safetensors is empty"),
        (_link_to_nothing, "model: model.safetensors is not a file, or a broken link: fetch"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "model: there are no weights in this folder: model.safetensors, or model.safetensors.index.json with its "
            "shards (pytorch_model.bin cannot be used: convert to safetensors)",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "there are two sets of weights, model.safetensors and the files of model.safetensors.index.json: remove",
        ),
        (
            index({"a": "m-1.safetensors"}),
            "model: of the weights, m-1.safetensors that model.safetensors.index.json names",
        ),
        (index({"a": "../m.safetensors"}), "names `../m.safetensors`, which is not a *.safetensors file of this"),
        (index({}), "model: model.safetensors.index.json has no `weight_map` of tensors to files"),
        (index({"a": "model.safetensors"}), "index.json says that a is in model.safetensors, which has no such tensor"),
        (cut("model.safetensors", 2000), "model.safetensors is damaged, or was not copied whole: fetch it again"),
        (cut("config.json", 9), "model: config.json is not JSON (Unterminated string"),
        (pointer("model.safetensors"), "model.safetensors is a Git LFS pointer, not the file: run `git lfs pull`"),
        (pointer("tokenizer.json"), "tokenizer.json is a Git LFS pointer, not the file: run `git lfs pull`"),
        (tokenizer_file("tokenizer_config.json", eos_token=""), "the tokenizer has no end-of-text token"),
        (tokenizer_file("tokenizer_config.json", model_max_length="x"), "make no tokenizer: fetch them again"),
        (
            tokenizer_file(
                "tokenizer.json", added_tokens=[], model={"type": "WordLevel", "vocab": {}, "unk_token": "?"}
            ),
            "model: tokenizer.json and the files beside it make no tokenizer: fetch them again",
        ),
        (tokenizer_file("tokenizer.json", added_tokens=None), "tokenizer.json has no list `added_tokens`: fetch it"),
        (
            tokenizer_file("tokenizer.json", added_tokens=[{"content": "a"}]),
            "tokenizer.json: `added_tokens[0]` is not an object of a whole number `id` and text `content`",
        ),
        (tokenizer_file("tokenizer.json", model={}), "tokenizer.json has no `model` with a `vocab`: fetch it again"),
        (
            tokenizer_file("tokenizer.json", pre_tokenizer={"type": "Own"}),
            "make no tokenizer: fetch them again (data did not match any variant of untagged enum PreTokenizer",
        ),
        *(
            (with_mark(name), f"{name} begins with a byte-order mark (BOM), which does not belong there: save it as")
            for name in ("config.json", "tokenizer.json", "chat_template.jinja")
        ),
        (config(quantization={"bits": 4}), "model: the weights are quantised; give the full ones"),
        (config(quantization_config={}), "model: the weights are quantised; give the full ones"),
        (config(auto_map=None), "config.json: `auto_map` is not an object: remove it"),
        (config(return_dict=False), "config.json: `return_dict` is false, and training reads the outputs by name"),
        (config(rope_parameters={"rope_theta": math.nan}), "config.json: rope_parameters.rope_theta is NaN"),
        (config(rms_norm_eps=-1e-6), "config.json: rms_norm_eps is -1e-06; it must be from 0 to 1: correct it"),
        (config(rms_norm_eps=math.inf), "config.json: rms_norm_eps is inf; it must be from 0 to 1: correct it"),
        (config(num_attention_heads=0), "config.json: num_attention_heads is 0; it must be a whole number above 0"),
        (config(eos_token_id=500), "config.json: eos_token_id is 500, but the vocabulary ends at 101 (vocab_size)"),
        (config(model_type="lama"), "transformers knows no model_type 'lama' (did you mean `llama`?): correct it"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds a list where a JSON object bel"),
        (
            lambda folder: (folder / "generation_config.json").write_text("{"),
            "model: generation_config.json is not JSON",
        ),
        (
            sampling(eos_token_id=[1, 500]),
            "generation_config.json: eos_token_id is 500, but the vocabulary ends at 101",
        ),
        (sampling(pad_token_id="x"), "generation_config.json: pad_token_id is 'x', which is not a token: correct it"),
        (
            sampling(temperature="hot"),
            "generation_config.json: temperature is 'hot', which is not a number: correct it or",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"),
            "there is a model here and an adapter beside",
        ),
        (only("adapter_config.json"), "model: this is an adapter's folder (adapter_config.json), not a model's"),
        (shared_number, "the tokenizer's tokens 'a' and 'b' both have the number"),
        (more_tokens, "the tokenizer's token 'extra' has the number 102, but the model has 102 rows (vocab_size)"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model: there is no tokenizer.json"),
        (
            lambda folder: (folder / "chat_template.jinja").unlink(),
            "model: the tokenizer has no chat template, which all stages but pre-training need: set the base stage's",
        ),
        (lambda folder: folder.rename(folder.with_name("moved")), "model: there is no such folder (looked for /"),
        (loop, "model: there is no such folder (looked for /"),
        (
            lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
            "model: this is a file; give the folder that it is in",
        ),
    ],
)
def test_a_model_folder_that_is_not_whole(
    problems: Problems, break_it: Callable[[Path], object], expected: str
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
        model_folder(root)
        break_it(root / "model")

    said = problems(change)
    assert len(said) == 1
    assert expected in said[0]


def test_a_name_of_the_hub_in_the_place_of_a_folder(problems: Problems) -> None:
    said = problems(put("base", "source", value={"type": "folder", "path": "Qwen/Qwen3-0.6B"}))
    assert len(said) == 1
    assert said[0].startswith("base.source.path: Qwen/Qwen3-0.6B: there is no such folder (looked for /")
    assert said[0].endswith("); if it is on the hub, write `{type: hub, repository: Qwen/Qwen3-0.6B}`")


@pytest.mark.parametrize("keys", [("sft",), ("pretrain",), ("rl", "ppo")], ids=str)
def test_a_dense_model_has_no_experts_to_balance(problems: Problems, keys: tuple[str, ...]) -> None:
    said = problems(put(*keys, "moe_coefficient", value=0.01))
    assert said == [f"{'.'.join(keys)}.moe_coefficient is 0.01, but the base model has no experts to balance; set it 0"]


@pytest.mark.endurance("architectures")
def test_an_auto_map_of_an_architecture_that_transformers_has_is_ignored(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        put("base", "source", value={"type": "folder", "path": "model"})(recipe, root)
        model_folder(root)
        path = root / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "configuration.Own"}}))

    assert problems(change) == []


@pytest.mark.endurance("architectures")
@pytest.mark.slow("a process builds the model's class")
def test_a_folder_with_experts_may_balance_them(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        put("sft", "moe_coefficient", value=0.01)(recipe, root)
        put("base", "source", value={"type": "folder", "path": "model"})(recipe, root)
        model_folder(root)
        path = root / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 2}))

    assert problems(change) == []


def without_template(**settings: str) -> Change:
    """The base model is a folder without a chat template; the recipe gives one as `settings`."""

    def change(recipe: dict[str, Any], root: Path) -> None:
        recipe["base"] = {"source": {"type": "folder", "path": "model"}, **settings}
        model_folder(root)
        (root / "model" / "chat_template.jinja").unlink()
        (root / "own.jinja").write_text(
            "{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else '') }}{% endfor %}"
        )
        (root / "wrong.jinja").write_text("{% if %}")
        (root / "marked.jinja").write_text("\ufeff{{ messages[0].content }}")

    return change


@pytest.mark.parametrize(
    "settings",
    [{"chat_template": "plain"}, {"chat_template": "own.jinja"}, {"input_template": "{prompt}"}],
    ids=str,
)
def test_a_folder_without_a_template_may_be_given_one(problems: Problems, settings: dict[str, str]) -> None:
    assert problems(without_template(**settings)) == []


def test_pre_training_alone_needs_no_template(problems: Problems) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        without_template()(recipe, root)
        for section in ("sft", "reward_model", "rl", "evaluation"):
            del recipe[section]

    assert problems(change) == []


@pytest.mark.parametrize("source", ["folder", "scratch", "hub"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"chat_template": "wrong.jinja"}, "base.chat_template: wrong.jinja: syntax error in line 1 of the chat templ"),
        ({"chat_template": "marked.jinja"}, "marked.jinja: the chat template begins with a byte-order mark (BOM)"),
        (
            {"chat_template": "nothing"},
            "base.chat_template: there is no template `nothing`; there are chatml, llama3, ",
        ),
        (
            {"chat_template": "chatml"},
            "base.chat_template: the tokenizer lacks <|im_start|>, <|im_end|>, special token",
        ),
    ],
)
def test_a_wrong_template_is_one_sentence(
    problems: Problems, source: str, settings: dict[str, str], expected: str
) -> None:
    def change(recipe: dict[str, Any], root: Path) -> None:
        without_template(**settings)(recipe, root)
        if source == "scratch":
            recipe["base"]["source"] = {"type": "scratch", "context_length": 64}
        if source == "hub":
            recipe["base"]["source"] = {"type": "hub", "repository": "some/model"}

    said = problems(change)
    if source == "hub" and settings == {"chat_template": "chatml"}:
        assert said == []  # its tokenizer is known only to the job
    else:
        [problem] = said
        assert expected in problem


def test_lengths_are_measured_with_the_given_template(problems: Problems) -> None:
    """A prompt of 20 characters, 30 more around it, BOS, 8 tokens of answer: 59 of 64; another 6 are too many."""
    assert problems(without_template(input_template="x" * 30 + "{prompt}")) == []
    said = problems(without_template(input_template="x" * 36 + "{prompt}"))
    assert any("the prompt of prompts.jsonl line 1 in `data.prompts` has 57 tokens" in problem for problem in said), (
        said
    )
