import pytest

from exitflow.config import parse_changes
from exitflow.data.data_spec import DataSpec
from exitflow.errors import ConfigError
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.training_spec import TrainingSpec
from exitflow.models.specs import EarlyExitResNet
from exitflow.system.presets import PRESETS
from exitflow.system.system import load_system, serving_as
from exitflow.topology.graph import Link, Node
from exitflow.topology.rates import serving_plan

CAMPUS = """
name = "campus"
[[tiers]]
name = "device"
count = 4
exit = 1
arrival_rate = 25.0
max_transfer_rate = 5.0
[[tiers]]
name = "edge"
count = 2
exit = 2
max_transfer_rate = 2.5
[[tiers]]
name = "cloud"
count = 1
exit = 3
"""


def load(tmp_path, text, *overrides):
    path = tmp_path / "system.toml"
    path.write_text(text)
    return load_system(path, overrides)


def test_a_file_becomes_a_system(tmp_path):
    system = load(tmp_path, CAMPUS)
    assert system.name == "campus"
    assert [node.name for node in system.topology.nodes[:5]] == [
        "device-0",
        "device-1",
        "device-2",
        "device-3",
        "edge-0",
    ]
    assert serving_plan(system.topology).exit_share.tolist() == pytest.approx([0.8, 0.15, 0.05])
    assert system.model.exit_blocks == (1, 4, 8)
    assert system.model.heads == ("grid", "grid", "gap")
    assert system.training.server_step == "coverage"


def test_irregular_nodes_join_a_regular_tree(tmp_path):
    extra = """
[[nodes]]
name = "camera-7"
exit = 1
arrival_rate = 40
parents = [{ name = "edge-0", max_transfer_rate = 10.0 }, { name = "edge-1", max_transfer_rate = 5.0 }]
"""
    system = load(tmp_path, CAMPUS + extra)
    assert system.topology.nodes[-1] == Node("camera-7", 1, 40.0, (Link("edge-0", 10.0), Link("edge-1", 5.0)))


def test_what_is_written_reads_back_the_same(tmp_path):
    for source in (*PRESETS, "paper-7:60-30-10"):
        system = load_system(source, ["training.sampling={}", "training.local_steps=3"])
        (tmp_path / "again.toml").write_text(system.to_toml())
        assert load_system(tmp_path / "again.toml") == system


def test_the_name_is_that_of_the_file_where_it_gives_none(tmp_path):
    assert load(tmp_path, CAMPUS.replace('name = "campus"', "")).name == "system"


def test_overrides_go_before_the_file(tmp_path):
    overrides = ("training.rounds=7", "model.heads=gap", "data.layer_shares=[1, 2, 3]", "training.weighting=flops-prop")
    system = load(tmp_path, CAMPUS, *overrides)
    assert system.training.rounds == 7
    assert system.training.weighting == "flops-prop"
    assert system.model.heads == ("gap", "gap", "gap")
    assert system.data.layer_shares == (1.0, 2.0, 3.0)


def test_the_papers_presets_are_its_set_up():
    system = load_system("paper-17-cifar100:5-15-80")
    assert len(system.topology.nodes) == 17
    assert system.model.width == 64
    assert system.model.strides == (1, 1, 2, 2)
    assert system.model.exit_blocks == (4, 6, 8)
    assert system.model.heads == ("gap",) * 3
    assert system.data.name == "cifar100"
    training = system.training
    assert (training.rounds, training.batch_size, training.learning_rate) == (100, 128, 0.1)
    assert (training.optimiser.momentum, training.optimiser.weight_decay, training.server_step) == (0.9, 5e-4, "paper")


