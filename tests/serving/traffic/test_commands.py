"""The commands as their users see them."""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import pytest
from packaging.requirements import Requirement

from exitflow.errors import ConfigError, ServingError
from exitflow.free_ports import free_ports
from exitflow.serving.node.status import NodeStatus
from exitflow.serving.traffic.cluster import FIRST_PAUSE, LocalCluster, _announcement, running_tree
from exitflow.serving.traffic.load_report import _is_over
from exitflow.serving.traffic.observe import _rates
from tests.command import call
from tests.serving.small import chain, make_bundle
from tests.small import TINY

pytestmark = pytest.mark.heavy


def start_up(bundle):
    process = subprocess.Popen(
        [sys.executable, "-m", "exitflow", "up", str(bundle.path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    text = ""
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        assert line, "up ended"
        text += line
    return process, json.loads(text)["nodes"]


def nodes_running(bundle):
    """Processes that serve this bundle."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().split(b"\0")
        except OSError:
            continue
        if b"serve" in command and str(bundle.path).encode() in command:
            found.append(int(pid))
    return found


def wait_until_gone(bundle):
    for _ in range(300):
        if not nodes_running(bundle):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {nodes_running(bundle)}")


def test_up_starts_all_load_finds_them_and_ctrl_c_leaves_nothing_behind(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    process, places = start_up(bundle)
    try:
        assert set(places) == {"device", "edge", "cloud"}
        assert len(nodes_running(bundle)) == 3
        assert running_tree(bundle.path)["edge"].grpc == places["edge"]["grpc"]
        found = json.loads(call("load", bundle.path, "--duration", 2, "--json").stdout)
        assert found["answered"] == found["sent"] > 100
        assert len(nodes_running(bundle)) == 3  # it used those that were there
        out = tmp_path / "observed.toml"
        observed = json.loads(
            call("observe", *(place["grpc"] for place in places.values()), "--out", out, "--json").stdout
        )
        assert observed["nodes"]["device"]["arrived"] > 0
        plan = json.loads(call("plan", out, "--json").stdout)
        assert plan["nodes"]["device"]["arrival_rate"] == pytest.approx(
            observed["nodes"]["device"]["arrived"], rel=0.01
        )
        assert plan["nodes"]["edge"]["parents"] != {}
        quick = (*(f"--set={each}" for each in TINY), "--set=training.rounds=1")
        call("train", out, "--out", tmp_path / "run", "--backend", "serial", *quick)  # gRPC's threads bear no fork
        assert (tmp_path / "run" / "model.safetensors").exists()
        table = call("reload", places["cloud"]["grpc"]).stdout
        assert bundle.version in table
        call("observe", places["device"]["grpc"], "--out", out, code=2)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        process.stdout.close()
    assert process.returncode == 0
    wait_until_gone(bundle)
    assert running_tree(bundle.path) is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"pid": 1, "places": []}', '{"pid": "x"}'])
def test_an_announcement_that_is_none_is_no_tree(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = _announcement(tmp_path / "b")
    path.parent.mkdir(mode=0o700)
    path.write_text(text)
    assert running_tree(tmp_path / "b") is None


def test_an_announcement_that_others_could_have_written_is_not_believed(tmp_path, monkeypatch):
    """It says where the token goes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    bundle = make_bundle(tmp_path / "b", chain())
    path = _announcement(bundle.path)
    path.parent.mkdir()
    place = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2"}
    path.write_text(json.dumps({"pid": os.getpid(), "places": {"device": place}}))
    path.parent.chmod(0o700)
    assert running_tree(bundle.path) is not None
    path.parent.chmod(0o770)
    assert running_tree(bundle.path) is None
    with pytest.raises(ServingError, match="may be written by others; set \\$XDG_RUNTIME_DIR"):
        LocalCluster(bundle).announced().__enter__()


def test_nodes_end_when_whoever_started_them_is_killed(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    process, _ = start_up(bundle)
    process.kill()
    process.wait(20)
    process.stdout.close()
    wait_until_gone(bundle)
    assert running_tree(bundle.path) is None


def test_load_starts_a_tree_where_none_runs_and_reports_beside_the_plan(tmp_path):
    bundle = make_bundle(tmp_path / "b")
    found = json.loads(call("load", bundle.path, "--duration", 3, "--rate", 200, "--json").stdout)
    assert found["answered"] == found["sent"]
    assert found["sent"] == pytest.approx(600, rel=0.2)
    assert set(found["nodes"]) == {node.name for node in bundle.topology.nodes}
    assert sum(node["served"] for node in found["nodes"].values()) == pytest.approx(
        found["requests_per_second"], rel=0.01
    )
    for name, link in found["links"].items():
        seconds = found["seconds"]
        assert link["forwarded"] * seconds <= link["limit"] * (seconds + 1) + 1e-6, name
        assert link["bytes_sent"] > 0
    assert found["failures"] == {}
    assert found["nodes"]["device-0"]["planned_received"] == pytest.approx(50)
    assert 0 <= found["accuracy"] <= 1
    wait_until_gone(bundle)


def test_a_node_that_dies_under_load_costs_depth_and_not_the_report(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    with LocalCluster(bundle, logs=tmp_path) as tree:
        killer = threading.Timer(1.5, lambda: tree.stop(["cloud"], how=signal.SIGKILL))
        killer.start()
        found = json.loads(
            call("load", *(place.grpc for place in tree.places.values()), "--duration", 3, "--json").stdout
        )
        killer.join()
    assert found["answered"] == found["sent"] > 0
    assert set(found["nodes"]) == {"device", "edge"}
    assert found["verdicts"][-1] == {"text": "nodes that were not there all the time: cloud", "as_planned": False}


@pytest.mark.parametrize("drift", ["difficulty", "traffic", "burst"])
def test_under_every_drift_links_keep_their_limits(tree_with_limits, drift):
    places = [place.grpc for place in tree_with_limits.places.values()]
    found = json.loads(call("load", *places, "--duration", 3, "--drift", drift, "--json").stdout)
    assert found["failures"] == {}
    for name, link in found["links"].items():
        assert link["forwarded"] * found["seconds"] <= link["limit"] * (found["seconds"] + 1) + 1e-6, name


@pytest.fixture(scope="module")
def tree_with_limits(bundle, tmp_path_factory):
    with LocalCluster(bundle, logs=tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


def test_a_table_says_whether_it_came_out_as_planned(tree_with_limits):
    places = [place.grpc for place in tree_with_limits.places.values()]
    text = call("load", *places, "--duration", 1, "--concurrency", 4).stdout
    for words in ("received", "bytes up", "p99", "accuracy as served", "as planned"):
        assert words in text
    share, low, high, count = re.search(
        r"([\d.]+) % accuracy as served \(([\d.]+) to ([\d.]+) % with 95 % confidence, n = ([\d,]+)\)", text
    ).groups()
    assert 0 <= float(low) <= float(share) <= float(high) <= 100
    assert f"{count} of {count} requests were answered" in text
    assert f"(n = {count}), planned" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["load", "127.0.0.1:1", "--duration", "1"], "127.0.0.1:1: UNAVAILABLE"),
        (["load", "10.9.9.9:80"], "10.9.9.9:80 is not of this machine: give --remote"),
        (["load", "nonsense"], "there is no such bundle, and it is no HOST:PORT, got 'nonsense'"),
        (["load", "127.0.0.1:x"], "expected HOST:PORT, such as 127.0.0.1:8001, got '127.0.0.1:x'"),
        (["load", "127.0.0.1:1", "--set", "codec=u8"], "--set: these nodes run already, and keep the settings"),
        (["load", "127.0.0.1:1", "--rate", "5", "--concurrency", "2"], "give --rate or --concurrency, not both"),
        (
            ["load", "127.0.0.1:1", "--drift", "burst", "--concurrency", "2"],
            "--drift: 'burst' changes when requests arrive",
        ),
        (["load", "127.0.0.1:1", "--duration", "0"], "--duration: must be above 0 seconds"),
        (["load", "127.0.0.1:1", "--rate", "-1"], "--rate: must be above 0 requests/s, got -1"),
        (["up", "/nowhere"], "/nowhere: is not a bundle; make one with: exitflow export"),
        (["export", "/nowhere", "--out", "/nowhere/b"], "/nowhere"),
        (["reload", "127.0.0.1:1"], "127.0.0.1:1: UNAVAILABLE"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments, sentence):
    result = call(*arguments, code=2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--node", "edge0"], "--node: there is no node 'edge0'; did you mean 'edge-0'?"),
        (["--node", "edge-0", "--parent", "cloud-0"], "--parent: expected NODE=HOST:PORT"),
        (["--node", "edge-0", "--parent", "cloud=127.0.0.1:1"], "'cloud' is no parent of node 'edge-0'; did you mean"),
        (
            ["--node", "edge-0", "--parent", "cloud-0=127.0.0.1:1", "--parent", "cloud-0=127.0.0.1:2"],
            "--parent: 'cloud-0' is given twice, at 127.0.0.1:1 and 127.0.0.1:2",
        ),
        (["--node", "edge-0", "--listen", "8001"], "--listen: expected HOST:PORT"),
        (["--node", "edge-0", "--set", "codec"], "--set: expected key=value, such as codec=u8, got 'codec'"),
        (["--node", "edge-0", "--set", "codec=u16"], "codec: must be one of 'fp32', 'fp16', 'u8', 'u4', got 'u16'"),
        (["--node", "edge-0", "--set", "codex=u8"], "codex: unknown key; did you mean 'codec'?"),
        (
            ["--node", "edge-0", "--set", "links.cloud-0.codex=u8"],
            "links.cloud-0.codex: unknown key; did you mean 'codec'?",
        ),
        (
            ["--node", "edge-0", "--set", "links.cloud-0.link_megabits=0"],
            "links.cloud-0.link_megabits: must be above 0, got 0",
        ),
        (
            ["--node", "edge-0", "--set", "links.clod-0.codec=u8"],
            "links.clod-0: there is no node 'clod-0'; did you mean 'cloud-0'?",
        ),
        (["--node", "edge-0", "--set", "queue_size=0"], "queue_size: must be at least 1, got 0"),
        (["--node", "edge-0", "--set", "audit_share=2"], "audit_share: must be between 0 and 1, got 2"),
    ],
)
def test_serve_refuses_what_makes_no_sense(bundle, options, sentence):
    listen = [] if "--listen" in options else ["--listen", "127.0.0.1:0"]
    assert sentence in call("serve", bundle.path, *options, *listen, code=2).stderr


def test_a_port_that_is_taken_is_one_sentence(bundle, tree):
    for option in ("--listen", "--http", "--clients"):
        taken = tree.places["edge-0"].grpc
        ports = [option, taken, *([] if option == "--listen" else ["--listen", "127.0.0.1:0"])]
        result = subprocess.run(
            [sys.executable, "-m", "exitflow", "serve", str(bundle.path), "--node", "edge-0", *ports],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 2
        assert result.stderr.splitlines()[-1] == f"exitflow: {option}: cannot listen on {taken}: Address already in use"
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("codec=nonsense", "codec: must be one of 'fp32', 'fp16', 'u8', 'u4', got 'nonsense'"),
        ("links.zz.codec=u8", "links.zz: there is no node 'zz'"),
    ],
)
@pytest.mark.parametrize("command", ["up", "load"])
def test_settings_are_checked_before_any_node_starts(bundle, command, setting, sentence):
    result = call(command, bundle.path, "--set", setting, code=2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_node_that_does_not_start_says_why(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    tree = LocalCluster(bundle, logs=tmp_path, options=["--certs", "/nowhere"])
    with pytest.raises(ServingError, match=r"ended with exit code 2 before it was ready: exitflow: --certs: /nowhere"):
        tree.start()


def test_a_tree_whose_bundle_was_replaced_is_loaded_and_the_report_says_so(tmp_path):
    old = make_bundle(tmp_path / "b", chain())
    new = make_bundle(tmp_path / "new", chain(), seed=1)
    with LocalCluster(old, logs=tmp_path) as tree, tree.announced():
        shutil.rmtree(tmp_path / "b")
        shutil.copytree(tmp_path / "new", tmp_path / "b")
        result = call("reload", tree.places["cloud"].grpc, "127.0.0.1:1", code=2)
        assert "127.0.0.1:1: UNAVAILABLE" in result.stderr
        assert "; loaded before that: cloud (" in result.stderr
        found = json.loads(call("load", tmp_path / "b", "--duration", 1, "--json").stdout)
        assert found["answered"] == found["sent"] > 0
        (remark,) = (verdict["text"] for verdict in found["verdicts"] if "exitflow reload" in verdict["text"])
        assert f"device, edge serve bundle {old.version}, and are compared with what " in remark
        assert f" is by now, {new.version}; let them load that with: exitflow reload 127.0.0.1:" in remark
        result = call("load", tmp_path / "b", "--set", "codec=u8", code=2)
        assert "--set: these nodes run already" in result.stderr


def test_a_tree_with_a_dead_node_is_loaded_and_the_report_names_it(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    with LocalCluster(bundle, logs=tmp_path) as tree, tree.announced():
        tree.stop(["cloud"], how=signal.SIGKILL)
        found = json.loads(call("load", bundle.path, "--duration", 1, "--json").stdout)
        assert found["answered"] == found["sent"] > 0
        assert set(found["nodes"]) == {"device", "edge"}
        assert found["verdicts"][-1] == {"text": "nodes that were not there all the time: cloud", "as_planned": False}
        tree.stop(["edge", "device"], how=signal.SIGKILL)
        assert "none of the nodes of" in call("load", bundle.path, code=2).stderr


def test_a_node_that_ends_is_started_again_on_its_ports_ever_more_rarely(tmp_path, caplog):
    bundle = make_bundle(tmp_path / "b", chain())
    with LocalCluster(bundle, logs=tmp_path, base_port=free_ports(1)[0]) as tree:
        edge, now = tree.places["edge"], 0.0
        for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE):
            process = tree.processes["edge"]
            process.kill()
            process.wait()
            tree.keep_running(now)
            assert f"node edge was ended by SIGKILL; it is started again in {pause:g} s" in caplog.text
            tree.keep_running(now + pause / 2)
            assert "edge" not in tree.processes
            tree.keep_running(now + pause)
            assert json.loads(tree.processes["edge"].stdout.readline())["grpc"] == edge.grpc
            now += 100.0


def test_ports_are_counted_from_where_one_says(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    places = LocalCluster(bundle, base_port=8000).places
    assert [(place.grpc, place.http) for place in places.values()] == [
        ("127.0.0.1:8000", "127.0.0.1:8001"),
        ("127.0.0.1:8002", "127.0.0.1:8003"),
        ("127.0.0.1:8004", "127.0.0.1:8005"),
    ]
    for port in (0, 80, 65531, 99999):
        with pytest.raises(ConfigError, match=f"--base-port: must be between 1024 and 65530, .* got {port}"):
            LocalCluster(bundle, base_port=port)


def test_every_command_shows_an_example():
    for name in ("export", "serve", "up", "load", "observe", "reload", "certs"):
        assert "Example:" in call(name, "--help").stdout


def test_a_node_loads_no_torch(bundle):
    program = (
        "import sys; from exitflow.serving.ports import server; from exitflow.serving.traffic import cluster, load_session, observe; "
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules, 'loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_node_needs_22_packages():
    wanted, found = [Requirement("exitflow[serve]")], set()
    while wanted:
        requirement = wanted.pop()
        found.add(requirement.name.lower().replace("_", "-"))
        for text in importlib.metadata.requires(requirement.name) or ():
            needed = Requirement(text)
            if any(
                needed.marker is None or needed.marker.evaluate({"extra": extra})
                for extra in requirement.extras or [""]
            ):
                wanted.append(needed)
    assert len(found - {"exitflow"}) <= 22, found


def status_of(node, **said):
    """What a node says, with nothing in it but this."""
    empty = {"int": 0, "float": 0.0, "str": "", "bool": True, "tuple[str, ...]": (), "float | None": None}
    return NodeStatus(**{each.name: empty.get(each.type, {}) for each in fields(NodeStatus)} | {"node": node, **said})


def test_a_node_that_was_started_anew_while_it_was_watched_is_told():
    before = status_of("device", time=100.0, started=1.0, arrived=500, served=400)
    after = replace(before, time=110.0, started=105.0, arrived=20, served=20)
    with pytest.raises(ServingError, match="node 'device' was started anew while it was watched"):
        _rates(before, after)
    assert _rates(before, replace(after, started=1.0, arrived=600))["arrived"] == 10.0


@pytest.mark.parametrize(
    ("forwarded", "limit", "burst", "over"),
    [
        (6, 0.5, 1.0, False),  # a slow link may carry one at once: 0.5 * 10 s + 1
        (8, 0.5, 1.0, True),
        (150, 10.0, 50.0, False),  # five seconds' worth may go at once
        (152, 10.0, 50.0, True),
        (110, 10.0, None, False),  # no limit is kept, and one second's worth is let pass
        (112, 10.0, None, True),
        (10**6, None, None, False),
    ],
)
def test_a_link_is_over_its_limit_only_beyond_its_burst(forwarded, limit, burst, over):
    assert _is_over(forwarded, limit, burst, seconds=10.0) == over
