"""Eviction by session over lists (vllm-project/vllm#50422); compiled ones are held against it."""

from dataclasses import dataclass
from math import inf, log2


@dataclass(eq=False)
class Session:
    last: int
    depth: int
    uses: float
    blocks: list

    def score(self):
        return self.last + 1500 * self.uses + 30000 / (1 + self.depth / 8)


class SessionCache:
    """A cache of ``size`` blocks; ``ghosts``: blocks that it remembers without having them."""

    def __init__(self, size, ghosts=inf):
        self.size, self.ghosts, self.now = size, ghosts, 0
        self.sessions, self.ghost, self.absent = [], {}, []
        self.declined = self.evicted = 0

    def session_of(self, block):
        return next((session for session in self.sessions if block in session.blocks), None)

    def __contains__(self, block):
        return self.session_of(block) is not None

    def come(self, blocks):
        """Ask for the blocks of a context."""
        self.now += 1
        used = set()
        for place, block in enumerate(blocks):
            session = self.session_of(block)
            if session is None and block not in self.absent:
                self.absent.append(block)
            weight = 1 if session is None else 12
            self.ghost[block] = self.ghost.get(block, 0.0) + weight / log2(place + 2)
            used |= {session} - {None}
        for session in used:
            session.uses += 1
            session.last = self.now
        if self.now % 500 == 0:
            for session in self.sessions:
                session.uses *= 0.9
            self.ghost = {block: 0.9 * score for block, score in self.ghost.items()}
        self.forget()

    def forget(self):
        while len(self.absent) > self.ghosts:
            self.ghost.pop(self.absent.pop(0), None)

    def store(self, blocks, before, goes_on):
        """Store blocks that come behind ``before`` others, all or none."""
        for block in blocks:
            if block not in self and block not in self.absent:
                self.absent.append(block)
        self.keep(blocks, before, goes_on)
        self.forget()

    def keep(self, blocks, before, goes_on):
        new = [block for block in blocks if block not in self]
        if not new:
            return
        depth = before + blocks.index(new[0])
        lacking = len(new) - self.size + sum(len(session.blocks) for session in self.sessions)
        if lacking > 0:
            first = self.now + 30000 / (1 + depth / 8)
            worst = min((session.score() for session in self.sessions), default=-inf)
            ranked = sorted(self.sessions, key=Session.score)
            free = [b for s in ranked for b in reversed(s.blocks) if b not in blocks]
            if len(free) < lacking or (goes_on not in self.sessions and first < worst):
                self.declined += 1
                return
            for block in free[:lacking]:
                self.session_of(block).blocks.remove(block)
                self.absent.append(block)
                self.evicted += 1
            self.sessions = [session for session in self.sessions if session.blocks]
        if goes_on in self.sessions:
            goes_on.last = self.now
        else:
            seeds = sum(self.ghost.get(block, 0.0) for block in new) / 12
            goes_on = Session(self.now, depth, seeds, [])
            self.sessions.append(goes_on)
        goes_on.blocks += new
        for block in new:
            self.absent.remove(block)