TIERS_END = CAMPUS.index('[[tiers]]\nname = "cloud"')


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "system.toml: the system is empty"),
        ("name = ", "system.toml: is not valid TOML"),
        (
            CAMPUS.replace("count = 4", 'count = "four"'),
            "system.toml: tiers[0].count: expected a whole number, got 'four'",
        ),
        (CAMPUS.replace("count = 4", "count = 1000000"), "tiers: at most 1,000,000 nodes in all, got 1,000,003"),
        (CAMPUS.replace("count = 4", "count = 0"), "tiers[0].count: must be from 1 to 1,000,000, got 0"),
        (
            CAMPUS.replace("count = 4", "count = 1000000000"),
            "tiers[0].count: must be from 1 to 1,000,000, got 1000000000",
        ),
        (
            CAMPUS.replace("count = 4", f"count = {10**30}"),
            "tiers[0].count: expected a whole number of at most 64 bits",
        ),
        (CAMPUS.replace("25.0", str(10**400)), "tiers[0].arrival_rate: expected a number of at most 64 bits"),
        (CAMPUS.replace("25.0", "9" * 5000), "system.toml: is not valid TOML"),
        (CAMPUS.replace("25.0", "[" * 100_000), "system.toml: is not valid TOML"),
        (CAMPUS.replace("25.0", "1e308"), "tiers[0].arrival_rate: a rate must be a finite number"),
        (CAMPUS.replace("25.0", "0.0"), "system.toml: no requests arrive"),
        (CAMPUS.replace('"edge"', '"' + "é" * 51 + '"'), "tiers[1].name: must be letters, digits"),
        (CAMPUS.replace('"campus"', r'"cam\npus"'), "name: expected a name of 1 to 200 printable characters"),
        (CAMPUS + "[model]\nwidth = 1000000\n", "model.width: 1000000 gives the last stage 8,000,000 channels"),
        (
            CAMPUS + "[model]\nblocks = [1000000000]\nstrides = [1]\n",
            "model.blocks: each must be at least 1, and 1,000",
        ),
        (CAMPUS + "[model]\nstrides = [1, 2, 2, 1000]\n", "model.strides: one from 1 to 64"),
        (
            CAMPUS + "[training.optimiser]\nweight_decay = 1e300\n",
            "training.optimiser.weight_decay: must be from 0 to 1e+30, got 1e+300",
        ),
        (CAMPUS.replace("count = 4", "count = true"), "tiers[0].count: expected a whole number, got True"),
        (CAMPUS.replace("exit = 1", "exit = 1.0"), "tiers[0].exit: expected a whole number, got 1.0"),
        (
            CAMPUS.replace("arrival_rate", "arival_rate"),
            "tiers[0].arival_rate: unknown key; did you mean 'arrival_rate'?",
        ),
        (CAMPUS.replace("25.0", "-25.0"), "tiers[0].arrival_rate: a rate must be a finite number"),
        (CAMPUS.replace("25.0", "nan"), "tiers[0].arrival_rate: a rate must be a finite number"),
        (CAMPUS.replace("2.5\n", "inf\n"), "tiers[1].max_transfer_rate: a rate must be a finite number"),
        (CAMPUS.replace("count = 4\n", ""), "tiers[0].count: is missing"),
        (
            CAMPUS.replace("exit = 2", "exit = 1"),
            "node 'edge-0': exit 1 must exceed the exit of its child 'device-0' (1)",
        ),
        (CAMPUS.replace('"edge"', '"device"'), "two nodes have the name 'device-0'"),
        (CAMPUS + "[modle]\n", "modle: unknown key; did you mean 'model'?"),
        (CAMPUS + "[model]\nwidht = 3\n", "model.widht: unknown key; did you mean 'width'?"),
        (CAMPUS + "[model]\nfamily = 'resnet'\n", "model.family: there is no model family 'resnet'"),
        (CAMPUS + "[model]\nheads = 'grd'\n", "model.heads: must be one of 'gap', 'grid', got 'grd'"),
        (CAMPUS + "[model]\nheads = ['gap', 'x', 'gap']\n", "model.heads[1]: must be one of 'gap', 'grid', got 'x'"),
        (
            CAMPUS + "[model]\nexit_blocks = [1, 4, 6, 8]\n",
            "model.exit_blocks: the model has 4 exits, but no node stands at",
        ),
        (CAMPUS + "model = 3\n", "tiers[2].model: unknown key"),
        ("model = 3\n" + CAMPUS, "model: expected a table, got 3"),
        ("tiers = 3\n", "tiers: expected an array of tables ([[tiers]]), got 3"),
        (CAMPUS + "[data]\nname = 'cifar'\n", "data.name: there is no data set 'cifar'; did you mean 'cifar10'?"),
        (
            CAMPUS + "[data]\npartition = 'even'\n",
            "data.partition: there is no partition 'even'; known are: biased, equal, highly-biased; one of your own is",
        ),
        (CAMPUS + "[data]\nlayer_shares = [1, 2]\n", "data.layer_shares: one for each of the 3 exits, got 2"),
        (CAMPUS + "[data]\nlayer_shares = [1, 2, 0]\n", "exit 3 has no data to train on"),
        (CAMPUS + "[training]\nweighting = 'serving'\n", "training.weighting: there is no weighting 'serving'"),
        (CAMPUS + "[training]\nrounds = 0\n", "training.rounds: must be from 1 to 1,000,000,000, got 0"),
        (
            CAMPUS + "[training.optimiser]\nmomentum = 1.0\n",
            "training.optimiser.momentum: must be from 0 to below 1, got 1.0",
        ),
        (CAMPUS + "[training]\nlearning_rate = nan\n", "training.learning_rate: must be above 0, up to 1e+30, got nan"),
        (CAMPUS + "[training]\nhelp_probability = 0.7\n", "training.help_probability: 0.7 for each of 2 lower exits"),
        (CAMPUS + "[training.sampling]\ndevice-0 = 'x'\n", "training.sampling.device-0: expected a list, got 'x'"),
        (
            CAMPUS + "[training]\nrounds = 5\n[training.schedule]\nwarmup_rounds = 5\n",
            "training.schedule.warmup_rounds: must",
        ),
        (
            CAMPUS + "[[nodes]]\nname = 'x'\nexit = 1\nparents = ['edge-0']\n",
            "nodes[0].parents[0]: expected a table, got 'edge-0'",
        ),
        (CAMPUS + "[[nodes]]\nname = 'x'\nexit = 1\nparents = [{name = 'edg-0'}]\n", "did you mean 'edge-0'?"),
        ("[[nodes]]\nname = 'a'\nexit = 1\nparents = [{name = 'a'}]\n", "the links form a cycle: a -> a"),
        (CAMPUS[:TIERS_END] + "[model]\nexit_blocks = [1, 4, 8]\n", "no node stands at exit 3"),
    ],
)
def test_an_invalid_file_is_refused_with_one_sentence_that_names_file_and_key(tmp_path, text, sentence):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "system.toml"))
    assert "\n" not in str(caught.value)


