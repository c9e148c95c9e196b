"""What the documentation says can be done: every recipe in it can be planned, the Python runs, links lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deployments.cli.init import RECIPE_FILE, SHARED, STARTERS, Method, filled, recipe_values
from rlhf_core.pipeline.prepare import check
from rlhf_core.stages.table import STAGES
from tests.hub import REPOSITORY, running_hub
from tests.rlhf_core.recipes import QUESTION, model_folder

pytestmark = pytest.mark.parts

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / "AGENTS.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*.md"))]
ROWS: Mapping[str, Any] = {
    "text": {"text": "Two and two are four."},
    "conversations": {"prompt": QUESTION, "completion": "four"},
    "preferences": {"prompt": QUESTION, "chosen": "four", "rejected": "five"},
    "unpaired": {"prompt": QUESTION, "completion": "four", "label": True},
    "stepwise": {"prompt": QUESTION, "steps": ["two", "four"], "labels": [False, True]},
    "completions": {"prompt": QUESTION, "completions": ["four", "five"]},
    "reward_bench": {"prompt": QUESTION, "chosen": "four", "rejected": "five", "subset": "sums"},
    "prompts": {
        "prompt": QUESTION,
        "answer": "four",
        "question": QUESTION,
        "solution": "four",
        "environment": "guess",
        "completion": "four",
        "verdicts": {"right": True},
        "responses_create_params": {"input": QUESTION},
    },
}
# Of stages; of others: prompts.
FORMAT_OF = {"pretrain": "text", "sft": "conversations", "reward_model": "preferences", "preference": "preferences",
             "logprobs": "preferences", "distillation": "conversations", "top_logprobs": "conversations",
             "process_reward_model": "stepwise", "pairs": "completions", "conditional": "completions",
             "score": "completions", "kto": "unpaired"}  # fmt: skip
# What the parts of recipes on the pages are parts of; a page writes `…` where it leaves settings out.
REST: Mapping[str, Any] = YAML(typ="safe", pure=True).load("""
base: {source: {type: folder, path: model}}
sft: &supervised {dataset: conversations, batch_size: 1, max_length: 64, optimizer: &optimizer {learning_rate: 1e-5}}
helpful: &judge {stage: reward_model, dataset: pairs, batch_size: 1, max_length: 64, optimizer: *optimizer}
harmless: *judge
rl:
  algorithm: grpo
  dataset: questions
  steps: 100
  prompts_per_step: 8
  sampling: {max_tokens: 64}
  rollout: {max_length: 512}
  grpo: {rewards: &scorers {exact: {type: verifier}}, optimizer: *optimizer}
  ppo: {rewards: *scorers, optimizer: *optimizer, critic: {optimizer: *optimizer}}
