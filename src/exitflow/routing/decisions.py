"""Every decision of a node in one place: who answers a sample, who is asked about it, and why somebody else is not.

1. A node answers what it is sure of: its confidence reaches the threshold. (Where exits answer together, it is the
   confidence of the blended answer.)
2. The others go to a parent, the hardest first, if a link is open, has a token, and the caller has time left.
3. Who cannot be asked about is answered here. So is a sample whose parent fails, unless another parent can be asked
   within the same limits: the node's own answer is there all the time.
4. Some sure answers are asked about as well, to see how good they are, where a link has room to spare.

A `Router` keeps no network and no time: a serving node tells it the real one, a simulation a virtual one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from exitflow.routing.confidence import serves
from exitflow.routing.link_state import LinkState
from exitflow.routing.rate_control import FloatArray, ForwardControl

FAIR_TIME = 0.5  # part of `forward_timeout`: whose request has less left is in a hurry, and does not judge a parent
DEADLINE_MARGIN = 0.9  # of the time left is given to a parent; the rest is for answering locally after all
LEAST_TIME = 0.004  # seconds: with less left, a parent is not asked
AUDIT_SPARE = 0.6  # part of the burst that an audit leaves


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a batch. Who is asked about has given up a token; the three counts say why others are not."""

    parents: list[str | None]  # of each sample; None: the node's own answer is given
    audits: Sequence[tuple[int, str]]  # (sample, parent) that is asked although the node was sure
    out_of_tokens: int  # no link had room
    no_time: int  # the caller's deadline is too near
    cut_off: int  # every link is cut: what the calibration would have forwarded


@dataclass(frozen=True)
class Rules:
    """The settings on which a node's decisions depend."""

    forward_timeout: float = 1.0  # seconds until the own answer is given instead
    audit_share: float = 0.0  # of the sure answers


class Router:
    """Decides for one node who answers a sample and which parent is asked."""

    def __init__(
        self, name: str, rules: Rules, control: ForwardControl, links: Mapping[str, LinkState], cut: float
    ) -> None:
        """`cut` is the calibrated threshold; `links` are those to the parents, whose state others keep."""
        self._rules, self._links = rules, links
        self._random = random.Random(name)
        self.adopt(control, cut)

    def adopt(self, control: ForwardControl, cut: float) -> None:
        """Decide by another bundle's calibration from now on; what is under way takes its tokens there too."""
        self.control, self._cut = control, cut

    @property
    def open_parents(self) -> list[str]:
        """Those whose link is not cut."""
        return [name for name, link in self._links.items() if link.open]

    def decide(self, confidences: FloatArray, deadlines: Sequence[float], now: float) -> Decision:
        """Decide on a batch that was just computed; `deadlines` are those of the callers, one for each sample."""
        parents: list[str | None] = [None] * len(confidences)
        open_parents = self.open_parents
        hard = self.control.hardest_first(confidences, open_parents, now)
        if not self._links:
            return Decision(parents, (), 0, 0, 0)
        if not open_parents:
            return Decision(parents, (), 0, 0, int((~serves(confidences, self._cut)).sum()))
        out_of_tokens = no_time = 0
        for row in hard:
            if deadlines[row] - now < LEAST_TIME:
                no_time += 1
            elif (parent := self.control.take_for(confidences[row], open_parents, now)) is None:
                out_of_tokens += 1
            else:
                parents[row] = parent
        audits = self._audits([row for row in range(len(parents)) if row not in hard], open_parents, now)
        return Decision(parents, audits, out_of_tokens, no_time, 0)

    def _audits(self, sure: Sequence[int], open_parents: Sequence[str], now: float) -> Sequence[tuple[int, str]]:
        chosen = [row for row in sure if self._random.random() < self._rules.audit_share]
        reserved = [(row, self.control.reserve(open_parents, now, spare=AUDIT_SPARE)) for row in chosen]
        return [(row, parent) for row, parent in reserved if parent is not None]

    def is_in_a_hurry(self, deadline: float, now: float) -> bool:
        """Whether the deadline is so near that others must not be asked about together with this sample."""
        return deadline - now < FAIR_TIME * self._rules.forward_timeout

    def timeout(self, deadline: float, now: float) -> float:
        """Seconds that a parent is given."""
        return min(self._rules.forward_timeout, max((deadline - now) * DEADLINE_MARGIN - LEAST_TIME / 4, 0.001))

    def blame(self, reason: str, timeout: float) -> str:
        """Why asking failed: a parent that was given too little time has not failed by itself."""
        return "deadline" if reason == "timeout" and timeout < FAIR_TIME * self._rules.forward_timeout else reason

    def another(self, tried: Collection[str], count: int, deadline: float, now: float) -> str | None:
        """A parent to ask about `count` samples after those `tried` have failed; the limit is kept in trouble too."""
        others = [name for name in self.open_parents if name not in tried]
        if not others or deadline - now < LEAST_TIME:
            return None
        return self.control.reserve(others, now, count=count)
