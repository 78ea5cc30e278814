"""The container's command lines and health check, run without a container."""

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml
from services import new_store, offline, picture, served

ROOT = Path(__file__).parents[2]


def last(instruction: str) -> list[str]:
    """Return the arguments of the last such instruction in the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return json.loads(re.findall(rf"^{instruction} .*?(\[.*\])$", text, re.MULTILINE)[-1])


def test_the_image_serves_and_reports_its_health(tmp_path):
    _, net = new_store(tmp_path)
    program, command, *entry = last("ENTRYPOINT")
    replica = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["replica"]["command"]
    assert (program, command) == ("bitgraft", "serve")
    for options in (last("CMD"), replica):
        with served(tmp_path, *(word.replace("/store", "store") for word in (*entry, *options))) as service:
            _, *health = (word.replace(":8000/", f":{service.port}/") for word in last("HEALTHCHECK"))
            check = [sys.executable, *health]
            assert service.answers("birds", picture()) == offline(net, "birds", picture())
            assert subprocess.run(check, check=False).returncode == 0
            assert service.end() == 0
            assert subprocess.run(check, check=False, capture_output=True).returncode == 1
