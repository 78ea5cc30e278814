"""The container files, as far as they can be checked without an engine: what they name exists and fits together."""

import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import yaml

from bitgraft.cli import serve

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


def steps() -> list[tuple[str, str]]:
    """Instructions with what they are given, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def given(word: str) -> list[str]:
    return [rest.strip() for name, rest in steps() if name == word]


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def known() -> set[str]:
    source = inspect.getsource(serve)
    return set(re.findall(r'"(--[a-z-]+)"', source)) | {
        "--" + name.replace("_", "-") for name in inspect.signature(serve.serve).parameters
    }


def test_what_is_copied_exists_and_stages_are_named():
    stages = {rest.split(" AS ")[1] for rest in given("FROM") if " AS " in rest}
    for copied in given("COPY"):
        words = shlex.split(copied)
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        else:
            assert all((ROOT / name).exists() for name in words[:-1])


def test_what_is_installed_is_an_extra_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r'"\.\[(\w+)\]"', " ".join(given("RUN")))
    assert installed in extras


def test_the_command_line_is_one_that_serve_takes():
    entry, command = json.loads(given("ENTRYPOINT")[0]), json.loads(given("CMD")[0])
    assert entry[:2] == ["bitgraft", "serve"]
    used = options(entry) | options(command) | options(COMPOSE["services"]["replica"]["command"])
    assert used <= known()
    assert {"--store", "--memory-budget", "--grace"} <= used


def test_ports_and_patience_agree():
    port = str(inspect.signature(serve.serve).parameters["port"].default)
    (health,) = given("HEALTHCHECK")
    assert given("EXPOSE") == [port]
    assert f"127.0.0.1:{port}/healthz" in health
    assert f":{port};" in COMPOSE["configs"]["balancer"]["content"]
    replica = COMPOSE["services"]["replica"]
    grace = int(replica["command"][replica["command"].index("--grace") + 1])
    assert grace < int(replica["stop_grace_period"].removesuffix("s"))
    assert COMPOSE["services"]["balancer"]["depends_on"]["replica"]["condition"] == "service_healthy"


def test_a_replica_can_write_nothing_but_its_scratch_space():
    replica = COMPOSE["services"]["replica"]
    assert replica["read_only"] is True
    assert replica["volumes"][0].endswith(":/store:ro")
    assert given("WORKDIR")[-1] in replica["tmpfs"]
    assert given("USER") == ["bitgraft"]
