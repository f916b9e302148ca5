"""The requests to a node in the docs work as they stand there, and every setting is documented."""

import dataclasses
import json
import re

import pytest

from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.traffic.cluster import LocalCluster
from tests.serving.inprocess import http
from tests.serving.small import chain, make_bundle
from tests.test_readme import ROOT, blocks

SERVING = (ROOT / "docs" / "serving.md").read_text()

pytestmark = pytest.mark.heavy


def test_the_requests_from_python_and_curl_work(tmp_path, capsys):
    bundle = make_bundle(tmp_path / "b", chain(), shape=(1, 8, 8), name="campus")
    with LocalCluster(bundle, logs=tmp_path) as cluster:
        place = cluster.places["device"]
        (program,) = [block for block in blocks("python", SERVING) if "127.0.0.1:8001" in block]
        exec(compile(program.replace("127.0.0.1:8001", place.grpc), "serving.md", "exec"), {})
        assert "b'" in capsys.readouterr().out  # the node that answered
        (url, body) = re.search(r"curl -s http://127.0.0.1:8002(\S+) -d '(.*?)'", SERVING, re.DOTALL).groups()
        status, _, text = http(place.http, "POST", url, body.encode())
        assert status == 200
        assert {output["name"] for output in json.loads(text)["outputs"]} == {"scores", "exit", "node", "confidence"}


def test_every_metric_of_a_node_is_documented(tmp_path):
    page = (ROOT / "docs" / "metrics.md").read_text()
    bundle = make_bundle(tmp_path / "b", chain(), shape=(1, 8, 8), name="campus")
    with LocalCluster(bundle, logs=tmp_path) as cluster:
        _, _, text = http(cluster.places["device"].http, "GET", "/metrics")
    found = re.findall(
        r"^# HELP (exitflow_\S+) (.*)$", text.decode() if isinstance(text, bytes) else text, re.MULTILINE
    )
    assert len(found) > 30
    for name, meaning in found:
        assert re.search(rf"^\| `{name}` \| .*\| {re.escape(meaning)} \|$", page, re.MULTILINE), name


def test_every_setting_of_a_node_is_documented():
    for field in dataclasses.fields(ServingSpec):
        assert f"`{field.name}`" in SERVING, field.name


def test_every_module_of_serving_stands_in_its_readme_below_its_room():
    serving = ROOT / "src" / "exitflow" / "serving"
    named, room = set(), ""
    for first, modules in re.findall(r"^\|([^|]*)\|([^|]*)\|", (serving / "README.md").read_text(), re.MULTILINE):
        room = first.strip(" `") or room
        named |= {f"{room}/{module}.py" for module in re.findall(r"`(\w+)`", modules)}
    assert named == {str(path.relative_to(serving)) for path in serving.glob("*/*.py") if path.stem != "__init__"}
