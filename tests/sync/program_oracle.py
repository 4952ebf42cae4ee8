"""What a training script means: its ranks as replicas in one process, by plain torch alone."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

LOOSE = 0.1
"""Distance from the oracle that is allowed where parameters are frozen in an outer round."""


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def kept(grad):
    return None if grad is None else (place_of(grad), grad.detach().clone())


def place_of(grad):
    return grad._version, 0 if grad.is_sparse else grad.data_ptr()


def dense(grad):
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


class Oracle:
    """All replicas of a script, carried out statement by statement.

    A statement has a meaning: ``each``, the line itself on every replica; ``backward``: then the
    gradients are reduced; ``partial``: they are not, as a rank has left backward out; ``step``:
    they are reduced first; ``raw``: a step that takes gradients as they are; ``sync``: reduced.
    """

    def __init__(self, prelude, size, nodes):
        self.size, self.nodes = size, nodes
        self.may_refuse = ""
        """Why an error on all ranks is right as well."""
        self.unclear = ""
        """Why more than one value is right; all ranks must have the same one."""
        self.atol = 0.0
        self.makers, self.made = [[] for _ in range(size)], []
        self.shared = set()
        """Parameters of replica 0 whose gradients were reduced, and are alike since."""
        self.replaced = set()
        """Those whose gradient is another tensor since."""
        self.base = {}
        """What was reduced already in gradients to which replicas have added."""
        self.names = [{"hvd": Stub(self, rank)} for rank in range(size)]
        for names in self.names:
            exec(prelude, names)

    def run(self, statement):
        if statement.meaning:
            for line, kind in statement.meaning:
                self._run(line, kind, statement.target)
        else:
            self._run(statement.line, statement.kind, statement.target)

    def models(self):
        return [names["model"] for names in self.names]

    def _run(self, line, kind, target):
        optimizers = [names.get(target) for names in self.names]
        made = [one for one in self.made if one.optimizers[0] in optimizers[:1]]
        for one in made if kind in ("step", "sync") else ():
            one.reduce()
        for one in made if kind == "step" else ():
            one.before_step()
        before = self._gradients()
        if kind == "join":
            self._join(line, target, made[0])
        else:
            for names in self.names:
                exec(line, names)
        if kind in ("backward", "partial"):
            self._after_backward(before, reduces=kind == "backward")
        elif kind == "each":
            self._after_edit(before)
            if "autograd.grad(" in line and any(one.sums for one in self.made):
                self.may_refuse = self.unclear = "a sum makes room for what does not come"
        for one in made if kind in ("step", "raw") else ():
            one.after_step()
        for one in self.made if kind == "finish" else ():
            one.finish()

    def _join(self, line, target, wrap):
        """Train on 2, 3, 2 batches; who has none adds zeros, and takes over the last model."""
        for k in range(3):
            active = [r for r in range(self.size) if k < 2 + r % 2]
            self.shared.clear()
            self.base.clear()
            for r, names in enumerate(self.names):
                names[target].zero_grad()
                if r in active:
                    exec(line, {**names, "k": k})
                elif wrap.is_weighted:
                    wrap.weights[r] = 0.0
            wrap.reduce()
            for r in active:
                self.names[r][target].step()
        for model in self.models():
            model.load_state_dict(self.names[1]["model"].state_dict())

    def _tuples(self):
        found = {}
        for one in self.made:
            for group in one.groups():
                found |= {ps[0]: (ps, one) for ps in group}
        return list(found.values())

    def _gradients(self):
        return {ps[0]: [(p.grad, kept(p.grad)) for p in ps] for ps, _ in self._tuples()}

    def _after_backward(self, before, *, reduces):
        touched = set()
        for ps, one in self._tuples():
            olds = before.get(ps[0], [(None, None)] * len(ps))
            if not any(changed(p, old) for p, old in zip(ps, olds, strict=True)):
                continue
            touched.add(ps[0])
            self.replaced.discard(ps[0])
            if ps[0] in self.shared:
                self.shared.discard(ps[0])
                if olds[0][0] is not None:
                    self.base[ps[0]] = dense(olds[0][1][1])
                    if one.sums and self.base[ps[0]].any():
                        self.may_refuse = "backward adds to a sum"
        if not reduces:
            return
        for one in self.made:
            firsts = {ps[0] for group in one.groups() for ps in group}
            if one.sums and firsts & touched and firsts & self.shared & self.replaced:
                self.may_refuse = "a sum was replaced, and backward goes on"
            if firsts & touched:
                one.pass_is_over()

    def _after_edit(self, before):
        for ps, one in self._tuples():
            olds = before.get(ps[0])
            edited = olds and any(changed(p, old) for p, old in zip(ps, olds, strict=True))
            if edited and one.done:
                self.may_refuse = "gradients were changed before the last pass"
            grads = [dense(p.grad) for p in ps]
            have = sum(g is not None for g in grads)
            if 0 < have < len(ps) and not ps[0].requires_grad:
                self.may_refuse = "frozen with a gradient on some ranks alone"
            if not any(g is not None and g.any() for g in grads):
                self.shared.discard(ps[0])
                self.base.pop(ps[0], None)
                continue
            if edited and olds[0][1] and place_of(ps[0].grad)[1] != olds[0][1][0][1]:
                self.replaced.add(ps[0])
            alike = all(g is not None and equal(g, grads[0]) for g in grads)
            if ps[0] in self.shared and not alike:
                self.shared.discard(ps[0])
                self.may_refuse = "gradients that differ were set by hand"
            elif ps[0] not in self.shared and edited and one.sums:
                self.may_refuse = self.unclear = "local gradients were edited, and then summed"


def equal(one, other):
    return one.shape == other.shape and one.allclose(other, 0.0, 0.0, equal_nan=True)


def changed(parameter, old):
    grad, copy = old
    if grad is None or parameter.grad is None:
        return parameter.grad is not grad
    return parameter.grad is not grad or place_of(parameter.grad) != copy[0]


class Stub:
    """What ``hvd`` is to a replica: it notes what is asked for."""

    Average, Sum, Adasum = "average", "sum", "adasum"
    Compression = SimpleNamespace(none=0.0, fp16=1e-3, bf16=1e-2)

    def __init__(self, oracle, rank):
        self._oracle, self._rank = oracle, rank
        for kind in ("LocalSGD", "PostLocalSGD", "HierarchicalLocalSGD", "DiLoCo", "StagedSGD"):
            setattr(self, kind, lambda *a, kind=kind, **k: self._method(kind, *a, **k))

    def rank(self):
        return self._rank

    def size(self):
        return self._oracle.size

    def broadcast_parameters(self, *_, **__):
        """Replicas are equal when this is called."""

    def _nth(self, make):
        """Return what all replicas make by this call."""
        oracle, own = self._oracle, self._oracle.makers[self._rank]
        own.append(None)
        if len(own) > len(oracle.made):
            oracle.made.append(make())
        return oracle.made[len(own) - 1]

    def DistributedOptimizer(self, optimizer, named=None, **options):  # noqa: N802, ARG002
        wrap = self._nth(lambda: Wrap(self._oracle, range(self._oracle.size), **options))
        wrap.take(self._rank, optimizer)
        optimizer.synchronize = lambda: None
        optimizer.skip_synchronize = nullcontext
        optimizer.set_num_samples = lambda n, nominal=1.0: wrap.weigh(self._rank, n / nominal)
        optimizer.set_backward_passes_per_step = wrap.set_passes
        plain = optimizer.zero_grad
        optimizer.zero_grad = lambda *a, **k: (wrap.set_passes(wrap.passes), plain(*a, **k))
        return optimizer

    def _method(self, kind, model, optimizer, *args, **options):
        method = self._nth(lambda: Local(self._oracle, kind, *args, **options))
        method.take(self._rank, optimizer, model)
        return SimpleNamespace(
            set_num_samples=lambda n, nominal=1.0: method.weigh(self._rank, n, nominal),
            skip_step=lambda: None,
            finish=lambda: None,
            averaged=nullcontext,
        )


class Wrap:
    """The meaning of ``DistributedOptimizer``, or of a group of ranks that averages gradients."""

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
        self.known = set()
        """Parameters of replica 0 at the last reduction."""
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
        """Let all gradients be those of all replicas; what was reduced stays as it is."""
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
        """Add what is at right angles, average what is equal: two replicas' changes."""
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
        """Nothing is left to do."""


