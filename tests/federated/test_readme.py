"""The room's README shows the loop as it is."""

import inspect
import re
import textwrap
from pathlib import Path

import exitflow.federated.loop as loop


def lines(text):
    return [line for line in textwrap.dedent(text).splitlines() if line.strip()]


def test_one_round_in_the_readme_is_the_loop_word_for_word():
    readme = Path(loop.__file__).with_name("README.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    source = inspect.getsource(loop.run_rounds)
    body = source[source.index("exit_weights =") :].partition("        yield")[0]
    assert lines(shown) == lines("        " + body)
