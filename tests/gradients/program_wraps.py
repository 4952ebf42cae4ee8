"""Predict ``DistributedOptimizer`` and local methods with replicas and plain torch."""

import torch


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def dense(grad):
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


class Wrap:
    """Model ``DistributedOptimizer``, or a group of ranks that averages gradients."""

    def __init__(
        self,
        oracle,
        ranks,
        op="average",
        backward_passes_per_step=1,
        compression=0.0,
        **_,
    ):
        self.oracle, self.ranks, self.op = oracle, list(ranks), op
        self.passes, self.done = backward_passes_per_step, 0
        self.sums, self.is_weighted = op == "sum", False
        self.weights = [1.0] * oracle.size
        self.optimizers = [None] * oracle.size
        self.known = set()  # parameters of replica 0 at the last reduction
        oracle.atol = max(oracle.atol, compression)

    def take(self, rank, optimizer):
        own = set(params_of(optimizer))
        for other in self.oracle.made:
            there = other.optimizers[rank]
            if other is not self and there is not None and own & set(params_of(there)):
                self.oracle.may_refuse = "two optimizers have one parameter"
        self.optimizers[rank] = optimizer

    def groups(self):
        if self.optimizers[-1] is None:
            return []
        return [list(zip(*(params_of(self.optimizers[r]) for r in self.ranks), strict=True))]

    def set_passes(self, passes):
        self.passes, self.done = passes, 0

    def weigh(self, rank, weight):
        if self.done:
            self.oracle.may_refuse = "the count changes between passes"
        self.weights[rank], self.is_weighted = weight, True

    def pass_is_over(self):
        self.done += 1
        if self.done >= self.passes:
            self.reduce()

    @torch.no_grad()
    def reduce(self):
        """Average the gradients of all replicas that are not reduced yet."""
        self.done = 0
        if self.op == "adasum" or self.optimizers[-1] is None:
            return
        firsts = {ps[0] for ps in self.groups()[0]}
        if self.sums and firsts - self.known and firsts & self.oracle.shared:
            self.oracle.may_refuse = "a parameter comes with its gradient while there is a sum"
        self.known = firsts
        for ps in self.groups()[0]:
            grads = [dense(p.grad) for p in ps]
            if ps[0] in self.oracle.shared or all(g is None for g in grads):
                continue
            weights = [self.weights[rank] for rank in self.ranks]
            base = self.oracle.base.pop(ps[0], None)
            if self.sums:
                base = torch.zeros_like(ps[0]) if base is None else base.to(ps[0].dtype)
                total = base + sum(g - base for g in grads if g is not None)
            else:
                rows = zip(weights, grads, strict=True)
                total = sum(
                    (w * g for w, g in rows if w and g is not None), torch.zeros_like(ps[0])
                )
                total = total / (sum(weights) or 1.0)
            for p in ps:
                sparse = p.grad is not None and p.grad.is_sparse
                p.grad = total.to_sparse(1) if sparse else total.clone()
            self.oracle.shared.add(ps[0])

    def before_step(self):
        if self.op == "adasum":
            self._before = [[p.detach().clone() for p in ps] for ps in self.groups()[0]]

    @torch.no_grad()
    def after_step(self):
        """Combine two replicas by Adasum: add orthogonal changes, average equal changes."""
        self.done = 0
        if self.op != "adasum":
            return
        for ps, olds in zip(self.groups()[0], self._before, strict=True):
            a, b = (p - old for p, old in zip(ps, olds, strict=True))
            dot, aa, bb = (float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b)))
            combined = a * (1 - dot / (2 * aa or 1)) + b * (1 - dot / (2 * bb or 1))
            for p, old in zip(ps, olds, strict=True):
                p.copy_(old + combined)

    def finish(self):
        """Do nothing: no work is pending."""