class Local:
    """The meaning of the local methods: replicas step alone, and meet after some steps."""

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
            self.left_out = set()

    def groups(self):
        return [group for wrap in self.phase(self.step) for group in wrap.groups()]

    def weigh(self, rank, num_samples, nominal):
        self.is_counted = True
        for wrap in self.wraps:
            wrap.weights[rank] = num_samples / nominal
        for sums in self.samples:
            sums[rank][0] += num_samples
            sums[rank][1] += nominal

    def pass_is_over(self):
        self.reduce()

    def reduce(self):
        for wrap in self.phase(self.step):
            wrap.reduce()

    def before_step(self):
        """Gradients are all that is averaged before a step."""

    def after_step(self):
        self.step += 1
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
        if self.step >= self.due:
            self._take_over()
        was, now = self.cycles(self.step - 1), self.cycles(self.step)
        if was and not now:
            self._end_round()
        elif was and in_round >= self.steps:
            self._take_over()
            self.sent, delay = self._means(range(self.oracle.size), 0), self.options["delay"]
            self.due = self.step + delay
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
            for p, mean in zip(model.parameters(), self.sent, strict=True):
                p.copy_(keep * p + (1 - keep) * mean)
        self.sent = None

    def _weights(self, ranks, level):
        """Return what replicas count by: samples since they met, once any were counted."""
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
        """Leave frozen parameters alone; one that was frozen begins anew with the mean."""
        lr, mu = self.options.get("outer_lr", 0.7), self.options.get("outer_momentum", 0.9)
        rows = zip(*(model.parameters() for model in self.models), strict=True)
        for i, (ps, mean) in enumerate(zip(rows, means, strict=True)):
            anchor, momentum = self.anchor[i], self.momenta[i]
            is_frozen = not ps[0].requires_grad and all(p.grad is None for p in ps)
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