def test_an_exit_between_nodes_needs_help_to_be_trained():
    text = ["training.help_probability=0.1"]
    gap = {
        "nodes": [{"name": "d", "exit": 1, "arrival_rate": 1.0, "parents": [{"name": "c"}]}, {"name": "c", "exit": 3}]
    }
    from exitflow.system.system import decode_system

    with pytest.raises(ConfigError, match="exit 2 has no data to train on"):
        decode_system(gap, ["training.weighting=serving-rate"])
    assert decode_system(gap, text).topology.num_exits == 3
    assert decode_system(gap).training.trains_all_exits


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("paper-8", "there is no such file, and no preset 'paper-8'; did you mean 'paper-"),
        ("paper-7:80-20", "paper-7:80-20: the paper's trees have 3 exits, setting '80-20' has 2 parts"),
        ("paper-7:a-b-c", "paper-7:a-b-c: a serving setting gives each exit's percentage"),
        ("missing.toml", "missing.toml: no such file"),
    ],
)
def test_a_source_that_is_none_is_refused(source, sentence):
    with pytest.raises(ConfigError) as caught:
        load_system(source)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.rounds", "--set: expected key=value, such as training.rounds=5, got 'training.rounds'"),
        ("=5", "--set: expected key=value"),
        ("training.round=5", "training.round: unknown key; did you mean 'rounds'?"),
        ("training.rounds=five", "training.rounds: expected a whole number, got 'five'"),
        ("name.x=5", "name: is not a table"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(override, sentence):
    with pytest.raises(ConfigError) as caught:
        load_system("paper-7", [override])
    assert sentence in str(caught.value)


def test_a_folder_does_not_hide_the_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper-7").mkdir()
    assert len(load_system("paper-7").topology.nodes) == 7
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"there is no such file, and no preset 'runs'"):
        load_system("runs")


