"""ARC by lists, which compiled ones are held against."""


class Arc:
    """ARC over lists, as its paper has it."""

    def __init__(self, size):
        self.size, self.target = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []  # the oldest first

    def __contains__(self, block):
        return block in self.t1 or block in self.t2

    def make_room(self, in_b2):
        over = len(self.t1) > self.target or (in_b2 and len(self.t1) == self.target)
        if self.t1 and (over or not self.t2):
            self.b1.append(self.t1.pop(0))
        elif self.t2:
            self.b2.append(self.t2.pop(0))

    def use(self, block):
        for held in (self.t1, self.t2):
            if block in held:
                held.remove(block)
                return self.t2.append(block)
        if block in self.b1:
            more = max(1.0, len(self.b2) / len(self.b1))
            self.target = min(self.target + more, self.size)
            self.make_room(False)
            self.b1.remove(block)
            return self.t2.append(block)
        if block in self.b2:
            self.target = max(self.target - max(1.0, len(self.b1) / len(self.b2)), 0.0)
            self.make_room(True)
            self.b2.remove(block)
            return self.t2.append(block)
        total = sum(map(len, (self.t1, self.t2, self.b1, self.b2)))
        if len(self.t1) + len(self.b1) == self.size:
            if len(self.t1) < self.size:
                self.b1.pop(0)
                self.make_room(False)
            else:
                self.t1.pop(0)
        elif total >= self.size:
            if total == 2 * self.size:
                self.b2.pop(0)
            self.make_room(False)
        return self.t1.append(block)