class Local:
    """Model the local methods: replicas step alone, and synchronize after some steps."""

    sums, done = False, 0

    def __init__(self, oracle, kind, steps=None, **options):
        self.oracle, self.kind, self.options = oracle, kind, options
        self.steps = steps or options["steps"]
        self.step = self.start = 0
        self.due, self.sent = 0, None
        self.agrees, self.is_counted = True, False
        size = oracle.size
        self.optimizers, self.models = [None] * size, [None] * size
        self.samples = [[[0.0, 0.0] for _ in range(size)] for _ in range(2)]
        self.of_step = [0.0] * size
        everywhere, nodes = [Wrap(oracle, range(size))], [Wrap(oracle, n) for n in oracle.nodes]
        if kind == "PostLocalSGD":
            self.phase = lambda step: everywhere if step < options["start"] else []
        elif kind == "HierarchicalLocalSGD" and options["node_steps"] == 1:
            self.phase = lambda _: nodes
        elif kind == "StagedSGD":
            self.phase = lambda step: nodes if self.cycles(step) else everywhere
        else:
            self.phase = lambda _: []
        self.wraps = everywhere + nodes

    def cycles(self, step):
        inside = self.options["warmup_steps"] <= step < self.options["cooldown_start"]
        return inside and len(self.oracle.nodes) > 1

    def take(self, rank, optimizer, model):
        self.optimizers[rank], self.models[rank] = optimizer, model
        for wrap in self.wraps:
            wrap.optimizers[rank] = optimizer
        if rank == self.oracle.size - 1:
            self.anchor = [p.detach().clone() for p in model.parameters()]
            self.momenta = [torch.zeros_like(p) for p in self.anchor]
            self.left_out, self.stepped = set(), set()
            self.trained = self.apart = self._trained()
            self.held = set()

    def groups(self):
        return [group for wrap in self.phase(self.step) for group in wrap.groups()]

    def _trained(self):
        return {i for i, p in enumerate(self.models[-1].parameters()) if p.requires_grad}

    def weigh(self, rank, num_samples, nominal):
        self.is_counted = True
        for wrap in self.wraps:
            wrap.weights[rank] = num_samples / nominal
        self.of_step[rank] += num_samples
        for sums in self.samples:
            sums[rank][0] += num_samples
            sums[rank][1] += nominal

    def skip(self, rank):
        for sums in self.samples:
            sums[rank][0] -= self.of_step[rank]

    def pass_is_over(self):
        self.reduce()

    def reduce(self):
        for wrap in self.phase(self.step):
            wrap.reduce()

    def before_step(self):
        """Average gradients only; no other state is averaged before a step."""

    def after_step(self):
        self.step += 1
        self.of_step = [0.0] * self.oracle.size
        rows = zip(*(model.parameters() for model in self.models), strict=True)
        self.stepped |= {i for i, ps in enumerate(rows) if any(p.grad is not None for p in ps)}
        in_round = self.step - self.start
        synchronous = len(self.phase(self.step - 1)) == 1
        self.agrees &= synchronous
        if self.kind == "StagedSGD":
            self._staged(in_round)
        elif synchronous and self.kind == "PostLocalSGD":
            self.start = self.step
            self._clear(range(self.oracle.size), (0, 1))
        elif in_round >= self.steps:
            self._end_round()
        elif in_round % self.options.get("node_steps", 0x7FFF) == 0 and in_round:
            for node in self.oracle.nodes:
                self._average(node, 1)
                self._clear(node, (1,))

    def finish(self):
        if self.agrees:
            return
        if not sum(self._weights(range(self.oracle.size), 0)):
            self.samples[0] = [[1.0, 1.0] for _ in range(self.oracle.size)]
        self._end_round()

    @torch.no_grad()
    def _end_round(self):
        self._take_over()
        everybody = range(self.oracle.size)
        if self.kind == "DiLoCo":
            if sum(self._weights(everybody, 0)):
                self._outer_step(self._means(everybody, 0))
        else:
            self._average(everybody, 0)
        if self.options.get("state") == "average" or self.kind == "StagedSGD":
            self._average_states()
        if self.options.get("state") == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        self._clear(everybody, (0, 1))
        self.start, self.agrees = self.step, True

    def _staged(self, in_round):
        before, self.trained = self.trained, self._trained()
        self.apart = self.apart | before | self.trained
        if self.step >= self.due:
            self._take_over()
        was, now = self.cycles(self.step - 1), self.cycles(self.step)
        if was and not now:
            self._end_round()
        elif was and in_round >= self.steps:
            self._take_over()
            self.sent, delay = self._means(range(self.oracle.size), 0), self.options["delay"]
            self.due = self.step + delay
            self.sent = {i: self.sent[i] for i in self.apart}
            self.held, self.apart = self.apart - self.trained, self.trained
            self.start, self.agrees = self.step, not delay
            if not delay:
                self._take_over()
            self._clear(range(self.oracle.size), (0,))
        elif not was:
            self.start = self.step
            self._clear(range(self.oracle.size), (0,))

    @torch.no_grad()
    def _take_over(self):
        if self.sent is None:
            return
        own = 2 * self.options["delay"]
        keep = own / (own + len(self.oracle.nodes))
        for model in self.models:
            for i, p in enumerate(model.parameters()):
                if (mean := self.sent.get(i)) is not None:
                    p.copy_(mean if i in self.held else keep * p + (1 - keep) * mean)
        self.sent = None

    def _weights(self, ranks, level):
        """Return the weights: samples since the last synchronization, or 1 without counts."""
        sums = [self.samples[level][rank] for rank in ranks]
        return [n / (nominal or 1.0) if self.is_counted else 1.0 for n, nominal in sums]

    @torch.no_grad()
    def _means(self, ranks, level):
        weights = self._weights(ranks, level)
        rows = zip(*(self.models[rank].parameters() for rank in ranks), strict=True)
        return [mean(row, weights) for row in rows]

    @torch.no_grad()
    def _average(self, ranks, level):
        if not sum(self._weights(ranks, level)):
            return
        means = self._means(ranks, level)
        for rank in ranks:
            for p, value in zip(self.models[rank].parameters(), means, strict=True):
                p.copy_(value)

    @torch.no_grad()
    def _outer_step(self, means):
        """Skip frozen parameters; a parameter that was frozen restarts from the mean."""
        lr, mu = self.options.get("outer_lr", 0.7), self.options.get("outer_momentum", 0.9)
        rows = zip(*(model.parameters() for model in self.models), strict=True)
        for i, (ps, mean) in enumerate(zip(rows, means, strict=True)):
            anchor, momentum = self.anchor[i], self.momenta[i]
            is_frozen = not ps[0].requires_grad and i not in self.stepped
            if is_frozen and all(p.equal(anchor) for p in ps):
                self.left_out.add(i)
                continue
            if i in self.left_out:
                self.left_out.discard(i)
                anchor.copy_(mean)
                momentum.zero_()
            else:
                momentum.mul_(mu).add_(anchor - mean)
                anchor.sub_(lr * (anchor - mean + mu * momentum))
            for p in ps:
                p.copy_(anchor)
        self.stepped.clear()

    @torch.no_grad()
    def _average_states(self):
        weights = self._weights(range(self.oracle.size), 0)
        for ps in zip(*map(params_of, self.optimizers), strict=True):
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, ps, strict=True)]
            keys = {k for s in states for k, v in s.items() if torch.is_tensor(v)}
            if any(not keys <= set(state) for state in states):
                self.oracle.unclear = "only some replicas have an optimizer state"
                continue
            for key in keys:
                value = mean([state[key] for state in states], weights)
                value = value.round() if key == "step" else value
                for state in states:
                    state[key].copy_(value)

    def _clear(self, ranks, levels):
        for level in levels:
            for rank in ranks:
                self.samples[level][rank] = [0.0, 0.0]


def mean(values, weights):
    rows = zip(values, weights, strict=True)
    return sum(w * v for v, w in rows if w) / (sum(weights) or 1.0)