@pytest.mark.parametrize("exits", ["[3,3,3]", "[2,2,3]", "[1,2,4]"])
def test_separate_networks_that_nodes_share_are_served_by_the_exits_of_the_tree(exits):
    system = load_system("paper-7", [f"model={{family='separate',exits={exits}}}"])
    assert serving_plan(serving_as(system, "60-30-10")).exit_share.tolist() == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: DataSpec(partition="bised"), "partition: there is no partition 'bised'; did you mean 'biased'?"),
        (
            lambda: TrainingSpec(server_step="papr"),
            "server_step: there is no server step 'papr'; did you mean 'paper'?",
        ),
        (lambda: TrainingSpec(local_exits="al"), "local_exits: must be one of 'all', 'one', 'each-step', got 'al'"),
        (lambda: EarlyExitResNet(heads="grd"), "heads: must be one of 'gap', 'grid', got 'grd'"),
        (lambda: EarlyExitResNet(heads=("gap", "grd", "gap")), "heads: must be one of 'gap', 'grid', got 'grd'"),
        (lambda: FederationSpec(compression="zip"), "compression: must be one of 'none', 'fp16', 'int8', 'top-k'"),
    ],
)
def test_choices_are_checked_in_python_too(build, sentence):
    with pytest.raises(ConfigError) as caught:
        build()
    assert sentence in str(caught.value)


def test_a_directory_or_bytes_are_no_system_file(tmp_path):
    (tmp_path / "x.toml").mkdir()
    with pytest.raises(ConfigError, match=r"x.toml: is a directory"):
        load_system(tmp_path / "x.toml")
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf" + CAMPUS.encode())
    assert load_system(tmp_path / "bom.toml").name == "campus"
    (tmp_path / "y.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"y.toml: is not a text file in UTF-8"):
        load_system(tmp_path / "y.toml")


def test_what_is_set_inside_a_table_of_a_preset_is_set_for_nobody_else():
    assert load_system("paper-7", ["training.optimiser.momentum=0.5"]).training.optimiser.momentum == 0.5
    assert load_system("paper-7").training.optimiser.momentum == 0.9


def test_changes_from_python_keep_their_types():
    changes = {"training.rounds": 5, "data.dir": "7", "training.exit_weights": (1.0, 0.5, 0.0), "name": "true"}
    system = load_system("paper-7", changes)
    assert (system.training.rounds, system.data.dir, system.name) == (5, "7", "true")
    assert system.training.exit_weights == (1.0, 0.5, 0.0)
    with pytest.raises(ConfigError, match=r"paper-7: training.rounds: expected a whole number, got '5'"):
        load_system("paper-7", {"training.rounds": "5"})


def test_of_two_texts_for_one_key_the_last_holds_where_it_stands():
    texts = ["data.dir=x", 'data={name="digits"}', "data.dir=y"]
    assert list(parse_changes(texts).items()) == [("data", {"name": "digits"}), ("data.dir", "y")]
    assert load_system("paper-7", texts).data.dir == "y"


@pytest.mark.parametrize(
    ("source", "overrides", "problem"),
    [
        (5, (), "source: expected the path of a TOML file or the name of a preset, got 5"),
        ({"name": "x"}, (), "source: expected the path of a TOML file or the name of a preset"),
        ("paper-7", 5, "overrides: expected .* got 5"),
        ("paper-7", "training.rounds=5", "overrides: expected .* got 'training.rounds=5'"),
    ],
)
def test_what_is_no_system_is_refused_with_a_sentence(source, overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        load_system(source, overrides)