evaluation: {dataset: held_out, scorers: *scorers, sampling: {max_tokens: 64}, rollout: {max_length: 512}}
""")
# Of stages that only some pages have.
FURTHER: Mapping[str, Any] = {
    "generate": {
        "samples": 8,
        "sampling": {"max_tokens": 64},
        "rewards": REST["evaluation"]["scorers"],
        "rollout": {"max_length": 512},
    },
    "score": {},
    "pairs": {},
    "unpaired": {},
    "best_of_n": {},
    "conditional": {},
    "conditional_prompts": {"dataset": "questions"},
    "preference": REST["sft"],
    "kto": REST["sft"],
    "process_reward_model": REST["sft"],
    "logprobs": {"dataset": "pairs", "max_length": 64},
    "distillation": REST["sft"],
    "top_logprobs": {"dataset": "talks", "max_length": 64},
    "calibration": {},
    "benchmark": {},
    "gate": {"candidate": "rl", "better": {"exact": {"by": 0.0}}},
    "reward_model": {name: value for name, value in REST["helpful"].items() if name != "stage"},
}


MODEL = "Qwen/Qwen2.5-0.5B-Instruct"  # of the tutorials
FILE_NAME = re.compile(r"# (\w+\.py)\n")  # of a block of Python that is a file of the page's recipes
RUBRIC = re.compile(r"^```\n# rubric\.yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for n, found in enumerate(re.finditer(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL), 1):
            yield pytest.param(found[1], id=f"{page.relative_to(ROOT)}-{n}")


@pytest.mark.endurance("mutations")
@pytest.mark.parametrize("block", list(blocks("yaml")))
@pytest.mark.slow("plans a recipe")
def test_every_recipe_and_every_part_of_one_can_be_planned(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = YAML(typ="safe", pure=True).load(block)
    if "extends" in recipe:
        path = tmp_path / "recipe.yaml"  # a shipped recipe is found from anywhere
        path.write_text(json.dumps(recipe))
        assert check(str(path), []).graph
        return
    recipe = whole(recipe)
    (folder := tmp_path / "recipes").mkdir()
    (tmp_path / "models").mkdir()
    with running_hub() as hub:
        model_folder(folder, context=1024, special_tokens=("<|im_start|>", "<|im_end|>"))
        put_files(recipe, folder)
        hub.commit({"rows.jsonl": lines("prompts")})
        for name, value in hub.environment(str(tmp_path / "hf")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
        graph = check(str(folder / "recipe.yaml"), []).graph
    assert set(recipe) & set(STAGES) <= {name.partition(".")[0] for name in graph}


def whole(block: dict[str, Any]) -> dict[str, Any]:
    """A recipe that holds `block`, completed by what the page leaves out."""
    if "name" in block:
        return block | ({"evaluation": REST["evaluation"]} if block.get("evaluation") == "…" else {})
    given = {
        name: {"stage": "sft"} if "ref" in stage else stage  # no store has it: a model of the recipe in its place
        for name, stage in block.items()
        if name not in ("data", "prices")
    }
    order = list(given) if "base" in given and len(given) > 1 else in_order(given)
    if "evaluation" not in given and "evaluation" in order:
        order = [*(name for name in order if name != "evaluation"), "evaluation"]
    stages = {name: joined(rest_of(name, given.get(name, {})), given.get(name, {})) for name in order}
    data = {
        name: {"format": form, "on_overlap": "allow"}
        for name, form in datasets(stages)
        if not makes_dataset(stages, name)
    }
    prices = {"prices": block["prices"]} if "prices" in block else {}
    return {"name": "page", "data": joined(data, block.get("data", {})), **prices, **stages}


def in_order(given: Mapping[str, Any]) -> list[str]:
    """The names of REST and `given`: a new one stands before the one that follows it on the page, or last."""
    names, following = list(REST), None
    for name in reversed(given):
        if name not in names:
            names.insert(names.index(following) if following else len(names), name)
        following = name
    return names


def makes_dataset(stages: Mapping[str, Any], name: str) -> bool:
    return stages.get(name, {}).get("stage") in (
        "generate",
        "score",
        "pairs",
        "unpaired",
        "best_of_n",
        "conditional",
        "conditional_prompts",
    )


def rest_of(name: str, stage: dict[str, Any]) -> dict[str, Any]:
    return dict(REST.get(name) or (REST | FURTHER)[stage.get("stage", name)])


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`second` in place of what `first` has; mappings are joined, except rewards, of which each page shows all."""
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key not in ("rewards", "source")
        result[key] = joined(result[key], value) if both else value
    return {key: value for key, value in result.items() if key != "…"}


