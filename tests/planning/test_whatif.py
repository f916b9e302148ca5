import pytest

from exitflow.errors import ConfigError
from exitflow.planning.whatif import parse_vary, what_if

SYSTEM = """
[[tiers]]
name = "device"
count = 4
exit = 1
arrival_rate = 10
max_transfer_rate = 5
service_ms = 4
[[tiers]]
name = "cloud"
count = 1
exit = 2
service_ms = 20
"""


@pytest.fixture
def system(tmp_path):
    path = tmp_path / "campus.toml"
    path.write_text(SYSTEM)
    return str(path)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2,4", (1, 2, 4)),
        ("a.b=1..4", (1, 2, 3, 4)),
        ("a.b=0.5..5", (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)),
        ("a.b=0..90", (0, 10, 20, 30, 40, 50, 60, 70, 80, 90)),
        ("a.b=x,y", ("x", "y")),
    ],
)
def test_values_are_listed_or_given_as_a_range(text, values):
    assert parse_vary(text).values == pytest.approx(values) if isinstance(values[0], float) else values
    assert parse_vary(text).key == "a.b"


@pytest.mark.parametrize("text", ["a.b", "a.b=", "=1", "a.b=4..1", "a.b=1..x", "a.b=1..inf"])
def test_values_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        parse_vary(text)
    assert refused.value.key == "--vary"


def test_every_combination_is_planned(system):
    found = what_if(system, [parse_vary("tiers.device.max_transfer_rate=1,5"), parse_vary("tiers.device.count=2,4")])
    assert [point.values for point in found.points] == [(1, 2), (1, 4), (5, 2), (5, 4)]
    shares = [point.prospect.plan.exit_share[1] for point in found.points]
    assert shares == pytest.approx([0.1, 0.1, 0.5, 0.5])


def test_what_is_better_in_nothing_is_not_on_the_front(system):
    # More cores at the devices cost nothing here, and make answers earlier; a deeper share takes longer.
    found = what_if(
        system, [parse_vary("tiers.device.service_ms=4,8"), parse_vary("tiers.device.max_transfer_rate=1,5")]
    )
    assert [point.on_front for point in found.points] == [True, True, False, False]


def test_a_combination_that_cannot_be_says_why(system):
    found = what_if(system, [parse_vary("tiers.device.max_transfer_rate=5,20"), parse_vary("tiers.device.count=4,6")])
    assert [bool(point.problem) for point in found.points] == [False, False, False, True]
    assert "node cloud-0 would be busy 120 % of the time" in found.points[-1].problem
    with pytest.raises(ConfigError, match="none of the 2 combinations can be"):
        what_if(system, [parse_vary("tiers.device.count=0,-1")])
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        what_if(system, [parse_vary("tiers.devise.count=1")])


def test_too_many_combinations_are_refused(system):
    ten = [parse_vary(f"tiers.device.{key}=1..20") for key in ("count", "max_transfer_rate", "service_ms", "cores")]
    with pytest.raises(ConfigError, match="makes 160,000 combinations, at most 10,000"):
        what_if(system, ten)
