"""`python -m paper`: the experiments behind the tables of a paper, and of ours, and their pages."""

from __future__ import annotations

import click

from exitflow.cli.program import Program


@click.group(
    "paper",
    cls=Program,
    modules={"reproduce": "paper.reproduce", "report": "paper.report"},
    resumed_by={"reproduce": "reproduce"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def main() -> None:
    """The tables of Kaplan et al. (AAAI 2025), and ours: run what is behind them, and write them down.

    \b
    Example:
      python -m paper reproduce table1 --data-dir data
      python -m paper report paper/results/small.jsonl --update docs/results.md
    """


if __name__ == "__main__":
    main()
