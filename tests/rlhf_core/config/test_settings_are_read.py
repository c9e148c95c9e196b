"""Every setting of a recipe is read by the code that runs; one that nothing reads has no effect.

mypy resolves the attribute accesses, so that `config.name` counts for the class of `config` alone, not for every class
with a field of that name. Reads in rlhf_core/config itself do not count: a validator alone makes nothing happen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Instance, Type, TypeVarType, flatten_nested_unions, get_proper_type

from rlhf_core.config.base import Config, KeyedConfig, reads_of
from rlhf_core.config.typed import config_classes
from rlhf_core.recipe.recipe import Recipe

pytestmark = pytest.mark.endurance("mutations")

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ("rlhf_core", "tasks", "flows", "deployments")

# Settings that are used without an access that mypy sees, and how; each counts for what inherits from its class too.
USED_OTHERWISE = {
    "SeededConfig.seed": "seed_of returns it",
    "SupervisedConfig.max_steps": "count_steps is at most this",
    "PricesConfig.judges": "PricesConfig.judge returns one of them",
    "ArtifactConfig.on_overlap": "compares_overlap is read",
    **dict.fromkeys(
        ("RewardedConfig.engine", "RewardedConfig.placement"), "RewardedConfig.readers returns them"
    ),
    "DistillationConfig.teacher": "its properties `teacher_engine` and `stored_inputs` are read",
    "TeacherConfig.engine": "DistillationConfig.teacher_engine returns it",
    "ModelGateConfig.approval": "read_gate reads it from the manifest of the gate",
    "ProcessRewardModelConfig.form": "in_token_form is read",
    **dict.fromkeys(
        (f"BenchmarkConfig.{name}" for name in (
            "num_fewshot", "limit", "apply_chat_template", "max_tokens", "long_prompts", "requests_per_call",
        )),
        "the harness's process gets them as a mapping",
    ),
    "PPOConfig.critic": "AlgorithmConfig.critic_settings returns it",
    **dict.fromkeys(
        ("ReferenceConfig.engine", "PairReferenceConfig.engine"), "ReferencedConfig.reference_engine returns them"
    ),
    "ByRow.column": "of_row and name_of read it",
    "ModelPlacement.group": "rl.groups.workers_of reads it",
    "QuantiseConfig.quantisation": "it has one value, which write_rounded computes",
    "AsynchronousConfig.in_flight": "RLConfig.in_flight returns it",
    **dict.fromkeys(
        ("SelectConfig.pass_rate", "SelectConfig.curriculum", "CurriculumConfig.start", "CurriculumConfig.steps"),
        "SelectConfig.bounds returns them",
    ),
    "RolloutEngineConfig.serve_adapter": "merges_adapters is read",
    "EngineConfig.tokens_per_micro_batch": "micro_batch_tokens returns it",
    "ValidationConfig.also": "its `sets` are read",
    **dict.fromkeys(
        (f"{config}.variables" for config in ("AgentEnvironment", "ExecutorEnvironment", "FunctionTool")),
        "named_variables returns them",
    ),
    **dict.fromkeys(("Placement.threads", "RolloutEngineConfig.threads"), "num_threads is read"),
    **dict.fromkeys(
        (f"{kind}Validation.also" for kind in (
            "Text", "Conversations", "Pairs", "Unpaired", "Completions", "Stepwise",
        )),
        "SupervisedValidationConfig.names returns their names, which are those of inputs",
    ),
    **dict.fromkeys(
        (f"{config}.engine" for config in (
            "RewardModelReward", "ProcessRewardModelReward", "KLConfig", "LossKLConfig", "SquaredKLConfig",
            "CriticConfig", "PolicyTeacherConfig",
        )),
        "RLConfig.engine_of returns them",
    ),
    **dict.fromkeys(
        (f"{config}.placement" for config in (
            "RewardModelReward", "ProcessRewardModelReward", "KLConfig", "LossKLConfig", "SquaredKLConfig",
            "CriticConfig", "PolicyTeacherConfig",
        )),
        "RLConfig.own_placements returns them",
    ),
}  # fmt: skip


class Reads(Plugin):
    """Notes each attribute that is read of a class: (the class's full name, attribute)."""

    def __init__(self, options: Options, definitions: tuple[str, ...]) -> None:
        """definitions: the modules or packages of the classes that count; what the first reads itself does not."""
        super().__init__(options)
        self.found: set[tuple[str, str]] = set()
        self._definitions = definitions

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        if not fullname.startswith(tuple(f"{module}." for module in self._definitions)):
            return None
        attribute = fullname.rpartition(".")[2]

        def note(context: AttributeContext) -> Type:
            path = Path(context.api.path).with_suffix("").as_posix()
            if f"/{self._definitions[0].replace('.', '/')}/" not in f"{path}/":
                self.found |= {(name, attribute) for name in _classes(context.type)}
            return context.default_attr_type

        return note


def _classes(value: Type) -> Iterable[str]:
    for item in flatten_nested_unions([value], handle_type_alias_type=True):
        proper = get_proper_type(item)
        if isinstance(proper, TypeVarType):
            yield from _classes(proper.upper_bound)
        elif isinstance(proper, Instance):
            yield proper.type.fullname


def reads(files: Iterable[tuple[Path, str]], *definitions: str) -> set[tuple[str, str]]:
    """(class, attribute) of all that the files, each with its module name, read of classes in `definitions`."""
    options = Options()
    options.incremental = False
    options.follow_imports = "skip"
    options.ignore_missing_imports = True
    plugin = Reads(options, definitions)
    build([BuildSource(str(path), module) for path, module in files], options, extra_plugins=[plugin])
    return plugin.found


def unread(configs: Iterable[type[Config]], found: Collection[tuple[str, str]]) -> list[str]:
    """`Class.field` of each field that nothing reads, of that class or of a base of it."""
    lacking = []
    for config in configs:
        names = [f"{base.__module__}.{base.__qualname__}" for base in config.__mro__]
        for field, info in config.model_fields.items():
            chooses_the_class = field == "type" and len(get_args(info.annotation)) == 1
            names_an_input = reads_of(config, field) is not None  # the graph reads these, by their annotation
            if not chooses_the_class and not names_an_input and not any((name, field) in found for name in names):
                lacking.append(f"{config.__name__}.{field}")
    return lacking


def reachable(config: type[Config]) -> list[type[Config]]:
    """`config` and every config class that it can hold, at any depth."""
    found = [config]
    for known in found:
        for annotation in [field.annotation for field in known.model_fields.values()] + _blocks(known):
            found += [below for below in _held(annotation) if below not in found]
    return found


def _blocks(config: type[Config]) -> list[Any]:
    if not issubclass(config, KeyedConfig):
        return []
    return [config.block_class(name, None) for name in config.block_names()]


def _held(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return list(config_classes(annotation))
    return [below for argument in get_args(annotation) for below in _held(argument)]


@cache
def reads_of_the_product() -> frozenset[tuple[str, str]]:
    files = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    modules = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files]
    named = zip(files, (module.removesuffix(".__init__") for module in modules), strict=True)
    return frozenset(reads(named, "rlhf_core.config", "rlhf_core.recipe.recipe"))


def used_otherwise() -> set[str]:
    """USED_OTHERWISE, by each class of a recipe that has the setting."""
    return {
        f"{config.__name__}.{field}"
        for config in reachable(Recipe)
        for owner, _, field in (name.partition(".") for name in USED_OTHERWISE)
        if owner in [base.__name__ for base in config.__mro__]
    }


@pytest.mark.parts
@pytest.mark.slow("reads all code for each setting")
def test_every_setting_is_read() -> None:
    lacking = [name for name in unread(reachable(Recipe), reads_of_the_product()) if name not in used_otherwise()]
    assert lacking == [], "remove these settings, or make the code read them"


def test_the_exceptions_are_needed() -> None:
    assert used_otherwise() - set(unread(reachable(Recipe), reads_of_the_product())) == set()


TOY = """
class Inner:
    size: int = 1
    name: str = ""
    limit: int = 1

class Other(Inner):
    width: int = 1

class Toy:
    size: int = 1
    inner: Inner = Inner()
    matched: int = 1
    many: dict[str, Inner | Other] = {}
"""
READER = """
from toy_settings import Inner, Other, Toy

def use(toy: Toy, anything) -> int:
    anything.limit
    match toy:
        case Toy(matched=found):
            pass
    return toy.inner.size + max(one.name for one in toy.many.values())
"""


def test_a_setting_that_nothing_reads_is_found(tmp_path: Path) -> None:
    """Also where another class has a field of that name which is read."""
    for name, text in (("toy_settings", TOY), ("reader", READER)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    found = reads([(tmp_path / f"{name}.py", name) for name in ("toy_settings", "reader")], "toy_settings")
    assert found == {
        ("toy_settings.Toy", "inner"),
        ("toy_settings.Toy", "many"),
        ("toy_settings.Toy", "matched"),
        ("toy_settings.Inner", "size"),
        ("toy_settings.Inner", "name"),
        ("toy_settings.Other", "name"),
    }


@pytest.mark.parametrize(
    ("read", "lacking"),
    [
        ({("Toy", "size"), ("Inner", "size")}, ["Toy.inner", "Inner.name"]),
        ({("Toy", "size"), ("Toy", "inner"), ("Toy", "name")}, ["Inner.size", "Inner.name"]),
        ({("Toy", "size"), ("Toy", "inner"), ("Base", "size"), ("Inner", "name")}, []),
    ],
)
def test_a_read_counts_for_its_class_and_what_inherits_from_it(read: set[tuple[str, str]], lacking: list[str]) -> None:
    class Base(Config):
        size: int = 1

    class Inner(Base):
        name: str = ""

    class Toy(Config):
        size: int = 1
        inner: tuple[Inner, ...] = ()

    Toy.model_rebuild(_types_namespace={"Inner": Inner})
    assert reachable(Toy) == [Toy, Inner]
    full = {"Toy": Toy, "Inner": Inner, "Base": Base}
    named = {(f"{full[name].__module__}.{full[name].__qualname__}", field) for name, field in read}
    assert unread(reachable(Toy), named) == lacking