def datasets(stages: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The datasets that the stages name, with their formats."""

    def named(value: Any, form: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            if isinstance(value.get("dataset"), str):
                yield value["dataset"], form
            for inner in value.values():
                yield from named(inner, form)

    for name, stage in stages.items():
        yield from named(stage, FORMAT_OF.get(stage.get("stage", name), "prompts"))


def put_files(recipe: dict[str, Any], folder: Path) -> None:
    """The files that `recipe` names in `folder`; where it leaves a source out, gives it one."""
    for number, (name, dataset) in enumerate(recipe["data"].items()):
        source = dataset.setdefault("source", {"type": "files", "paths": [f"{name}.jsonl"]})
        for path in source.get("paths", ()):
            of_a_starter = [] if dataset["format"] in ROWS else list(STARTERS.glob(f"*/{path}"))
            made = of_a_starter[0].read_bytes() if of_a_starter else lines(dataset["format"], 8 * number)
            (folder / path).write_bytes(made)
        if source["type"] == "hub":
            source["repository"] = REPOSITORY
        if source["type"] == "harbor":
            shutil.copytree(ROOT / "deployments" / "recipes" / "tiny_harbor" / "tasks", folder / source["folder"])
    for name, stage in recipe.items():
        if name != "base" and isinstance(stage, dict) and stage.get("source", {}).get("type") == "hub":
            stage["source"] = {"type": "folder", "path": "model"}
    source = recipe["base"]["source"]
    if source["type"] == "hub":  # the page's repository is not there: a folder in its place
        recipe["base"] = {"chat_template": "chatml"} | recipe["base"]  # it writes tools, as that of the page's model
        recipe["base"]["source"] = {"type": "folder", "path": "model"}
    elif source["type"] == "folder":
        (folder / "model").rename((folder / source["path"]).resolve())
    on_pages = {found[1]: block.values[0] for block in blocks("python") if (found := FILE_NAME.match(block.values[0]))}
    on_pages = {file.name: file.read_text() for file in STARTERS.glob("*/*.py")} | on_pages
    for path in re.findall(r'"path": "(\w+\.py)"', json.dumps(recipe)):
        text = "def reward(completions, prompts, rows):\n    return [0.0] * len(completions)\n"
        (folder / path).write_text(on_pages.get(path, text))
    if '"task_folder"' in json.dumps(recipe):
        shutil.copytree(ROOT / "deployments" / "recipes" / "tiny_benchmark", folder / "tasks")
        tasks = (folder / "tasks" / "choice.yaml").read_text()
        (folder / "tasks" / "words.yaml").write_text(tasks.replace("task: choice", "task: words"))
    if '"rubric.yaml"' in json.dumps(recipe):
        (rubric,) = (found[1] for page in PAGES if (found := RUBRIC.search(page.read_text(encoding="utf-8"))))
        (folder / "rubric.yaml").write_text(rubric)


def lines(form: str, first: int = 0) -> bytes:
    """Eight rows, numbered from `first`, so that those of two datasets differ."""
    return b"".join(
        json.dumps(
            {
                key: f"{value} {n}" if isinstance(value, str) and key != "environment" else value
                for key, value in ROWS[form].items()
            }
        ).encode()
        + b"\n"
        for n in range(first, first + 8)
    )


@pytest.mark.parametrize("method", Method)
def test_the_tutorials_show_what_init_writes(method: Method, tmp_path: Path) -> None:
    page = "".join(page.read_text("utf-8") for page in sorted((ROOT / "docs/tutorials").glob("*.md")))
    values = recipe_values(MODEL, tmp_path)
    recipe = filled((STARTERS / method / RECIPE_FILE).read_text(), values)
    before, at, evaluation = recipe.replace(f'"{MODEL}"', MODEL).partition("evaluation:")
    assert before in page
    assert f"{at}{evaluation}" in page  # once for all starters with the same
    for file in [*(STARTERS / method).glob("*.py"), *SHARED.glob("*.py")]:
        assert file.read_text().strip() in page


@pytest.mark.parametrize("block", list(blocks("python")))
def test_all_python_compiles(block: str) -> None:
    compile(block, "a page", "exec")


def test_the_first_page_shows_the_block_of_tiny_and_a_reward_that_runs() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    recipe, reward = (
        re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for language in ("yaml", "python")
    )
    yaml = YAML(typ="safe", pure=True)
    shown, tiny = yaml.load(recipe[0])["rl"], yaml.load(ROOT / "deployments/recipes/tiny.yaml")["rl"]
    assert shown == {key: tiny[key] for key in shown}
    exec(reward[0], names := {})  # type: ignore[var-annotated]
    assert names["reward"](["It is Four.", "five"], ["2+2?"] * 2, [{"answer": "four"}] * 2) == [1.0, 0.0]


def test_the_reward_of_its_page_runs() -> None:
    page = (ROOT / "docs/guides/rewards.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(block, names := {})  # type: ignore[var-annotated]
    assert names["brevity"](["four", "fifteen"], ["2+2?"] * 2, [{}] * 2, longest=5) == [
        {"reward": -0.8, "score": 1.0}, {"reward": -1.4, "score": 0.0},
    ]  # fmt: skip


def test_the_entry_of_the_page_on_plugins_is_that_of_the_example() -> None:
    page = (ROOT / "docs/guides/plugins.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    file = (ROOT / "examples/plugin/src/alignment_example/reward.py").read_text(encoding="utf-8")
    assert [part for part in block.split("\n\n\n") if part not in file] == []


def test_the_python_of_its_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from deployments.cli.main import app

    model_folder(tmp_path, context=1024)
    CliRunner().invoke(app, ["init", "sft", str(tmp_path / "mine"), "--model", str(tmp_path / "model")])
    page = (
        (ROOT / "docs/guides/python.md")
        .read_text()
        .replace("/tmp/", f"{tmp_path}/")
        .replace('"mine/', f'"{tmp_path}/mine/')
    )
    found = re.findall(r"^(<!-- not run.*?-->\n)?```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ran = [block for excluded, block in found if not excluded]
    for block in ran:
        exec(compile(block, "docs/guides/python.md", "exec"), {})
    assert len(ran) == 3
    assert "data.conversations: computed" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES + OTHERS:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"(?:\]\(|^\[\d+\]: )([^)#\s]*(?:#[^)\s]*)?)(?:\)|$)", text, re.MULTILINE):
            name, _, anchor = target.partition("#")
            if name.startswith(("http", "mailto")):
                continue
            file = page if not name else (page.parent / name)
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_no_line_is_longer_than_200_characters() -> None:
    """But in the lab, whose pages are records."""
    pages = [page for page in PAGES if page.parent != ROOT / "docs/lab"]
    assert len(pages) > 150
    lines = [(page, n, line) for page in pages for n, line in enumerate(page.read_text("utf-8").splitlines(), 1)]
    assert [f"{page.relative_to(ROOT)}:{n}" for page, n, line in lines if len(line) > 200] == []


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


COMMAND = re.compile(r"(?:^|`)(?:\$ )?alignment ([a-z][a-z-]+)((?: [^`#\n]*)?)", re.MULTILINE)


def test_every_command_and_option_that_a_page_names_exists() -> None:
    import typer

    from deployments.cli.main import app

    group: Any = typer.main.get_command(app)
    named = [
        (page, found[1], found[2]) for page in PAGES + OTHERS for found in COMMAND.finditer(page.read_text("utf-8"))
    ]
    assert len(named) > 300
    wrong = []
    for page, name, rest in named:
        command = group.commands.get(name)
        options = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", rest))
        if hasattr(command, "commands"):  # of a group, the options of all
            known = {opt for each in command.commands.values() for parameter in each.params for opt in parameter.opts}
        else:
            known = {opt for parameter in command.params for opt in parameter.opts} if command else set()
        if command is None or not options <= known | {"--help"}:
            wrong.append(f"{page.relative_to(ROOT)}: alignment {name} {' '.join(sorted(options - known))}")
    assert wrong == []


def test_every_folder_of_code_is_in_the_table_of_folders() -> None:
    page = (ROOT / "docs/reference/folders.md").read_text(encoding="utf-8")
    table = page.partition("## Folders\n")[2].partition("\n## ")[0]
    named = {found[1] for found in re.finditer(r"^\| `([\w/]+)/` \|", table, re.MULTILINE)}
    packages = {f"rlhf_core/{file.parent.name}" for file in (ROOT / "rlhf_core").glob("*/__init__.py")}
    assert packages == {name for name in named if name.startswith("rlhf_core/")}
    assert {name for name in named if not (ROOT / name).is_dir()} == set()
    assert {folder.name for folder in ROOT.glob("[!.]*") if any(folder.glob("*.py"))} <= named


def test_every_message_that_troubleshooting_quotes_is_one_of_the_code() -> None:
    """Between `…`, numbers, names in capitals and values in quotes, which stand for what differs."""
    code = "\n".join(
        text for folder in ("rlhf_core", "flows", "tasks", "deployments") for text in texts_of(ROOT / folder)
    )
    page = (ROOT / "docs/operate/troubleshooting.md").read_text(encoding="utf-8")
    cells = "\n".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    quoted = [two or one for two, one in re.findall(r"``(.+?)``(?!`)|(?<!`)`([^`]+)`(?!`)", cells)]
    parts = [part.strip() for text in quoted for part in re.split(DIFFERS, text)]
    sentences = [part for part in parts if len(part.split()) > 1]
    assert len(sentences) > 50
    assert [part for part in sentences if part not in code] == []


DIFFERS = r"…|`[^`]*`|\b[A-Z]+\b|'\w+'|\bx\b|\b\d+\b"


def texts_of(folder: Path) -> Iterator[str]:
    """Texts of the code, with a mark where an f-string has a value."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
