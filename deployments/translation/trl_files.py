"""Files of TRL: a YAML file, or a script, which is parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.translation.settings import Expression, Origin, place_of
from rlhf_core.errors import RecipeError
from rlhf_core.system.yaml_text import YAMLTextError, read_yaml

# Beginnings of the names of configs and trainers.
KINDS = {"GRPO": "grpo", "RLOO": "rloo", "DPO": "dpo", "KTO": "kto", "Reward": "reward", "SFT": "sft"}

_POSITIONS = {  # arguments of the trainers, which may be given by position
    "grpo": ("model", "reward_funcs", "args", "train_dataset"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset"),
    "kto": ("model", "ref_model", "args", "train_dataset"),
    "reward": ("model", "args", "data_collator", "train_dataset"),
    "sft": ("model", "args", "data_collator", "train_dataset"),
}
_REWARDS_FILE = "rewards.py"  # functions of a script, beside the recipe
_OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_OF_YAML = {"max_completion_len": 1280, "soft_punish_cache": 256}  # of the command `trl grpo`
_OF_TRL: dict[str, dict[str, Any]] = {  # trl.rewards
    "accuracy_reward": {"type": "verifier", "kind": "math"},
    "reasoning_accuracy_reward": {"type": "verifier", "kind": "math", "pattern": r"(?s)\A.*</think>(.*)"},
    "think_format_reward": {
        "type": "function", "path": _REWARDS_FILE, "function": "think_format_reward", "form": "trl",
    },
}  # fmt: skip
_THINK_FORMAT = '''def think_format_reward(completions, **kwargs):
    """Return 1 for a completion that begins with its only <think> and has </think>, else 0, as TRL's does."""
    return [
        float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)
        for text in completions
    ]
