"""The command as its users see it: exit codes, one sentence for an error, JSON that parses."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from exitflow.cli.main import main
from exitflow.cli.options import called_as
from exitflow.cli.program import EXTRAS, Command
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.system.system import load_system
from tests.command import call
from tests.small import TINY

LONG = "n" * 100_000
TINY_OPTIONS = [part for override in TINY for part in ("--set", override)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    call("train", "paper-7:80-15-5", "--out", path, "--backend", "serial", *TINY_OPTIONS)
    return path


def test_plan_prints_the_rates_as_json():
    found = json.loads(call("plan", "paper-7:80-15-5", "--json").stdout)
    assert set(found) == {"name", "nodes", "exits"}
    assert found["nodes"]["edge-0"] == {
        "exit": 2,
        "arrival_rate": 0.0,
        "received_rate": 10.0,
        "serve_rate": 7.5,
        "transfer_rate": 2.5,
        "serve_fraction": 0.75,
        "parents": {"cloud-0": 2.5},
    }
    assert [exit["exit"] for exit in found["exits"]] == [1, 2, 3]
    assert [exit["share"] for exit in found["exits"]] == pytest.approx([0.8, 0.15, 0.05])
    assert [exit["serve_rate"] for exit in found["exits"]] == pytest.approx([80, 15, 5])


def test_plan_from_the_answers_of_a_run_is_never_worse_than_sending_all_up(run):
    found = json.loads(call("plan", "paper-7:5-15-80", "--run", run, "--json").stdout)
    assert found["measured"]["accuracy"] >= found["measured"]["p2"]["accuracy"]
    assert "are answered right" in call("plan", "paper-7:5-15-80", "--run", run).stdout


def test_plan_refuses_a_run_with_other_exits_and_a_price_without_a_run(run, tmp_path):
    path = tmp_path / "two.toml"
    tiers = '[[tiers]]\nname = "d"\ncount = 2\nexit = 1\narrival_rate = 1\n[[tiers]]\nname = "c"\ncount = 1\nexit = 2\n'
    path.write_text(tiers)
    refused = call("plan", path, "--run", run, code=2)
    assert "the system has 2 exits" in refused.stderr
    assert "add --run" in call("plan", "paper-7:5-15-80", "--price", "0.1", code=2).stderr


TIMED = """
[[tiers]]
name = "d"
count = 2
exit = 1
arrival_rate = 10.0
max_transfer_rate = 4.0
service_ms = 20.0
round_trip_ms = 30.0
price = 50.0
[[tiers]]
name = "c"
count = 1
exit = 2
service_ms = 10.0
"""


def test_plan_of_a_system_with_times_prints_latencies_the_bottleneck_and_the_cost(tmp_path):
    path = tmp_path / "timed.toml"
    path.write_text(TIMED)
    output = call("plan", path).stdout
    assert "The bottleneck is node d-0, busy 20.0 % of the time." in output
    assert "A million requests cost 20.00." in output  # 8 of 20 go up, at 50 a million
    assert max(map(len, output.splitlines())) <= 80
    found = json.loads(call("plan", path, "--json").stdout)["time"]
    assert found["exit_latency_ms"][1]["p50"] == pytest.approx(20 + 30 + 10, abs=0.1)


def test_plan_refuses_a_queue_that_grows_without_end(tmp_path):
    path = tmp_path / "timed.toml"
    path.write_text(TIMED.replace("service_ms = 20.0", "service_ms = 120.0"))
    assert "node d-0 would have to work 120.0 % of the time" in call("plan", path, code=2).stderr


def test_plan_keeps_what_its_owner_asks_for_and_draws_it(tmp_path):
    path, page = tmp_path / "timed.toml", tmp_path / "plan.html"
    path.write_text(TIMED)
    output = call("plan", path, "--slo", "cost=10", "--html", page).stdout
    assert "cost=10 is kept: cost 10.0." in output
    assert "d-0 and 1 alike" in page.read_text()
    assert "d-0 x2" in output
    refused = call("plan", path, "--slo", "p50=1ms", code=2).stderr
    assert "no plan keeps p50=1ms: the nearest has p50 20" in refused


def test_whatif_prints_every_combination_and_writes_a_page(tmp_path):
    path, page = tmp_path / "timed.toml", tmp_path / "whatif.html"
    path.write_text(TIMED)
    vary = ("--vary", "tiers.d.max_transfer_rate=2,4", "--vary", "tiers.d.cores=1,2")
    output = call("whatif", path, *vary, "--html", page).stdout
    assert "2 *" in output  # the second core makes answers earlier, for nothing
    assert output.count("\n") < 20
    points = json.loads(call("whatif", path, *vary, "--json").stdout)["points"]
    assert [point["cost"] for point in points] == pytest.approx([10, 10, 20, 20])
    assert page.read_text().count("<svg class='tree'") == 4
    assert "there is none of that name" in call("whatif", path, "--vary", "tiers.x.count=1", code=2).stderr


def test_simulate_follows_requests_or_a_fluid_of_them(run, tmp_path):
    found = json.loads(call("simulate", run, "--duration", "20", "--fail", "edge-0@5s..10s", "--json").stdout)
    assert found["model"] == "exact"
    assert found["answered"] > 1000
    assert found["exit_share"] == pytest.approx([0.8, 0.15, 0.05], abs=0.06)
    assert "As time goes by" in call("simulate", run, "--duration", "5").stdout
    many = json.loads(call("simulate", run, "--devices", "400000", "--json").stdout)
    assert many["model"] == "fluid"
    assert many["requests"] == pytest.approx(600 * 100 * 100_000)
    assert "must be a multiple of the 4 devices" in call("simulate", run, "--devices", "3", code=2).stderr
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,requests\n0,1\n10,2\n5,1\n")
    refused = call("simulate", run, "--trace", trace, code=2).stderr
    assert f"{trace}: seconds: time goes back or stands still after [10.0]" in refused


def test_plan_prints_a_table():
    output = call("plan", "paper-7:80-15-5").stdout
    assert "device-0" in output
    assert "served %" in output


def test_plan_of_a_large_system_is_cut_and_says_so(tmp_path):
    path = tmp_path / "large.toml"
    tiers = (
        '[[tiers]]\nname = "d"\ncount = 500\nexit = 1\narrival_rate = 1\n[[tiers]]\nname = "c"\ncount = 1\nexit = 2\n'
    )
    path.write_text(tiers)
    assert "d-0 x500" in call("plan", path).stdout  # they are alike
    nodes = [
        f'[[nodes]]\nname = "d{n}"\nexit = 1\narrival_rate = {n}\nparents = [{{name = "c"}}]\n' for n in range(500)
    ]
    path.write_text("".join(nodes) + '[[nodes]]\nname = "c"\nexit = 2\n')
    output = call("plan", path).stdout
    assert "and 461 more: see --json" in output
    assert len(output.splitlines()) < 70


@pytest.mark.heavy
def test_planning_does_not_import_pytorch():
    program = "import sys; from exitflow.cli.main import main; main(['plan', 'paper-7'], standalone_mode=False); "
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy
def test_without_pytorch_training_says_what_to_install():
    program = (
        "import sys; sys.modules['torch'] = None; from exitflow.cli.main import main; "
        "main(['train', 'paper-7', '--out', 'nowhere'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "exitflow: this needs torch, which is not installed: pip install -e '.[train]'\n"


def test_train_says_where_the_run_is_and_what_came_out(run, tmp_path):
    result = call("train", "paper-7", "--out", tmp_path / "new", "--backend", "serial", "--rounds", 2, *TINY_OPTIONS)
    assert "trained for 2 rounds" in result.stdout or "trained for 3 rounds" in result.stdout
    assert f"exitflow evaluate {tmp_path / 'new'}" in result.stdout


@pytest.mark.parametrize("key", ["learning_rate", "optimiser.weight_decay"])
def test_a_training_whose_updates_are_all_dropped_fails(tmp_path, key):
    options = ["--out", tmp_path / "new", "--backend", "serial", "--set", f"training.{key}=1e30"]
    result = call("train", "paper-7", *TINY_OPTIONS, *options, code=1)
    assert "no update can be used (node 'cloud-0': its update held NaN or infinity" in result.stderr
    assert "trained for" not in result.stdout


def test_a_training_in_which_no_node_was_ever_asked_fails(tmp_path):
    options = ["--out", tmp_path / "new", "--backend", "serial", "--set", "training.participation=1e-6"]
    result = call("train", "paper-7", *TINY_OPTIONS, *options, code=1)
    assert "no node has trained in any of the 3 rounds: none was drawn" in result.stderr
    assert not (tmp_path / "new" / "model.safetensors").exists()
    again = call("train", "--resume", tmp_path / "new", "--backend", "serial", code=1)
    assert "no node has trained in any of the 3 rounds" in again.stderr


def test_options_of_train_go_before_set(tmp_path):
    options = ["--rounds", 1, "--seed", 5, "--weighting", "equal-weight", "--backend", "serial", "--json"]
    found = json.loads(call("train", "paper-7", "--out", tmp_path / "new", *TINY_OPTIONS, *options).stdout)
    assert found["rounds"] == 1
    assert 0 <= found["validation"]["accuracy"] <= 1
    spec = (tmp_path / "new" / "spec.toml").read_text()
    assert "seed = 5" in spec
    assert 'weighting = "equal-weight"' in spec


def test_resume_of_a_finished_run_is_no_error(run):
    assert "trained for 3 rounds" in call("train", "--resume", run, "--backend", "serial").stdout


def test_evaluate_prints_every_exit_node_and_the_whole(run):
    output = call("evaluate", run).stdout
    for name in ("exit 1", "exit 3", "device-0", "cloud-0", "whole system"):
        assert name in output


def test_evaluate_prints_the_whole_before_the_nodes_which_may_be_many(run):
    lines = [line.split("  ")[0].strip() for line in call("evaluate", run).stdout.splitlines()]
    assert lines.index("whole system") < lines.index("device-0")


def test_evaluate_prints_json_for_one_setting_or_several(run):
    planned = json.loads(call("evaluate", run, "--json").stdout)
    assert planned["serving"] is None
    assert planned["answers"] == "own"
    assert [exit["serve_rate"] for exit in planned["exits"]] == pytest.approx([80, 15, 5])
    assert set(planned["nodes"]["device-0"]) == {"serve_rate", "served_accuracy"}
    one = json.loads(call("evaluate", run, "--serving", "60-30-10", "--json").stdout)
    assert [exit["serve_rate"] for exit in one["exits"]] == pytest.approx([60, 30, 10])
    both = json.loads(call("evaluate", run, "--serving", "60-30-10", "--serving", "5-15-80", "--json").stdout)
    assert [each["serving"] for each in both] == ["60-30-10", "5-15-80"]
    assert both[0] == one


@pytest.mark.heavy
def test_weights_that_a_system_gives_are_called_so_wherever_they_were_trained_with(tmp_path):
    options = ["--set", "training.exit_weights=[1,1,8]", *TINY_OPTIONS, "--backend", "serial"]
    options = ["--out", tmp_path, *options]
    compared = call("compare", "paper-7", "--weightings", "equal-weight", "--seeds", "0", *options).stdout
    rows = [line.split()[0] for line in compared.splitlines() if "±" in line or "." in line]
    assert rows[-2:] == ["exit_weights", "equal-weight"], compared
    run = tmp_path / "exit_weights-seed-0"
    assert "(exit_weights), served as planned" in call("evaluate", run).stdout
    assert "trained for 3 rounds with exit_weights." in call("train", "--resume", run).stdout
    call("report", run, "--out", tmp_path / "page")
    assert "exit_weights" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.heavy
def test_compare_prints_a_row_for_each_weighting(tmp_path):
    options = ["--out", tmp_path, "--backend", "serial", "--weightings", "equal-weight,serving-rate", "--seeds", "1,2"]
    output = call("compare", "paper-7", *options, *TINY_OPTIONS).stdout
    assert "2 seeds" in output
    assert "±" in output
    found = json.loads(call("compare", "paper-7", *options, *TINY_OPTIONS, "--json").stdout)
    assert set(found["weightings"]) == {"equal-weight", "serving-rate"}
    assert found["seeds"] == [1, 2]
    assert len(found["weightings"]["equal-weight"]["exit_accuracy"]) == 3


@pytest.mark.heavy
def test_explain_sets_the_weightings_side_by_side():
    output = call("explain", "paper-7", "--backend", "serial", *TINY_OPTIONS).stdout
    body = output[: output.index("Least in total: ")].replace(" *", "  ")
    explained = [*WEIGHTINGS, "bound-min"]
    rows = [line for line in body.splitlines() if any(name in line.split() for name in explained)]
    assert [row.split()[0] for row in rows] == explained
    assert len({len(row) for row in rows}) == 1  # aligned
    assert all(len(row.split()) == 1 + 3 + 5 for row in rows)
    assert "serving-rate *" in output
    assert "* what this system trains with." in output
    found = json.loads(call("explain", "paper-7", "--backend", "serial", "--json", *TINY_OPTIONS).stdout)
    weights = found["weightings"]["serving-rate"]["weights"]
    assert weights == pytest.approx([0.8, 0.15, 0.05])
    assert set(found["weightings"]["bound-min"]["terms"]) == {
        "generalisation",
        "bias",
        "noise",
        "sampling",
        "total",
    }


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["plan", "nothing.toml"], "exitflow: nothing.toml: no such file\n"),
        (["plan", "paper-9"], "exitflow: paper-9: there is no such file, and no preset 'paper-9'; did you mean"),
        (["train", "paper-7"], "exitflow: train: give a SYSTEM and --out RUN, or --resume RUN\n"),
        (["train", "paper-7", "--resume", "x"], "exitflow: --resume: goes on with a run as it was begun"),
        (["train", "--resume", "x", "--seed", "0"], "exitflow: --resume: goes on with a run as it was begun"),
        (["train", "paper-7", "--accept", "edited-spec"], "exitflow: --accept: is for --resume\n"),
        (["train", "--resume", "nowhere"], "exitflow: nowhere: is not a run directory"),
        (["train", "paper-7", "--out", "x", "--seed", "-1"], "training.seed: must be 0 or more, got -1"),
        (["train", "paper-7", "--out", "x", "--weighting", "best"], "training.weighting: there is no weighting 'best'"),
        (["train", "paper-7-cifar10", "--out", "x"], "say where with --data-dir, data.dir or $EXITFLOW_DATA_DIR"),
        (
            ["train", "paper-7-cifar10", "--out", "x", "--data-dir", "true"],
            "looked for data_batch_1.bin in true/cifar-10",
        ),
        (
            ["train", "paper-7", "--out", "x", "--set", "rounds"],
            "exitflow: --set: expected key=value, such as training",
        ),
        (["explain", "nothing.toml"], "exitflow: nothing.toml: no such file\n"),
        (
            ["train", "paper-7-cifar10", "--out", "x", "--data-dir", "no\N{GRINNING FACE}"],
            "in no\N{GRINNING FACE}/cifar-10",
        ),
        (["train", "paper-7", "--out", "x", "--address", "y"], "exitflow: --address: is for --backend ray\n"),
        (["train", "paper-7", "--out", "x", "--superlink", "h:1"], "exitflow: --superlink: is for --backend flower\n"),
        (
            ["train", "paper-7", "--out", "x", "--backend", "flower", "--superlink", "h:1", "--federation", "no"],
            "exitflow: no: --federation: is not a folder that `exitflow federation init` has written for the server\n",
        ),
        (
            ["federation", "init", "paper-7", "--superlink", "server"],
            "exitflow: --superlink: expected HOST:PORT, such as 10.0.0.1:9092, got 'server'\n",
        ),
        (["federation", "server", "nowhere"], "exitflow: nowhere: --federation: is not a folder that"),
        (["federation", "node", "nowhere"], "exitflow: nowhere: is not a folder that `exitflow federation init` has"),
        (
            ["train", "paper-7", "--out", "x", "--set", "federation.on_missing=ignore"],
            "federation.on_missing: must be one of 'strict', 'skip', 'reweight', got 'ignore'",
        ),
        (["train", "paper-7", "--out", "x", "--set", "federation.deadline=0"], "federation.deadline: must be above 0"),
        (["evaluate", "nowhere"], "exitflow: nowhere: is not a run directory"),
        (["compare", "paper-7", "--weightings", "serving-rat"], "did you mean 'serving-rate'?"),
        (
            ["compare", "paper-7", "--seeds", "a"],
            "exitflow: --seeds: expected different numbers from 0 on, such as 9,42,67, got 'a'",
        ),
        (["compare", "paper-7", "--seeds", "9,9"], "exitflow: --seeds: expected different numbers"),
        (["compare", "paper-7", "--seeds", ""], "exitflow: --seeds: must not be empty\n"),
        (["compare", "paper-7", "--weightings", ""], "exitflow: --weightings: must not be empty\n"),
        (["evaluate", ""], "exitflow: RUN: must not be empty\n"),
        (["evaluate", "x", "--serving", ""], "exitflow: --serving: must not be empty\n"),
        (["evalute", "x"], "exitflow: there is no command 'evalute'; did you mean 'evaluate'?\n"),
        (["federation", "nod"], "exitflow: there is no command 'nod'; did you mean 'node'?\n"),
        (["evaluate", "x", "--confience", "y"], "there is no option '--confience'; did you mean '--confidence'?"),
        (["evaluate", "x", "--confidence", "y"], "exitflow: --confidence: there is no confidence 'y'; "),
        (["evaluate"], "exitflow: RUN: is missing; see "),
        (["plan", "paper-7", "--set", "training.lr=1"], "training.lr: unknown key; did you mean 'learning_rate'?"),
        (
            ["plan", "paper-7", "--set", "training.steps=1"],
            "training.steps: unknown key; did you mean 'local_steps'?",
        ),
        (
            ["plan", "paper-7", "--set", "learning_rate=1"],
            "learning_rate: unknown key; did you mean 'training.learning_rate'?",
        ),
        (["init", "README.md"], "exitflow: README.md: is already there; choose another name\n"),
        (["--verson"], "there is no option '--verson'; did you mean '--version'?"),
        (["train", "paper-7", "--out", "x", "--set", "training.local_steps=9223372036854775807"], "must be from 1 to"),
        (
            ["train", "paper-7", "--out", "x", "--set", "model.width=8192", "--set", "model.blocks=[1,1,1,500]"],
            "weights, 10,000,000,000 at most are allowed",
        ),
        (["plan", "paper-7", "--set", f"name={LONG}"], "name: expected a name of 1 to 200 printable characters"),
        (["train", "paper-7", "--out", "n" * 300], "n/spec.toml: File name too long"),
        (["evaluate", "n" * 300], "n/spec.toml: File name too long"),
        (["load", LONG], "nnn: File name too long"),
        (["train", "paper-7", "--workers", LONG], "nnn' is not a valid integer range"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(args, sentence):
    result = call(*args, code=2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1500
    assert result.stdout == ""


def test_a_bad_setting_is_refused(run):
    assert "such as 80-15-5" in call("evaluate", run, "--serving", "lots", code=2).stderr


def test_init_writes_a_file_that_plans_and_says_what_its_comments_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("init", "my campus.toml").stdout.endswith("Next: exitflow plan 'my campus.toml'\n")
    assert "my campus: requests/s" in call("plan", "my campus.toml").stdout
    text = (tmp_path / "my campus.toml").read_text()
    (tmp_path / "all.toml").write_text(re.sub(r"^# (\[?\w+\]?( = .*)?)(?= *(#.*)?$)", r"\1", text, flags=re.MULTILINE))
    loaded, everything = load_system("my campus.toml"), load_system("all.toml")
    assert everything.data.dirichlet_alpha == 0.5
    assert everything.federation.clip_norm == 1.0
    assert everything.training == loaded.training  # what stands in comments there is what holds when nothing is said


@pytest.mark.parametrize(
    ("called", "found", "hint"),
    [
        ("/opt/bin/exitflow", "/opt/bin/exitflow", "exitflow"),
        (".venv/bin/exitflow", None, ".venv/bin/exitflow"),
        ("/src/exitflow/__main__.py", "/opt/bin/exitflow", "python -m exitflow"),
    ],
)
def test_a_hint_can_be_typed_as_it_stands(monkeypatch, called, found, hint):
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr("shutil.which", lambda name: found)
    assert called_as() == hint


def test_make_install_brings_what_the_commands_need():
    installed = re.search(r"^\.venv/\.installed:.*\n\t.*'\.\[(.*)\]'", Path("Makefile").read_text(), re.MULTILINE)[1]
    assert {*EXTRAS.values(), "certs"} - set(installed.split(",")) == {"ray"}


@pytest.mark.heavy
def test_progress_keeps_quiet_where_nobody_watches(tmp_path):
    command = [sys.executable, "-m", "exitflow", "train", "paper-7", "--out", str(tmp_path / "run"), *TINY_OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.heavy
def test_a_plan_that_makes_no_sense_is_printed_with_a_warning_beside_it():
    command = [sys.executable, "-m", "exitflow", "plan", "paper-7:60-60-10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout)["exits"][0]["share"] == pytest.approx(6 / 13)
    warning = "serving setting '60-60-10' adds up to 130 %, so the exits serve 46.2-46.2-7.69 %"
    assert done.stderr == f"exitflow: warning: {warning}\n"


def test_a_name_is_printed_as_it_stands():
    assert "[/red] :smile:: requests/s" in call("plan", "paper-7", "--set", 'name="[/red] :smile:"').stdout


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (MemoryError(), 1, "exitflow: not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 36 bytes"), 1, "exitflow: not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), 1, "exitflow: not enough memory"),
        (OSError(28, "No space left on device", "runs/x"), 1, "exitflow: runs/x: No space left on device"),
        (KeyboardInterrupt(), 130, "exitflow: interrupted\n"),
    ],
)
def test_what_the_machine_refuses_gets_one_sentence(monkeypatch, error, code, sentence):
    def fail(*args):
        raise error

    monkeypatch.setattr("exitflow.system.system.load_system", fail)
    result = call("plan", "paper-7", code=code)
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch):
    def fail(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr("exitflow.system.system.load_system", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        call("plan", "paper-7")


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_signal_ends_with_its_code_and_leaves_no_worker(tmp_path, backend, number, code):
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # background jobs ignore it
    command = [sys.executable, "-c", listen + "from exitflow.cli.main import main; main()", "train", "paper-7", "--out"]
    command += [str(tmp_path / "run"), *TINY_OPTIONS, "--backend", backend, "--rounds", "100000"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "run" / "checkpoint.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code
        assert stderr == "exitflow: interrupted; `train --resume` goes on where it was\n"
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_methods_are_compared_with_what_their_training_takes(tmp_path):
    options = ["--methods", "exitflow,fedavg", "--out", tmp_path, "--backend", "serial", *TINY_OPTIONS]
    output = call("compare", "paper-7:80-15-5", *options).stdout
    columns = [line.split() for line in output.splitlines()[1:3]]  # folded, or it would not fit 80 columns
    assert columns == [
        ["bytes", "multiply-"],
        ["training", *["exit", "1", "exit", "2", "exit", "3", "as", "served"], "sent", "adds"],
    ]
    found = json.loads(call("compare", "paper-7:80-15-5", "--json", *options).stdout)
    assert set(found["methods"]) == {"exitflow", "fedavg"}
    assert found["weightings"] == {}
    assert found["methods"]["exitflow"]["bytes_sent"] > found["methods"]["fedavg"]["bytes_sent"] > 0
    assert found["methods"]["exitflow"]["multiply_adds"] > found["methods"]["fedavg"]["multiply_adds"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--methods", "fjrod"], "--methods: there is no method 'fjrod'; did you mean 'fjord'?"),
        (
            ["--methods", "fjord", "--set", 'model={family="common"}'],
            "method 'fjord': needs model family 'slim-resnet'",
        ),
    ],
)
def test_a_method_that_cannot_be_is_refused_with_a_sentence(tmp_path, options, sentence):
    result = call("compare", "examples/campus.toml", "--out", tmp_path / "none", *options, code=2)
    assert sentence in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0, "0"), (999, "999"), (1234, "1.23 k"), (5.6e9, "5.6 G"), (7e16, "70 P"), (999_600, "1 M")],
)
def test_amounts_are_short(value, expected):
    from exitflow.report.terminal import amount

    assert amount(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0.00"), (25, "25.00"), (0.25, "0.25"), (0.0556, "0.0556"), (0.002, "0.002")]
)
def test_rates_have_as_many_decimals_as_help(value, expected):
    from exitflow.report.terminal import rate

    assert rate(value) == expected


@pytest.mark.heavy
def test_explain_says_which_weightings_it_leaves_out():
    options = ["training.weighting=auto", "data.layer_shares=[0,0,1]"]
    output = call("explain", "paper-7", *TINY_OPTIONS, *(f"--set={each}" for each in options)).stdout
    assert "Left out, because this system cannot be trained under them: equal-weight, flops-prop" in output
    assert ": exit 1 has no data to train on: no node with data trains it; put a node there" in output
    assert "Least in total" not in output  # of one


def commands(group=main, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield from commands(command, (*path, name)) if isinstance(command, click.Group) else [((*path, name), command)]


@pytest.mark.parametrize(
    ("path", "command"), list(commands()), ids=lambda each: " ".join(each) if type(each) is tuple else ""
)
def test_every_command_refuses_what_is_empty_and_shows_an_example(path, command):
    assert isinstance(command, Command)
    text = command.get_help(click.Context(command))
    assert "Example:" in text
    assert f"exitflow {' '.join(path)} " in text
    assert len(command.get_short_help_str(200)) <= 65  # a line beside its name, in the list of commands
    prints_no_results = {"certs", "init", "serve", "federation init", "federation renew", "federation server"}
    prints_no_results |= {"federation node", "federation worker"}
    assert ("--json" in text) != (" ".join(path) in prints_no_results)