'''
_LOADERS = ("json", "csv", "parquet")  # of `load_dataset`, whose rows are in `data_files`
_OF_YAML = ("model_name_or_path", "dataset_name", "dataset_config", "dataset_train_split", "reward_funcs")


@dataclass(frozen=True, slots=True)
class TRLReward:
    """An entry of reward_funcs."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # of the reward here
    model: str | None = None  # that gives the reward
    overlong: dict[str, Any] | None = None  # arguments of a soft overlong punishment, which is no reward here


@dataclass(slots=True)
class TRLFile:
    """The trainer, settings, model, data and rewards of a file of TRL."""

    kind: str  # of KINDS
    settings: dict[str, Any]  # by name; an Expression where a value is computed
    model: str | None
    path: str | list[str]  # of the data set: its name, or its files
    subset: str | None = None
    split: str | None = None
    lora: dict[str, Any] | None = None
    rewards: list[TRLReward] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # written beside the recipe
    is_yaml: bool = False


def read_file(origin: Origin) -> TRLFile:
    """Read a script (.py) or a YAML file. Raises RecipeError."""
    if origin.file.suffix == ".py":
        return _Script(origin).read()
    if origin.file.suffix in (".yaml", ".yml"):
        return _of_yaml(origin)
    raise RecipeError(f"{origin.file}: give a script of TRL (.py), or the .yaml file of its command")


def _of_yaml(origin: Origin) -> TRLFile:
    try:
        values = read_yaml(origin.read())
    except YAMLTextError as error:
        raise RecipeError(f"{origin.file}: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("dataset_name"), str):
        raise RecipeError(f"{origin.file}: it has no dataset_name, so there is nothing to train on")
    settings = {str(name): value for name, value in values.items() if name not in _OF_YAML}
    named = values.get("reward_funcs") or []
    rewards = [_reward_of_yaml(name, origin) for name in ([named] if isinstance(named, str) else named)]
    return TRLFile(
        _kind_of_yaml(settings, bool(rewards), origin),
        settings,
        values.get("model_name_or_path"),
        values["dataset_name"],
        values.get("dataset_config"),
        values.get("dataset_train_split"),
        {name: settings.pop(name) for name in list(settings) if _is_of_lora(name)}
        if settings.get("use_peft")
        else None,
        rewards,
        {_REWARDS_FILE: _THINK_FORMAT} if "think_format_reward" in named else {},
        is_yaml=True,
    )


def _is_of_lora(name: str) -> bool:
    return name in ("use_dora", "use_rslora") or (name.startswith("lora_") and name != "lora_task_type")


def _kind_of_yaml(settings: Mapping[str, Any], has_rewards: bool, origin: Origin) -> str:
    """Return the kind of training, which is not in the file: that of its settings."""
    if has_rewards or {"num_generations", "max_completion_length"} & settings.keys():
        return "grpo"
    if {"beta", "loss_type", "precompute_ref_log_probs", "label_smoothing"} & settings.keys():
        return "dpo"
    if {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token"} & settings.keys():
        return "sft"
    raise RecipeError(
        f"{origin.file}: it does not say whether it is of `trl grpo`, `trl dpo` or `trl sft`: add reward_funcs, beta "
        "or packing"
    )


def _reward_of_yaml(name: str, origin: Origin) -> TRLReward:
    """Return a reward of TRL, a reward model, or a function of a module."""
    if name in _OF_TRL:
        return TRLReward(name, _OF_TRL[name])
    if name == _OVERLONG:
        return TRLReward(name, overlong=_OVERLONG_OF_YAML)
    if "/" in name:
        return TRLReward(name, model=name)
    module, _, function = name.rpartition(".")
    file = origin.local(f"{module.replace('.', '/')}.py") if module else None
    if file is None:
        raise RecipeError(f"{origin.file}: reward_funcs names {name}, and there is no Python file of it to call")
    tree = _parsed(file.read_text(encoding="utf-8"), str(file))
    functions = [node for node in tree.body if isinstance(node, _FUNCTIONS) and node.name == function]
    return _reward(function, place_of(file, origin.folder), functions)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _reward(function: str, path: str, code: Sequence[ast.AST]) -> TRLReward:
    """Return a function reward, of messages where the code reads their `content`."""
    reads = (node.slice for each in code for node in ast.walk(each) if isinstance(node, ast.Subscript))
    messages = any(isinstance(index, ast.Constant) and index.value == "content" for index in reads)
    form = "trl_conversational" if messages else "trl"
    return TRLReward(function, {"type": "function", "path": path, "function": function, "form": form})


def _parsed(text: str, shown: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecipeError(f"{shown}: it is no Python: {error}") from error


class _Script:
    """A script with the call of one trainer."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._text = origin.read()
        self._tree = _parsed(self._text, str(origin.file))
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._assigned.setdefault(target.id, []).append(node.value)

    def read(self) -> TRLFile:
        configs = [call for call in self._calls("Config") if _short_name(call)[: -len("Config")] in KINDS]
        trainers = [call for call in self._calls("Trainer") if _short_name(call)[: -len("Trainer")] in KINDS]
        arguments = self._arguments(trainers[0]) if len(trainers) == 1 else {}
        if len(trainers) != 1 or len(configs) != ("args" in arguments):  # without args, all is TRL's default
            raise RecipeError(
                f"{self._origin.file}: it has {len(configs)} configs and {len(trainers)} trainers of "
                f"{', '.join(KINDS)}; give a script with one trainer, and the config that is its `args`"
            )
        trainer = trainers[0]
        kind = KINDS[_short_name(trainer)[: -len("Trainer")]]
        settings = {
            name: value
            for config in configs
            for name, value in {**self._settings(config, ("output_dir",)), **self._set_later(config)}.items()
        }
        read = TRLFile(kind, settings, None, "")
        self._read_model(arguments.pop("model", None), read)
        self._read_data(arguments.pop("train_dataset", None), read)
        if "peft_config" in arguments:
            adapters = self._calls("LoraConfig")
            read.lora = self._settings(adapters[0], ("r",)) if len(adapters) == 1 else None
            if read.lora is not None:
                del arguments["peft_config"]
        if (rewards := arguments.pop("reward_funcs", None)) is not None:
            self._read_rewards(rewards, read)
        arguments.pop("args", None)
        name = _short_name(trainer)
        read.settings |= {f"{name}.{key}": self._value(value) for key, value in arguments.items()}
        read.settings |= {f"{name}.**": Expression(ast.unparse(k.value)) for k in trainer.keywords if k.arg is None}
        return read

    def _arguments(self, trainer: ast.Call) -> dict[str, ast.expr]:
        """Return the arguments of a trainer by name; those beyond its known positions have a number."""
        names = _POSITIONS[KINDS[_short_name(trainer)[: -len("Trainer")]]]
        arguments = {names[i] if i < len(names) else f"argument {i + 1}": value for i, value in enumerate(trainer.args)}
        return arguments | {keyword.arg: keyword.value for keyword in trainer.keywords if keyword.arg is not None}

    def _calls(self, ending: str) -> list[ast.Call]:
        return [
            node for node in ast.walk(self._tree) if isinstance(node, ast.Call) and _short_name(node).endswith(ending)
        ]

    def _settings(self, call: ast.Call, positional: Sequence[str]) -> dict[str, Any]:
        values = {name: self._value(value) for name, value in zip(positional, call.args, strict=False)}
        values |= {f"argument {i}": self._value(call.args[i]) for i in range(len(positional), len(call.args))}
        for keyword in call.keywords:
            name = keyword.arg if keyword.arg is not None else f"**{ast.unparse(keyword.value)}"
            values[name] = self._value(keyword.value) if keyword.arg is not None else Expression(name)
        return values

    def _set_later(self, config: ast.Call) -> dict[str, Any]:
        """Return the settings that are assigned to the config after it was made."""
        names = {name for name, values in self._assigned.items() if config in values}
        values = {}
        for node in ast.walk(self._tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in names
                ):
                    assert isinstance(node, ast.Assign)
                    values[target.attr] = self._value(node.value)
        return values

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a literal, or of a name that is one literal; else the expression."""
        if isinstance(node, ast.Name) and len(self._assigned.get(node.id, ())) == 1:
            node = self._assigned[node.id][0]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            return Expression(ast.unparse(node))

    def _read_model(self, node: ast.expr | None, read: TRLFile) -> None:
        """Read the model: a name, or the first argument of `from_pretrained`, whose others are settings."""
        value = None if node is None else self._value(node)
        loaded = self._assigned.get(node.id, [node])[0] if isinstance(node, ast.Name) else node
        if isinstance(loaded, ast.Call) and _short_name(loaded) == "from_pretrained":
            settings = self._settings(loaded, ("name",))
            value = settings.pop("name", None)
            read.settings |= {f"from_pretrained.{name}": setting for name, setting in settings.items()}
        read.model = value if isinstance(value, str) else None

    def _read_data(self, node: ast.expr | None, read: TRLFile) -> None:
        """Read the data set that `node` begins with, and name what is done to it."""
        parts = [] if node is None else list(self._parts(node, set()))
        loads = [each for each in parts if isinstance(each, ast.Call) and _short_name(each) == "load_dataset"]
        if not loads:
            raise RecipeError(f"{self._origin.file}: train_dataset does not come from one load_dataset(…)")
        load = loads[0]
        values = self._settings(load, ("path", "name"))
        path, files = values.pop("path", None), values.pop("data_files", None)
        splits = [each.slice.value for each in parts
                  if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant)]  # fmt: skip
        subset, split = values.pop("name", None), values.pop("split", splits[0] if splits else None)
        if path in _LOADERS and files is not None:
            read.path, split = files[split or "train"] if isinstance(files, dict) else files, None
        elif isinstance(path, str):
            read.path = path
            values |= {} if files is None else {"data_files": files}
        else:
            raise RecipeError(f"{self._origin.file}: load_dataset(…) does not name its data set by a text")
        read.subset = subset if isinstance(subset, str) else None
        read.split = split if isinstance(split, str) else None
        read.settings |= {f"load_dataset.{name}": value for name, value in values.items()}
        done = [each for each in parts if isinstance(each, ast.Call) and each is not load]
        read.settings |= {f"train_dataset.{_short_name(each)}": Expression(ast.unparse(each)) for each in done}

    def _parts(self, node: ast.expr, seen: set[str]) -> Iterator[ast.expr]:
        """Yield calls and subscripts that a value is made by, also through names."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Call | ast.Subscript):
            yield node
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            for value in self._assigned.get(node.id, ()):
                yield from self._parts(value, seen)
        for child in ast.iter_child_nodes(node):
            inner = child.value if isinstance(child, ast.keyword) else child
            if isinstance(inner, ast.expr):
                yield from self._parts(inner, seen)

    def _read_rewards(self, node: ast.expr, read: TRLFile) -> None:
        """Read the rewards, and copy those that are functions of the script into a file of their own."""
        if isinstance(node, ast.Name) and len(self._assigned.get(node.id, ())) == 1:
            node = self._assigned[node.id][0]
        defined = _bindings(self._tree)
        needed: dict[int, ast.stmt] = {}
        for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            named = self._value(each)
            read.rewards.append(
                TRLReward(named, model=named)
                if isinstance(named, str)
                else self._of_trl(each, defined) or self._of_script(each, defined, needed)
            )
        lines = self._text.splitlines()
        parts = ["\n".join(lines[_first_line(needed[i]) - 1 : needed[i].end_lineno]) for i in sorted(needed)]
        if parts:
            parts.insert(0, f'"""Reward functions of {self._origin.file.name}, as they are there."""')
        if any(reward.name == "think_format_reward" for reward in read.rewards):
            parts.append(_THINK_FORMAT.rstrip())
        if parts:
            read.files[_REWARDS_FILE] = "\n\n".join(parts) + "\n"

    def _of_trl(self, node: ast.expr, defined: Mapping[str, ast.stmt]) -> TRLReward | None:
        """Return the reward that `node` is, if it is one of `trl.rewards`."""
        if isinstance(node, ast.Name) and len(self._assigned.get(node.id, ())) == 1:
            node = self._assigned[node.id][0]
        named = node.func if isinstance(node, ast.Call) else node
        statement = defined.get(named.id) if isinstance(named, ast.Name) else None
        if not isinstance(statement, ast.ImportFrom) or (statement.module or "").partition(".")[0] != "trl":
            return None
        assert isinstance(named, ast.Name)
        name = next(alias.name for alias in statement.names if named.id in (alias.asname, alias.name))
        if name == _OVERLONG and isinstance(node, ast.Call):
            return TRLReward(name, overlong=self._settings(node, tuple(_OVERLONG_OF_YAML)))
        if name not in _OF_TRL or isinstance(node, ast.Call):
            raise RecipeError(
                f"{self._origin.file}: reward_funcs has `{ast.unparse(node)}` of TRL, which has no counterpart here; "
                f"there are {', '.join((*_OF_TRL, _OVERLONG))}"
            )
        return TRLReward(name, _OF_TRL[name])

    def _of_script(self, node: ast.expr, defined: Mapping[str, ast.stmt], needed: dict[int, ast.stmt]) -> TRLReward:
        """Return the reward of a function of the script, whose code is added to `needed` by its line."""
        if not isinstance(node, ast.Name) or not isinstance(defined.get(node.id), _FUNCTIONS):
            raise RecipeError(
                f"{self._origin.file}: reward_funcs has `{ast.unparse(node)}`, which is no function of this file: "
                "define it there, at the top level"
            )
        code = _used(node.id, defined)
        for statement in code:
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == "trl":
                raise RecipeError(f"{self._origin.file}: the reward {node.id} uses {ast.unparse(statement)}, which "
                                  "there is not here: define it in the file")  # fmt: skip
            needed[statement.lineno] = statement
        return _reward(node.id, _REWARDS_FILE, [each for each in code if isinstance(each, _FUNCTIONS)])


def _short_name(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _bindings(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the statements at the top level that define a name."""
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return defined


def _used(name: str, defined: Mapping[str, ast.stmt]) -> list[ast.stmt]:
    """Return the statement that defines `name`, and those of the names that it uses."""
    found: list[ast.stmt] = []
    waiting = [name]
    while waiting:
        statement = defined.get(waiting.pop())
        if statement is not None and statement not in found:
            found.append(statement)
            waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return found


def _first_line(statement: ast.stmt) -> int:
    decorators = statement.decorator_list if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) else []
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
